"""Makes tools/ importable, and one tiny upstream a test."""
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

from tiny_upstream import FILES, Upstream, hunk, patch_text, write_sdist     # noqa: E402


@pytest.fixture
def upstream(tmp_path):
    tiny = Upstream(tmp_path, tmp_path / "index", tmp_path / "patches", tmp_path / "vendor")
    tiny.index.mkdir()
    tiny.patches.mkdir()
    tiny.pin(write_sdist(tiny.sdist, FILES))
    tiny.set_patches(first=patch_text("first", hunk(5, "line five")), second=patch_text("second", hunk(20, "line twenty")))
    return tiny
