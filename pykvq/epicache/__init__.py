"""Long conversations in a fixed number of cache cells, after EpiCache (arXiv 2509.17396)."""
