"""The command `pykvq`. One module per command; modules import llama_cpp only when they run, so that --help is quick."""
from pykvq.cli.main import main

__all__ = ["main"]
