"""Intervals against closed forms, invariances of the bootstrap, and coverage against simulations with a known answer."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mitigate.stats import Estimate, PhaseScores, examples_needed, paired_difference, phase_scores, wilson

ESTIMATES = ("mean", "a_min", "gap", "spread", "a_min_cross_fitted", "gap_cross_fitted", "a_min_bounds", "gap_bounds")
FLAT = np.full(24, 0.5)
DIP = np.where(np.arange(24) == 7, 0.2, 0.6)
PERIOD_8 = np.tile([0.68, 0.72, 0.77, 0.45, 0.47, 0.24, 0.65, 0.06], 3)
CLEAR = np.tile([1.0, 0.6, 0.998, 0.999, 0.1, 0.999, 1.0, 0.45], 3)  # the shape of a good compressor: right at some residues, bad at a few
NEARLY_TIED = np.where(np.arange(24) == 3, 0.50, 0.53)  # one residue 2 standard errors below 23 others


def draw(curve: np.ndarray[Any, Any], examples: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).random((examples, len(curve))) < curve


def draw_clear(clusters: int, each: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Sweep and cluster ids on `CLEAR`: the residues near 1 miss the same examples, and an eighth of the examples go with one draw of their cluster."""
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(clusters), each)
    level = np.where(rng.random((len(ids), 1)) < 0.125, rng.random((clusters, 24))[ids], rng.random((len(ids), 24)))
    level[:, CLEAR > 0.9] = level[:, 2:3]
    return level < CLEAR, ids


def same(one: PhaseScores, other: PhaseScores) -> None:
    for field in dataclasses.fields(PhaseScores):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if dataclasses.is_dataclass(ours):
            ours, theirs = dataclasses.astuple(ours), dataclasses.astuple(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12, err_msg=field.name)


# wilson ------------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [  # to six digits; the last is a residue of DeepSeek-V4-Flash-Base, printed as 37.81 and 49.87 %
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (5, 10, 0.236593, 0.763407),
        (1, 1, 0.206549, 1.0),
        (0, 0, 0.0, 1.0),
        (112, 256, 0.378099, 0.498749),
    ],
)
def test_wilson_closed_form(hits: int, n: int, low: float, high: float) -> None:
    np.testing.assert_allclose(wilson(hits, n), (low, high), atol=1.5e-6)


