"""Codecs in numpy: the cache types bit for bit (turbo), and the papers behind them for vectors of any kind.

Names are loaded on first use, so that tools which need one module do not load the others.
"""
from importlib import import_module

_HOME = {"TurboQuantMSE": "turboquant", "TurboQuantProd": "turboquant", "mse_bounds": "turboquant", "prod_bounds": "turboquant",
         "MixedTurboQuant": "outliers", "outlier_channels": "outliers", "PolarQuant": "polarquant",
         "HaarRotation": "rotation", "HadamardRotation": "rotation", "sphere_codebook": "density", "sphere_mse": "density",
         "gaussian_codebook": "density", "RangeCoder": "entropy", "index_entropy": "entropy", "VectorIndex": "vector_index"}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
