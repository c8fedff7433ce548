"""docs/turboquant.md: generated, fresh, and in agreement with the theory as it is computed here."""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pykvq.codecs import index_entropy, mse_bounds, prod_bounds, sphere_codebook, sphere_mse

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from turboquant_paper import attention, report, search, vectors   # noqa: E402

DATA = json.loads((ROOT / "docs/turboquant.json").read_text())


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
    for measured in ("mse_haar", "mse_hadamard", "mse_single"):
        assert row[measured] == pytest.approx(row["exact_mse"], rel=0.02)
        assert row["mse_bounds"][0] < row[measured] < row["mse_bounds"][1]
    for measured in ("prod_haar", "prod_hadamard"):
        assert row[measured] == pytest.approx(row["exact_prod"], rel=0.05)
        assert row["prod_bounds"][0] < row[measured] < row["prod_bounds"][1]


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
    assert DATA["attention"]
    for m in DATA["attention"].values():
        assert {(r["codec"], r["bits"]) for r in m["next_token"]} == {(c, b) for c in ("MSE", "Prod", "cache type") for b in (2, 3, 4)}


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


def test_centring_makes_a_codec_blind_to_a_common_bias():
    k = layers()[0]["K"]
    codec = attention.centred(attention.codecs(16 * 4, 2)["MSE"])
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