@given(n=st.integers(1, 5000), data=st.data(), confidence=st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_wilson_ends_solve_the_score_equation(n: int, data: st.DataObject, confidence: float) -> None:
    from statistics import NormalDist

    hits = data.draw(st.integers(0, n))
    z2 = NormalDist().inv_cdf(0.5 + confidence / 2) ** 2
    low, high = (float(end) for end in wilson(hits, n, confidence))
    assert 0 <= low <= hits / n <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert (hits / n - end) ** 2 == pytest.approx(z2 * end * (1 - end) / n, rel=1e-6, abs=1e-12)
    mirrored = wilson(n - hits, n, confidence)
    assert (1 - high, 1 - low) == pytest.approx((float(mirrored[0]), float(mirrored[1])), abs=1e-12)


def test_wilson_takes_arrays() -> None:
    low, high = wilson([[0, 1], [2, 3]], [3, 3])
    assert low.shape == high.shape == (2, 2)
    assert low[1, 0] == wilson(2, 3)[0]


@pytest.mark.parametrize(("hits", "n", "confidence"), [(3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0), (1, 2, 0.0), (float("nan"), 2, 0.95)])
def test_wilson_refuses(hits: float, n: float, confidence: float) -> None:
    with pytest.raises(ValueError, match="wilson"):
        wilson(hits, n, confidence)


# examples_needed ---------------------------------------------------------------------------------------------------------------------------------------


@given(width=st.floats(0.005, 1.0), p=st.floats(0, 1), confidence=st.floats(0.5, 0.999))
def test_examples_needed_is_the_fewest(width: float, p: float, confidence: float) -> None:
    n = examples_needed(width, p, confidence)

    def reached(count: int) -> float:
        low, high = wilson(p * count, count, confidence)
        return float(high - low)

    assert reached(n) <= width * (1 + 1e-9)
    assert n == 1 or reached(n - 1) > width * (1 - 1e-9)


def test_examples_needed_known_and_scaled() -> None:
    assert examples_needed(0.0618, 0.5) == pytest.approx(1000, abs=5)  # the paper's 1,000 examples give +-3.1 points
    assert examples_needed(0.1, design_effect=3) == pytest.approx(3 * examples_needed(0.1), abs=3)
    for bad in ({"width": 0}, {"width": 1.1}, {"width": 0.1, "p": 2}, {"width": 0.1, "confidence": 1}, {"width": 0.1, "design_effect": 0}):
        with pytest.raises(ValueError, match="examples_needed"):
            examples_needed(**bad)


# phase_scores ------------------------------------------------------------------------------------------------------------------------------------------


def test_point_estimates_by_hand() -> None:
    correct = np.array([[1, 0, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0]], bool)
    scores = phase_scores(correct, replicates=50)
    np.testing.assert_allclose(scores.accuracy_R, [1, 0.25, 0.25])
    assert scores.mean.value == pytest.approx(0.5)
    assert (scores.a_min.value, scores.gap.value) == (0.25, 0.75)
    assert scores.spread.value == pytest.approx(np.std([1, 0.25, 0.25]))
    assert (scores.worst_residue, scores.best_residue, scores.period, scores.examples, scores.clusters) == (1, 0, 3, 4, 4)
    assert scores.relative_gap == pytest.approx(1.5)
    assert phase_scores(np.zeros((4, 3)), replicates=5).relative_gap is None


def test_mask_leaves_examples_out() -> None:
    correct = np.array([[1, 1], [1, 0], [0, 0], [1, 1]], float)
    scored = np.array([[1, 1], [1, 1], [0, 1], [1, 0]], bool)
    correct[2, 0] = np.nan  # not scored, so never read
    scores = phase_scores(correct, scored, replicates=20)
    np.testing.assert_allclose(scores.accuracy_R, [1, 1 / 3])
    np.testing.assert_array_equal(scores.n_R, [3, 3])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), clusters=st.integers(4, 12), each=st.integers(1, 4), period=st.integers(1, 6))
def test_order_of_examples_does_not_matter(seed: int, clusters: int, each: int, period: int) -> None:
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(clusters), each)
    correct, scored = rng.random((len(ids), period)) < 0.6, rng.random((len(ids), period)) < 0.9
    scored[:, :] |= np.isin(ids, [0, 1])[:, None]
    scored[:] |= not scored.reshape(clusters, -1).any(1).all()
    order = rng.permutation(len(ids))
    same(phase_scores(correct, scored, ids, replicates=40), phase_scores(correct[order], scored[order], ids[order], replicates=40))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), copies=st.integers(2, 4))
def test_copies_inside_a_cluster_add_nothing_and_as_own_clusters_narrow(seed: int, copies: int) -> None:
    correct = draw(np.full(6, 0.6), 120, seed)
    one = phase_scores(correct, replicates=400)
    inside = phase_scores(np.repeat(correct, copies, 0), cluster_E=np.repeat(np.arange(120), copies), replicates=400)
    for name in ESTIMATES:
        assert dataclasses.astuple(getattr(inside, name)) == pytest.approx(dataclasses.astuple(getattr(one, name)), abs=1e-9), name
    apart = phase_scores(np.repeat(correct, copies, 0), replicates=400)
    assert one.mean.width / apart.mean.width == pytest.approx(copies**0.5, rel=0.25)
    assert (one.accuracy_high_R - one.accuracy_low_R).mean() > 1.2 * (apart.accuracy_high_R - apart.accuracy_low_R).mean()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), period=st.integers(1, 8), examples=st.integers(8, 60), level=st.floats(0, 1))
