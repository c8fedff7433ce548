"""tools/measure_epicache.py on a tiny model and a conversation made up here: every method gives a row, and rows give a table."""
import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "measure_epicache.py"
spec = importlib.util.spec_from_file_location("measure_epicache", TOOL)
measure = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = measure
spec.loader.exec_module(measure)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    def turn(i):
        return {"speaker": "Ann" if i % 2 else "Bob", "dia_id": f"D1:{i}", "text": f"{('Dogs like', 'Oak makes', 'Lisbon has')[i // 4 % 3]} thing {i}."}
    conversation = {"session_1_date_time": "1 May", "session_1": [turn(i) for i in range(28)]}
    qa = [{"question": f"What has thing {i}?", "answer": f"thing {i}", "evidence": [f"D1:{i}"], "category": 1} for i in (3, 9)]
    path = tmp_path_factory.mktemp("measure") / "data.json"
    path.write_text(json.dumps([{"conversation": conversation, "qa": [*qa, {"question": "x", "category": 5, "evidence": ["D1:1"]}]}]))
    return path


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["measure_epicache.py", *map(str, arguments)])
    measure.main()


def test_rows_and_table(talker, data, tmp_path, monkeypatch, capsys):
    vectors, out = tmp_path / "vectors.npz", tmp_path / "rows.jsonl"
    common = [talker, data, "--tokens", 1000, "--questions", 2]
    run(monkeypatch, *common, "--write-vectors", vectors, "--encoders", "model")
    run(monkeypatch, *common, "--vectors", vectors, "-o", out, "--run", "full:answers=0", "epicache:fraction=2,encoder=model,answers=0,kv=f16+turbo3",
        "epicache:encoder=model,answers=0,fraction=2,together=0", "retrieval:encoder=model,answers=0,fraction=2", "window:answers=0,fraction=2",
        "global:encoder=model,answers=0,fraction=2,prompt=400", "epicache:kv=nonsense,encoder=model")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["run"]["method"] for r in rows] == ["full", *["epicache"] * 3, "retrieval", "window", "global"]
    assert all(r["questions"] == 2 and r["log_p"] < 0 and r["peak_bytes"] > 0 for r in rows)
    assert rows[1]["stored_bytes"] > 2 * rows[2]["stored_bytes"] and rows[0]["history"] < rows[1]["build_tokens"] < 2 * rows[0]["history"]
    whole = rows[1]["log_p_each"]
    assert whole != rows[3]["log_p_each"] and "nonsense" in capsys.readouterr().err
    run(monkeypatch, "--table", out)
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 7 and "| +0.0% |" in table[2] and "kv turbo3" in table[4]


def test_no_time_left(talker, data, tmp_path, monkeypatch, capsys):
    run(monkeypatch, talker, data, "--tokens", 1000, "--questions", 1, "--minutes", 1e-9, "-o", tmp_path / "rows.jsonl")
    assert "the time is over" in capsys.readouterr().err and not (tmp_path / "rows.jsonl").exists()


def test_conversations_are_passed_over(talker, data, tmp_path, monkeypatch, capsys):
    run(monkeypatch, talker, data, "--skip", 1, "--run", "full:answers=0")
    assert not capsys.readouterr().out


def test_the_page_shows_its_data():
    assert measure.table(ROOT / "docs/data/epicache.jsonl") in (ROOT / "docs/epicache.md").read_text()


def test_wrong_runs_are_refused():
    assert [r.fraction for r in measure.Run.parse("epicache:fraction=4+6,kv=turbo3")] == [4, 6]
    for wrong in ("magic", "full:budget=3"):
        with pytest.raises(ValueError, match="a run is one of"):
            measure.Run.parse(wrong)
