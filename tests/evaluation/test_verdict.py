"""Intervals and the verdict."""
from dataclasses import replace

import numpy as np
import pytest

from pykvq.evaluation.summary import Figure, Result, _mean, _quantile, _t, flags
from pykvq.evaluation.summary import verdict as judge


def result(kv_type, kld, size, lost=0, gained=0, found=15, **extra):
    pair = (kv_type, kv_type) if isinstance(kv_type, str) else kv_type
    figure = Figure(kld, kld * 0.9, kld * 1.1)
    return Result(pair, [], size, 1000, 0, figure, figure, {}, 10.0, Figure(1.0), Figure(0.9), [], figure, {}, found, lost, gained, Figure(found / 15),
                  [], Figure(0.1), 0.1, **extra)


BASE = result("f16", 0, 1000)


def verdict(name, base, results, tolerance):
    return judge(name, base, results, tolerance, context=1024)


def test_the_smallest_within_the_tolerance_wins():
    v = verdict("M", BASE, [result("q8_0", 0.001, 500), result("turbo4", 0.04, 260), result("turbo3", 0.2, 200)], 0.05)
    assert v.kv_type == ("turbo4", "turbo4") and v.able
    assert "--cache-type-k turbo4 --cache-type-v turbo4" in v.sentence and "15 of 15" in v.sentence and "3.85x smaller" in v.sentence
    assert verdict("M", BASE, [result("turbo3", 0.2, 200), result("turbo4", 0.04, 260)], 0.3).kv_type == ("turbo3", "turbo3")


def test_a_lost_fact_is_a_loss_unless_another_is_gained():
    v = verdict("M", BASE, [result("turbo4", 0.04, 260, lost=1, found=14), result("q8_0", 0.001, 500)], 0.05)
    assert v.kv_type == ("q8_0", "q8_0")
    assert verdict("M", BASE, [result("turbo4", 0.04, 260, lost=1, gained=1)], 0.05).kv_type == ("turbo4", "turbo4")


def test_k_and_v_alone_are_candidates():
    v = verdict("M", BASE, [result("turbo3", 0.2, 200), result(("f16", "turbo3"), 0.03, 600)], 0.05)
    assert v.kv_type == ("f16", "turbo3") and "K f16, V turbo3" in v.sentence and flags(v.kv_type) in v.sentence


def test_a_window_that_was_asked_for_is_among_the_flags():
    assert flags(("turbo2", "turbo2"), {"kv_sink": 0, "kv_recent": None}) == "--cache-type-k turbo2 --cache-type-v turbo2 --kv-sink 0"
    assert flags(("turbo2", "turbo2")) == flags(("turbo2", "turbo2"), {"kv_sink": 64, "kv_recent": 256}) == "--cache-type-k turbo2 --cache-type-v turbo2"


def test_a_type_with_a_window_is_judged_by_the_end_of_a_long_text():
    windowed = replace(result("turbo2", 0.02, 150), window=100, kld_late=Figure(0.08))
    others = [result("turbo4", 0.04, 260)]
    assert verdict("M", BASE, [windowed, *others], 0.05).kv_type == ("turbo4", "turbo4")
    assert verdict("M", BASE, [replace(windowed, kld_late=Figure(0.03)), *others], 0.05).kv_type == ("turbo2", "turbo2")
    v = verdict("M", BASE, [replace(windowed, kld_late=Figure(0.03), window=400), *others], 0.05)
    assert v.kv_type == ("turbo4", "turbo4") and "Not judged" in v.sentence and "turbo2" in v.sentence
    v = verdict("M", BASE, [replace(windowed, window=400)], 0.05)
    assert v.kv_type is None and "Nothing can be said" in v.sentence


def test_nothing_good_enough():
    v = verdict("M", BASE, [result("turbo3", 0.2, 200), result("turbo4", 0.06, 260)], 0.05)
    assert v.kv_type is None and "Stay with f16" in v.sentence and "nearest is turbo4" in v.sentence


def test_a_model_that_cannot_retrieve_is_said_to_be_unable():
    v = verdict("M", result("f16", 0, 1000, found=3), [result("turbo4", 0.04, 260, lost=3, found=0)], 0.05)
    assert v.kv_type == ("turbo4", "turbo4") and not v.able and "too few" in v.sentence and "15" not in v.sentence


def test_an_interval_beyond_the_tolerance_and_repetition_are_told():
    v = verdict("M", BASE, [result("turbo4", 0.048, 260)], 0.05)
    assert v.kv_type and "measure more" in v.sentence
    v = verdict("M", BASE, [replace(result("turbo4", 0.01, 260), repetition=Figure(0.5))], 0.05)
    assert "repeat themselves" in v.sentence


def test_interval_of_a_mean_covers_it():
    """Of 200 draws of 16 blocks of correlated positions, about 95 % must hold the true mean."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(200):
        values = np.repeat(rng.exponential(1.0, (1, 16)), 16, axis=1) + 0.1 * rng.standard_normal((1, 256))
        figure = _mean(values)
        hits += figure.low <= 1 <= figure.high
    assert 160 <= hits <= 199                    # the t interval of an exponential is a little short


def test_quantile_and_its_interval():
    values = np.random.default_rng(0).exponential(1.0, 4000)
    figure = _quantile(values, 0.9)
    assert figure.low < figure.value < figure.high and figure.value == pytest.approx(np.log(10), rel=0.05)


def test_one_value_has_no_interval_and_equal_ones_a_point():
    assert _t([0.3]) == Figure(0.3) and _t([0.2, 0.2]) == Figure(0.2, 0.2, 0.2)
