"""Gives the extra `compat` the folder packaging/llama-cpp-python of this checkout.

A static requirement cannot name a folder relative to the project, and without it the
extras `demo` and `test` would build another llama-cpp-python from the package index
and put it over ours. A build from an unpacked sdist names the version instead,
because its folder is gone afterwards.
"""

import os
from pathlib import Path


def dynamic_metadata(settings, project):
    """The extra's one requirement; called by scikit-build-core in the project's folder."""
    shim = Path("packaging/llama-cpp-python").absolute()
    version = "0.3.36+pykvq"
    if Path("PKG-INFO").exists() or os.environ.get("PYKVQ_RELEASE"):
        requirement = f"llama-cpp-python=={version}"
    else:
        requirement = f"llama-cpp-python @ {shim.as_uri()}"
    return {"optional-dependencies": {"compat": [requirement]}}
