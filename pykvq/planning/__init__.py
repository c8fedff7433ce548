"""What a model needs before it is loaded: memory by llama.cpp's own allocator without allocating, speed from the bytes of a token."""
