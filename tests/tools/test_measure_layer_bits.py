"""The arithmetic of tools/measure_layer_bits.py."""
import measure_layer_bits as bits
import numpy as np
import pytest

from pykvq.calibration.loss import mse
from pykvq.engine import kl_divergence


def test_divergence_is_that_of_the_engine():
    rng = np.random.default_rng(0)
    exact = (5 * rng.standard_normal((2, 6, 3000))).astype(np.float32)
    ours = exact + (.02 * rng.standard_normal(exact.shape)).astype(np.float32) + 7      # a shift of all logits is none
    np.testing.assert_allclose(bits.Exact(exact).divergence(ours), kl_divergence(exact, ours), rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("rest, alone, types", [("f16", None, ("turbo2", "turbo3", "turbo4")), ("turbo4", .01, ("turbo2",)), ("turbo4", .01, ("turbo2", "turbo3"))])
def test_worth_is_told_from_noise(rest, alone, types):
    """Each part with noise of its own where two types tell it."""
    true = {(0, "k"): 3.0, (0, "v"): 0.2, (1, "k"): 0.0, (1, "v"): 1.0}
    base = 0 if rest == "f16" else mse(4)
    noise = {part: .01 + .002 * (part[0] if len(types) > 1 else 0) for part in true}
    measured = {(part, name): noise[part] + w * (mse(bits.BITS[name]) - base) for part, w in true.items() for name in types}
    assert bits.worth(measured, rest, alone) == pytest.approx(true, abs=1e-9)


def test_plan_is_the_best_of_all():
    """Against every allocation of three parts of unlike size."""
    value, size = {(0, "k"): 5.0, (1, "k"): 1.0, (2, "k"): 0.3}, {(0, "k"): 64, (1, "k"): 64, (2, "k"): 64}
    cost = lambda b: sum(value[part] * mse(n) for part, n in b.items())
    every = [dict(zip(value, n)) for n in np.ndindex(3, 3, 3)]
    every = [{part: n + 2 for part, n in b.items()} for b in every]
    for average in (2, 8 / 3, 3, 10 / 3, 4):
        ours = bits.plan(value, size, average)
        assert sum(ours.values()) <= 3 * average + 1e-6
        assert cost(ours) == pytest.approx(min(cost(b) for b in every if sum(b.values()) <= 3 * average + 1e-6))


def test_types_of_a_plan():
    assert bits.typed({(0, "k"): 4, (0, "v"): 2, (3, "k"): 3, (3, "v"): 3}) == {0: ("turbo4", "turbo2"), 3: ("turbo3", "turbo3")}


@pytest.mark.parametrize("average, pairs", [(3, [("turbo2", "turbo4"), ("turbo3", "turbo3"), ("turbo4", "turbo2")]), (2.5, [("turbo2", "turbo3"), ("turbo3", "turbo2")])])
def test_pairs_of_an_average(average, pairs):
    assert bits.pairs_of(average) == pairs
