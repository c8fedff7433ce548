"""Calibrated transforms: statistics of a model's keys, values and queries, and the GGUF metadata made of them."""
