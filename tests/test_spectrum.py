"""Planted periods with and without gaps, harmonics, mixed strides, and the rate of false alarms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mitigate.spectrum import autocorrelation, find_period, periodogram

PROFILE = {
    2: [0.3, 0.6],
    3: [0.2, 0.5, 0.9],
    4: [0.15, 0.22, 0.31, 0.60],
    5: [0.1, 0.6, 0.3, 0.9, 0.2],
    6: [0.9, 0.2, 0.5, 0.4, 0.7, 0.1],
    8: [0.68, 0.72, 0.77, 0.45, 0.47, 0.24, 0.65, 0.06],
    12: [0.6, 0.1, 0.3, 0.5, 0.9, 0.2, 0.4, 0.8, 0.7, 0.3, 0.2, 0.05],
}


def curve(t: Any, period: int, noise: float = 0.0, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.asarray(PROFILE[period])[np.asarray(t) % period] + noise * np.random.default_rng(seed).standard_normal(len(t))


@pytest.mark.parametrize("noise", [0.0, 0.015])
@pytest.mark.parametrize("period", [2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("n", [24, 48])
def test_planted_period_over_residues(n: int, period: int, noise: float) -> None:
    t = np.arange(n)
    found = find_period(t, curve(t, period, noise), cycle=24)
    assert (found.period, found.status) == (period, "detected")
    assert [component.period for component in found.components] == [period]
    assert found.p_value < 0.01
    assert found.strength > 0.95


@pytest.mark.parametrize("period", [4, 5, 6, 8])
def test_planted_period_with_gaps_and_no_hint(period: int) -> None:
    t = np.sort(np.random.default_rng(period).choice(64, 44, replace=False))
    found = find_period(t, curve(t, period, 0.02), permutations=2000)
    assert found.period == period, found.reason
    assert len(found.candidates) > 10


def test_multiples_fold_as_well_but_are_not_reported() -> None:
    t = np.arange(48)
    found = find_period(t, curve(t, 8, 0.01))
    strength = dict(zip(found.candidates, found.strengths, strict=True))
    assert strength[8] > 0.99
    assert strength[16] > 0.99
    assert strength[24] > 0.99
    assert found.period == 8


def test_divisor_that_carries_most_power_is_not_the_period() -> None:
    t = np.arange(24)
    y = curve(t, 4, 0.005) + 0.05 * np.array([1, 0, 0, 0, -1, 0, 0, 0])[t % 8]
    assert find_period(t, curve(t, 4, 0.005), cycle=24).period == 4
    assert find_period(t, y, cycle=24).period == 8


def test_mixed_strides_come_apart() -> None:
    t = np.arange(48)
    y = curve(t, 4, 0.01) + curve(t, 6, 0.01, seed=1)
    found = find_period(t, y, cycle=24)
    assert found.period == 12
    assert [component.period for component in found.components] == [4, 6]
    assert all(component.p_value < 0.01 for component in found.components)
    assert [component.period for component in find_period(t, curve(t, 12, 0.01), cycle=24).components] == [12]


def test_curves_share_a_period_not_a_shape() -> None:
    t = np.arange(24)
    one, other = curve(t, 8, 0.05), curve(t + 3, 8, 0.05, seed=1)
    both = find_period(t, [one, 5 - 100 * other], cycle=24)
    assert both.period == 8
    assert find_period(t, [one, np.ones(24)], cycle=24).period == find_period(t, one, cycle=24).period  # a constant curve says nothing


@settings(max_examples=10, deadline=None)
@given(shift=st.integers(-50, 50), scale=st.floats(0.01, 100), offset=st.floats(-5, 5), seed=st.integers(0, 100))
def test_shift_scale_and_order_do_not_matter(shift: int, scale: float, offset: float, seed: int) -> None:
    t = np.arange(24)
    y = curve(t, 8, 0.03)
    one = find_period(t, y, cycle=24, permutations=500)
    order = np.random.default_rng(seed).permutation(24)
    for other in (
        find_period(t + shift, y, cycle=24, permutations=500),
        find_period(t, offset - scale * y, cycle=24, permutations=500),
        find_period(t[order], y[order], cycle=24, permutations=500),
    ):
        assert other.period == one.period == 8
        np.testing.assert_allclose(other.strengths, one.strengths, atol=1e-9)


def test_no_false_alarm_on_flat_binomial_noise() -> None:
    rng = np.random.default_rng(0)
    results = [find_period(range(24), rng.binomial(1000, 0.5, 24) / 1000, cycle=24, permutations=400, seed=run) for run in range(300)]
    assert sum(found.period is not None for found in results) <= 9  # 1 % is 3; more than 9 has odds of 1 in 1,000
    p = np.array([found.p_value for found in results])
    assert 0.4 < (p < 0.5).mean() < 0.6
    assert (p < 0.05).mean() < 0.1


def test_no_false_alarm_on_one_dip_or_a_slope() -> None:
    t = np.arange(24)
    rng = np.random.default_rng(1)
    assert find_period(t, (t == 7).astype(float), cycle=24).period is None
    assert find_period(t, t + rng.standard_normal(24), cycle=24).period is None


def test_weak_periods_are_missed_rather_than_misread() -> None:
    rng = np.random.default_rng(2)
    wrong = 0
    for run in range(100):
        y = np.tile(rng.standard_normal(8), 3) + 1.5 * rng.standard_normal(24)
        wrong += find_period(range(24), y, cycle=24, permutations=400, seed=run).period not in (None, 8)
    assert wrong <= 10


def test_eight_positions_are_enumerated_and_know_their_limit() -> None:
    t = np.arange(8)
    found = find_period(t, [0.44, 0.70, 0.66, 0.30, 0.45, 0.70, 0.64, 0.33], cycle=8)
    assert found.period == 4
    assert found.p_value == pytest.approx(1 / 105)  # ways to pair eight values
    assert found.smallest_p == pytest.approx(1 / 105)
    two = find_period(t, [0.95, 0.89, 0.95, 0.90, 0.94, 0.91, 0.96, 0.90], cycle=8, candidates=[2])
    assert two.period is None
    assert two.status == "undecided"  # 1 in 35 ways to split eight values in halves
    assert two.smallest_p == pytest.approx(1 / 35)
    assert "cannot give" in two.reason


def test_nothing_to_see() -> None:
    assert find_period(range(24), np.ones(24), cycle=24).reason == "the curve does not vary"
    assert find_period(range(3), [1, 2, 1]).period is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"t": range(3), "y": [1, 2]}, "shape"),
        ({"t": [0, 0.5, 1], "y": [1, 2, 3]}, "integers"),
        ({"t": range(3), "y": [1, 2, np.nan]}, "finite"),
        ({"t": range(24), "y": np.arange(24), "cycle": 24, "candidates": [5]}, "divide cycle"),
        ({"t": range(24), "y": np.arange(24), "candidates": [1]}, "at least 2"),
        ({"t": range(24), "y": np.arange(24), "alpha": 0.5}, "alpha"),
        ({"t": range(24), "y": np.arange(24), "permutations": 0}, "permutations"),
        ({"t": range(24), "y": np.arange(24), "cycle": 0}, "cycle"),
    ],
)
def test_find_period_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_period(**arguments)


def test_autocorrelation_of_a_cycle() -> None:
    t = np.arange(24)
    wave = np.cos(2 * np.pi * t / 8)
    lags = list(range(13))
    np.testing.assert_allclose(autocorrelation(t, wave, lags, cycle=24), np.cos(2 * np.pi * np.array(lags) / 8), atol=1e-12)
    kept = np.delete(t, [3, 10, 11, 20])
    with_gaps = autocorrelation(kept, wave[kept], [0, 4, 8])
    assert with_gaps[1] < -0.8
    assert with_gaps[2] > 0.8
    assert math.isnan(autocorrelation([0, 5], [1, 2], [3])[0])


def test_periodogram_is_the_discrete_fourier_power_and_survives_gaps() -> None:
    t = np.arange(24)
    y = curve(t, 12, 0.1)
    power = np.abs(np.fft.rfft(y - y.mean())) ** 2
    power[1:-1] *= 2
    np.testing.assert_allclose(periodogram(t, y, 24 / np.arange(1, 13)), power[1:] / power.sum(), atol=1e-9)
    kept = np.sort(np.random.default_rng(0).choice(60, 35, replace=False))
    fractions = periodogram(kept, 3 + np.sin(2 * np.pi * kept / 7 + 1), np.arange(2, 20))
    assert fractions.argmax() + 2 == 7
    assert fractions.max() == pytest.approx(1)


@pytest.mark.parametrize(
    "call", [lambda: autocorrelation([0, 0], [1, 2], [1]), lambda: autocorrelation([0, 1], [1, 2], [-1]), lambda: periodogram([0, 1], [1, 2], [1])]
)
def test_descriptions_refuse(call: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        call()