def test_intervals_are_ordered_and_in_bounds(seed: int, period: int, examples: int, level: float) -> None:
    scores = phase_scores(draw(np.full(period, level), examples, seed), replicates=60)
    for name in ("a_min_cross_fitted", "gap_cross_fitted", "a_min_bounds", "gap_bounds"):
        estimate = getattr(scores, name)
        assert estimate.low <= estimate.value <= estimate.high, name
    for name in ESTIMATES:
        estimate = getattr(scores, name)
        assert (-1 if name == "gap_cross_fitted" else 0) <= estimate.low <= estimate.high <= 1, name
    assert 0 <= scores.spread_debiased <= scores.spread.value + 1e-12


def test_renaming_residues_renames_scores() -> None:
    correct = draw(PERIOD_8, 300, 3)
    one, turned = phase_scores(correct, replicates=200), phase_scores(np.roll(correct, 5, 1), replicates=200)
    np.testing.assert_allclose(np.roll(one.accuracy_low_R, 5), turned.accuracy_low_R)
    assert dataclasses.astuple(one.a_min) == pytest.approx(dataclasses.astuple(turned.a_min))
    assert (one.worst_residue + 5) % 24 == turned.worst_residue


def test_all_right_or_all_wrong_is_not_certainty() -> None:
    scores = phase_scores(np.tile([1.0, 0.0], (40, 1)), replicates=100)
    assert scores.accuracy_low_R[0] == pytest.approx(float(wilson(40, 40)[0]))
    assert scores.accuracy_high_R[1] == pytest.approx(float(wilson(0, 40)[1]))
    assert scores.a_min_bounds.high > 0.05
    assert scores.gap_bounds.low < 0.95
    assert phase_scores(np.ones((40, 2)), replicates=100).mean.low == pytest.approx(float(wilson(40, 40)[0]))
    clustered = phase_scores(np.ones((40, 2)), cluster_E=np.arange(40) // 10, replicates=100)
    assert clustered.a_min_bounds.low < phase_scores(np.ones((40, 2)), replicates=100).a_min_bounds.low


def clear_cut(found: Estimate, margin: float) -> None:
    assert 0 <= found.value - margin <= found.low <= found.value <= found.high <= min(1, found.value + margin), found


@pytest.mark.parametrize("seed", range(3))
def test_residues_that_miss_the_same_examples_do_not_empty_the_gap(seed: int) -> None:
    correct, ids = draw_clear(96, 13, seed)
    level = np.random.default_rng(seed).random((len(correct), 24))
    correct[:, CLEAR > 0.99] = True
    correct[:, CLEAR < 0.99] = (level < CLEAR)[:, CLEAR < 0.99]
    correct[17, CLEAR == 0.999] = False  # one example, missed at six residues: their errors agree exactly
    scores = phase_scores(correct, cluster_E=ids, replicates=20)
    clear_cut(scores.gap_bounds, 0.04)
    clear_cut(scores.a_min_bounds, 0.04)
    clear_cut(scores.a_min_cross_fitted, 0.05)
    assert scores.gap_cross_fitted.width < 0.1
    assert ((scores.accuracy_low_R <= scores.accuracy_R) & (scores.accuracy_R <= scores.accuracy_high_R)).all()
    assert (scores.accuracy_high_R - scores.accuracy_low_R).max() < 0.08


def test_identical_residues_have_a_gap_that_is_small_but_not_certain() -> None:
    correct = np.repeat(draw(np.full(1, 0.5), 500, 0), 6, 1)
    scores = phase_scores(correct, replicates=20)
    assert scores.gap.value == 0
    assert scores.gap_bounds.low == 0
    assert 1 / 500 < scores.gap_bounds.high < 5 / 500  # three discordant examples in the limit


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clusters=st.integers(6, 40),
    each=st.integers(1, 4),
    kinds=st.lists(st.sampled_from(["right", "wrong", "one miss", "one hit", "copy", "half", "rare", "constant", "whole clusters"]), min_size=1, max_size=8),
)
def test_bounds_hold_the_plain_value_whatever_the_data(seed: int, clusters: int, each: int, kinds: list[str]) -> None:
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(clusters), each)
    total = len(ids)
    first, shared, one = rng.random(total) < 0.5, rng.random(clusters)[ids] < 0.5, np.arange(total) == rng.integers(total)
    columns = {"right": np.ones(total), "wrong": np.zeros(total), "one miss": ~one, "one hit": one, "copy": first, "constant": np.full(total, 0.3)}
    columns |= {"whole clusters": shared}
    correct = np.stack([columns.get(kind, rng.random(total) < (0.5 if kind == "half" else 0.95)) for kind in kinds], 1).astype(float)
    scores = phase_scores(correct, cluster_E=ids, replicates=10, seed=seed)
    for plain, bounds in ((scores.a_min, scores.a_min_bounds), (scores.gap, scores.gap_bounds)):
        assert bounds.value == pytest.approx(plain.value)
        assert 0 <= bounds.low <= bounds.value <= bounds.high <= 1
    assert np.isfinite([dataclasses.astuple(getattr(scores, name)) for name in ESTIMATES]).all()
    assert scores.a_min_bounds.width > 0.0
    if len(kinds) > 1:
        assert scores.gap_bounds.width > 0.0


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    misses=st.integers(0, 3),
    top=st.integers(1, 6),
    worst=st.lists(st.floats(0, 0.4), min_size=1, max_size=6),
    turned=st.booleans(),
)
def test_bounds_of_a_clear_cut_curve_are_not_vacuous(seed: int, misses: int, top: int, worst: list[float], turned: bool) -> None:
    correct = np.concatenate([np.ones((480, top), bool), draw(np.array(worst), 480, seed)], 1)
    correct[:misses, :top] = False
    scores = phase_scores(correct != turned, cluster_E=np.arange(480) // 5, replicates=10)
    clear_cut(scores.gap_bounds, 0.2)
    assert scores.a_min_bounds.width < 0.25


def test_all_right_at_some_residues_and_all_wrong_at_the_others() -> None:
    correct, ids = np.ones((960, 24)), np.arange(960) // 10
    for share in (np.arange(24) % 2 == 0, np.arange(24) == 5):
        scores = phase_scores(np.where(share, 0.0, correct), cluster_E=ids, replicates=20)
        assert scores.mean.low < scores.mean.value < scores.mean.high
        assert scores.mean.width < 0.05
        assert (scores.gap_bounds.value, scores.gap_bounds.high, scores.a_min_bounds.low) == (1, 1, 0)
        assert 0.8 < scores.gap_bounds.low < 1
        assert 0 < scores.a_min_bounds.high < 0.1
    for level, ends in ((1.0, (0.95, 1.0)), (0.0, (0.0, 0.09))):
        scores = phase_scores(np.full((960, 24), level), cluster_E=ids, replicates=20)
        assert (scores.a_min_bounds.low, scores.a_min_bounds.high) == pytest.approx(ends, abs=0.01)
        assert 0 == scores.gap_bounds.low < scores.gap_bounds.high < 0.06


def test_a_variance_of_rounding_is_none() -> None:
    scores = phase_scores(np.tile(np.linspace(0.1, 0.7, 24), (1248, 1)), cluster_E=np.arange(1248) // 13, replicates=20)
    assert scores.a_min_bounds.low < 0.09
    assert scores.gap_bounds.low < 0.55


def test_seed_decides() -> None:
    correct = draw(FLAT, 100, 0)
    same(phase_scores(correct, replicates=50, seed=4), phase_scores(correct, replicates=50, seed=4))
    assert phase_scores(correct, replicates=50, seed=4).a_min != phase_scores(correct, replicates=50, seed=5).a_min


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = draw(FLAT, 100, 0)
    whole = phase_scores(correct, replicates=101)
    monkeypatch.setattr("mitigate.stats._CHUNK_BYTES", 8 * 100 * 7)
    same(whole, phase_scores(correct, replicates=101))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"correct_ER": np.ones(4)}, "shape"),
        ({"correct_ER": np.ones((4, 0))}, "shape"),
        ({"correct_ER": np.full((4, 2), 1.5)}, "between 0 and 1"),
        ({"correct_ER": np.full((4, 2), np.nan)}, "between 0 and 1"),
        ({"correct_ER": np.ones((4, 2)), "scored_ER": np.ones((4, 2))}, "mask must be bool"),
        ({"correct_ER": np.ones((4, 2)), "scored_ER": np.ones((4, 2), bool) & [True, False]}, "residue 1 has no scored example"),
        ({"correct_ER": np.ones((4, 2)), "cluster_E": np.zeros(3)}, "cluster_E"),
        ({"correct_ER": np.ones((4, 2)), "cluster_E": np.zeros(4)}, "at least 2 clusters"),
        ({"correct_ER": np.ones((1, 2))}, "at least 2 clusters"),
        ({"correct_ER": np.ones((2, 2)), "scored_ER": np.eye(2, dtype=bool)}, "both halves"),
        ({"correct_ER": np.ones((4, 2)), "replicates": 1}, "replicates"),
    ],
)
def test_phase_scores_refuses(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        phase_scores(**kwargs)


def test_two_thousand_replicates_take_under_a_second() -> None:
    correct = draw(FLAT, 1000, 0)
    taken = []
    for _ in range(3):  # the best of three: others may use the machine
        start = time.perf_counter()
        phase_scores(correct, replicates=2000)
        taken.append(time.perf_counter() - start)
    assert min(taken) < 1.0


# paired_difference -------------------------------------------------------------------------------------------------------------------------------------


def test_paired_difference_of_a_variant_with_itself_is_nothing() -> None:
    correct = draw(PERIOD_8, 200, 1)
    difference = paired_difference(correct, correct, replicates=100)
    for name in ("mean", "a_min", "gap", "spread", "a_min_cross_fitted"):
        np.testing.assert_array_equal(dataclasses.astuple(getattr(difference, name)), 0)
    assert not difference.accuracy_high_R.any()


def test_paired_difference_agrees_with_the_single_scores_and_turns_round() -> None:
    a, b = draw(PERIOD_8, 300, 1), draw(FLAT, 300, 2)
    one, other = phase_scores(a, replicates=300), phase_scores(b, replicates=300)
    forth, back = paired_difference(a, b, replicates=300), paired_difference(b, a, replicates=300)
    for name in ("mean", "a_min", "gap", "spread", "a_min_cross_fitted"):
        ours = getattr(forth, name)
        assert ours.value == pytest.approx(getattr(one, name).value - getattr(other, name).value)
        assert (ours.low, ours.high) == pytest.approx((-getattr(back, name).high, -getattr(back, name).low)), name


def test_pairing_narrows_what_examples_share() -> None:
    rng = np.random.default_rng(0)
    hard = rng.random((400, 1))
    a, b = hard + 0.05 * rng.random((400, 6)) < 0.6, hard + 0.05 * rng.random((400, 6)) < 0.55
    paired = paired_difference(a, b, replicates=400)
    shuffled = paired_difference(a, b[rng.permutation(400)], replicates=400)
    assert paired.mean.value == pytest.approx(shuffled.mean.value)
    assert paired.mean.width < 0.6 * shuffled.mean.width
    assert paired.mean.low > 0


def test_paired_difference_refuses_unlike_shapes() -> None:
    with pytest.raises(ValueError, match="one shape"):
        paired_difference(np.ones((4, 2)), np.ones((4, 3)))


# coverage ----------------------------------------------------------------------------------------------------------------------------------------------


def simulate(curve: np.ndarray[Any, Any], *, examples: int, runs: int, replicates: int) -> dict[str, tuple[float, float, float]]:
    """Coverage, bias and mean width of each interval over `runs` simulated sweeps with known accuracies; `CLEAR` comes in clusters of 13."""
    truth = {"mean": curve.mean(), "spread": curve.std()}
    truth |= {name: curve.min() if name.startswith("a_min") else np.ptp(curve) for name in ESTIMATES if name not in truth}
    covered, error, width = {name: 0 for name in ESTIMATES}, {name: 0.0 for name in ESTIMATES}, {name: 0.0 for name in ESTIMATES}
    for run in range(runs):
        correct, ids = draw_clear(examples // 13, 13, 1000 + run) if curve is CLEAR else (draw(curve, examples, 1000 + run), None)
        scores = phase_scores(correct, cluster_E=ids, replicates=replicates, seed=run)
        for name in ESTIMATES:
            estimate = getattr(scores, name)
            covered[name] += estimate.low <= truth[name] <= estimate.high
            error[name] += estimate.value - truth[name]
            width[name] += estimate.width
    return {name: (covered[name] / runs, error[name] / runs, width[name] / runs) for name in ESTIMATES}


@pytest.mark.parametrize(("curve", "tied"), [(FLAT, True), (DIP, False)], ids=["flat", "dip"])
def test_coverage_quick(curve: np.ndarray[Any, Any], tied: bool) -> None:
    found = simulate(curve, examples=300, runs=150, replicates=100)
    for name in ("mean", "a_min_cross_fitted", "gap_cross_fitted", "a_min_bounds", "gap_bounds"):
        assert found[name][0] >= 0.89, (name, found[name])  # 95 % less 3.4 standard errors of 150 runs
    assert abs(found["a_min_cross_fitted"][1]) < 0.012
    if tied:  # the plain minimum of 24 equal residues lies 2 standard errors low, and a percentile bootstrap does not notice
        assert found["a_min"][:2] == pytest.approx((0.0, -0.056), abs=0.012)
        assert found["gap"][0] < 0.05


def test_coverage_quick_of_a_clear_cut_curve() -> None:
    found = simulate(CLEAR, examples=96 * 13, runs=100, replicates=50)
    for name in ("mean", "a_min_cross_fitted", "gap_cross_fitted", "a_min_bounds", "gap_bounds"):
        assert found[name][0] >= 0.87, (name, found[name])  # 95 % less 3.7 standard errors of 100 runs
        assert found[name][2] < 0.06, (name, found[name])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_coverage_of_a_clear_cut_curve() -> None:
    found = simulate(CLEAR, examples=96 * 13, runs=600, replicates=200)
    for name in ("mean", "a_min_cross_fitted", "gap_cross_fitted", "a_min_bounds", "gap_bounds"):
        assert found[name][0] >= 0.92, (name, found[name])
        assert found[name][2] < 0.06, (name, found[name])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("curve", [FLAT, DIP, PERIOD_8], ids=["flat", "dip", "period 8"])
def test_coverage_at_a_thousand_examples(curve: np.ndarray[Any, Any]) -> None:
    found = simulate(curve, examples=1000, runs=1000, replicates=200 if curve is FLAT else 2)  # only the percentile intervals need replicates
    for name in ("a_min_cross_fitted", "gap_cross_fitted"):
        assert 0.93 <= found[name][0] <= 0.97, (name, found[name])
    assert 0.93 <= found["a_min_bounds"][0] <= 0.99, found["a_min_bounds"]
    assert found["gap_bounds"][0] >= 0.93, found["gap_bounds"]
    assert abs(found["a_min_cross_fitted"][1]) < 0.0015
    if curve is FLAT:
        assert found["a_min"][1] == pytest.approx(-0.031, abs=0.002)
        assert found["a_min"][0] < 0.01


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bounds_hold_where_cross_fitting_is_optimistic() -> None:
    found = simulate(NEARLY_TIED, examples=1000, runs=500, replicates=2)
    assert found["a_min_cross_fitted"][0] < 0.8  # documented: half the data often picks a residue that is not the worst
    assert found["a_min_cross_fitted"][1] > 0.015
    assert found["a_min_bounds"][0] >= 0.95
    assert found["gap_bounds"][0] >= 0.95
