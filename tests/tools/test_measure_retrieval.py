"""tools/measure_retrieval.py: the same texts for every cache, a type that the model does not take told and left out."""
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import architectures                             # noqa: E402

TOOL = Path(__file__).resolve().parents[2] / "tools/measure_retrieval.py"


def test_rows_for_types_and_windows(tmp_path):
    path = architectures.sliding_window(tmp_path / "m.gguf")
    result = subprocess.run([sys.executable, TOOL, path, "--contexts", "384", "--types", "turbo3", "oscar2", "--windows", "0,0", "4,512", "--texts", "2",
                             "--threads", "1", "--json"], capture_output=True, text=True, check=True)
    rows = json.loads(result.stdout)["rows"]
    assert [(r["cache"], r["sink"], r["recent"]) for r in rows] == [("f16", 0, 0), ("turbo3", 0, 0), ("turbo3", 4, 512)]
    assert all(r["facts"] == 10 and len(r["by_depth"]) == 5 and r["low"] <= r["found"] / 10 <= r["high"] for r in rows)
    assert rows[0]["lost"] == rows[0]["gained"] == 0
    assert "oscar2: " in result.stderr and "pykvq embed-rotations" in result.stderr and result.stderr.count("| turbo3 |") == 2
