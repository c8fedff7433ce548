"""How the decode kernel's blocks divide the tiles of cache and window: plain C++, so it runs without a GPU."""
import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "ggml_kernels/cuda"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

PROGRAM = """
#include "kvq-tiles.h"
#include <cstdio>
#include <initializer_list>
int main() {
    for (int want : { 1, 2, 8, 33, 264 })
    for (int n_window = 0; n_window <= 300; n_window += 20)
    for (int n_tiles = 1; n_tiles <= 2100; n_tiles += n_tiles < 600 ? 1 : 97) {
        const int n = kvq_decode_splits(n_tiles, n_window, want);
        bool good = n >= 1 && n <= want && kvq_first_tile(0, n, n_tiles) == 0 && kvq_first_tile(n, n, n_tiles) == n_tiles;
        const int most = (n_tiles + n - 1)/n, least = n_tiles/n, n_short = most*n - n_tiles;
        for (int s = 0; s < n; ++s) {
            const int tiles = kvq_first_tile(s + 1, n, n_tiles) - kvq_first_tile(s, n, n_tiles);
            // every tile once, in even runs, the short ones where the window's tiles go
            good = good && tiles <= most && tiles >= least && (s < n_short ? tiles == most - 1 : tiles == most);
        }
        // no longer than without a window
        good = good && most <= (n_tiles + kvq_decode_splits(n_tiles, 0, want) - 1)/kvq_decode_splits(n_tiles, 0, want);
        if (!good) { std::printf("%d tiles, %d of a window, %d blocks of %d\\n", n_tiles, n_window, n, want); return 1; }
    }
    // 131072 tokens and 320 rows on 264 blocks: whoever has a window tile has a cache tile less
    const int with = kvq_first_tile(20, 264, 2048), others = 2048 - with;
    return with == 20*7 && others <= 244*8 ? 0 : 2;
}
"""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on PATH")
def test_every_tile_once_and_evenly(tmp_path):
    (tmp_path / "tiles.cpp").write_text(PROGRAM)
    subprocess.run([COMPILER, "-std=c++17", "-I", KERNELS,
                    tmp_path / "tiles.cpp", "-o", tmp_path / "tiles"], check=True)
    done = subprocess.run([tmp_path / "tiles"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
