"""The front and the hypervolume against brute force; candidates and probabilities by what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mitigate import pareto
from mitigate.config import VariantConfig
from mitigate.rows import Interval, Row
from tests.fake_rows import fake_failure, fake_row, fake_rows

TEMPLATE = fake_row(0, "template", VariantConfig(), np.random.default_rng(0))
FULL = fake_row(0, "full", VariantConfig(compress=False), np.random.default_rng(0))
FAILED = fake_failure(1, "failed", VariantConfig())

# Few distinct values, so that ties and duplicates are common.
steps = st.integers(0, 3)
points = st.lists(st.tuples(steps, steps, steps, steps), max_size=12)


def at(kept: float, ratio: float, mean: float, a_min: float, half: float = 0.0, *, template: Row = TEMPLATE) -> Row:
    """A row with the given objectives (KV as a fraction of full attention), intervals `half` wide to each side."""

    def around(value: float) -> Interval:
        return Interval(value=value, low=value - half, high=value + half)

    assert template.cost is not None
    cost = template.cost.model_copy(update={"kv_kept": kept, "kv_bytes_per_token": 512 * kept, "throughput_ratio": around(ratio)})
    scores = [score.model_copy(update={"mean": around(mean)}) for score in template.scores]
    update = {"cost": cost, "mean_accuracy": mean, "a_min": a_min, "a_min_low": a_min - half, "a_min_high": a_min + half, "scores": scores}
    return template.model_copy(update=update)


def dominates(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Straight from the definition; the first objective is minimised."""
    better = [a[0] < b[0], a[1] > b[1], a[2] > b[2], a[3] > b[3]]
    worse = [a[0] > b[0], a[1] < b[1], a[2] < b[2], a[3] < b[3]]
    return any(better) and not any(worse)


@given(points)
def test_front_is_what_nothing_dominates_each_point_once(drawn: list[tuple[int, ...]]) -> None:
    rows = [at(*point) for point in drawn]
    kept = [i for i, p in enumerate(drawn) if not any(dominates(q, p) for q in drawn) and p not in drawn[:i]]
    best = pareto.front(rows)
    assert [next(i for i, row in enumerate(rows) if row is chosen) for chosen in best] == kept


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), steps, steps, steps), max_size=8))
def test_hypervolume_counts_the_dominated_cells(drawn: list[tuple[int, ...]]) -> None:
    # Cells of size (1, 1, 1, 1) below each point, the KV axis from 0.1 + k to the reference 1.1.
    cells = {(kept, x, y, z) for k, ratio, mean, a_min in drawn for kept in range(k, 1) for x in range(ratio) for y in range(mean) for z in range(a_min)}
    assert pareto.hypervolume([at(k + 0.1, *rest) for k, *rest in drawn]) == pytest.approx(len(cells))


def test_infeasible_rows_are_nowhere() -> None:
    rows = [FAILED, at(0.5, 1, 0.5, 0.5)]
    assert pareto.objectives(FAILED) is None
    assert pareto.front(rows) == [rows[1]]
    assert pareto.hypervolume([FAILED]) == 0
    assert math.isnan(pareto.front_probability(rows)[0])
    assert pareto.front([]) == [] and pareto.knees([]) == [] and pareto.knees([FAILED]) == []


def test_objectives_come_in_the_documented_order() -> None:
    assert pareto.objectives(at(0.25, 1.5, 0.6, 0.3)) == pytest.approx([128, 1.5, 0.6, 0.3])
    assert [objective.maximise for objective in pareto.OBJECTIVES] == [False, True, True, True]
    record = TEMPLATE.to_record()
    assert all(objective.name in record or f"{objective.name}.value" in record for objective in pareto.OBJECTIVES)


def test_full_attention_counts_in_the_hypervolume() -> None:
    assert pareto.hypervolume([at(1.0, 1.0, 1.0, 1.0)]) == pytest.approx(0.1)


def test_probability_tells_a_sure_place_from_a_fragile_one() -> None:
    sure, fragile, beaten = at(0.1, 2, 0.9, 0.9, 0.01), at(0.1, 1.995, 0.899, 0.899, 0.01), at(0.2, 1, 0.5, 0.5, 0.01)
    probability = pareto.front_probability([sure, fragile, beaten], draws=400, seed=1)
    assert probability[0] > 0.6 and 0.05 < probability[1] < 0.95 and probability[2] == 0
    assert probability[0] > probability[1]
    assert np.array_equal(probability, pareto.front_probability([sure, fragile, beaten], draws=400, seed=1))


def test_probability_without_noise_is_dominance_and_ties_both_stay() -> None:
    rows = [at(0.1, 2, 0.9, 0.9), at(0.1, 2, 0.9, 0.9), at(0.2, 1, 0.5, 0.5)]
    assert pareto.front_probability(rows, draws=20).tolist() == [1, 1, 0]


def test_plain_and_full_are_recognised_by_their_config() -> None:
    rng = np.random.default_rng(0)
    wide = fake_row(2, "w12s12", VariantConfig(window=12, stride=12), rng)
    other = fake_row(3, "w16s8", VariantConfig(window=16, stride=8), rng)
    assert pareto.is_full(FULL) and not pareto.is_plain(FULL)
    assert pareto.is_plain(TEMPLATE) and pareto.is_plain(wide) and not pareto.is_plain(other)
    assert pareto.plain_row([wide, other, TEMPLATE]) is TEMPLATE
    assert pareto.plain_row([other, wide]) is wide and pareto.plain_name(wide) == "plain W12/S12"
    assert pareto.plain_row([other]) is None and pareto.full_row([other, FULL]) is FULL


def test_best_worst_phase_candidate_stays_within_plain_bytes() -> None:
    plain = at(0.125, 1.7, 0.5, 0.28)
    other = fake_row(5, "other", VariantConfig(window=16, stride=8), np.random.default_rng(0))
    within, above = at(0.125, 1.6, 0.45, 0.43, template=other), at(0.25, 1.5, 0.7, 0.6, template=other)
    knees = pareto.knees([plain, within, above])
    chosen = next(knee for knee in knees if "best worst phase" in knee.reason or "Best worst phase" in knee.reason or "the best worst phase" in knee.reason)
    assert chosen.row is within
    assert "0.450 in the mean, 0.430 in the worst phase" in chosen.reason


def test_achievement_prefers_the_even_compromise() -> None:
    other = fake_row(5, "other", VariantConfig(window=16, stride=8), np.random.default_rng(0))
    extremes = [at(0.05, 2.0, 0.1, 0.1, template=other), at(1.0, 1.0, 1.0, 1.0, template=other)]
    middle = at(0.4, 1.6, 0.7, 0.65, template=other)
    knees = pareto.knees([*extremes, middle])
    assert next(knee.row for knee in knees if "compromise" in knee.reason) is middle


@pytest.mark.parametrize("seed", range(5))
def test_candidates_are_distinct_compressed_and_on_the_front(seed: int) -> None:
    rows = fake_rows(20, seed)
    best, knees = pareto.front(rows), pareto.knees(rows)
    assert 1 <= len(knees) <= 3
    assert len({id(knee.row) for knee in knees}) == len(knees)
    for knee in knees:
        assert any(knee.row is row for row in best) and not pareto.is_full(knee.row)
        assert f"{knee.row.a_min:.3f} in the worst phase" in knee.reason


def test_only_full_attention_gives_no_candidate() -> None:
    assert pareto.knees([FULL]) == []


def test_full_attention_is_no_candidate_even_where_it_fits_every_rule_best() -> None:
    other = fake_row(5, "other", VariantConfig(window=16, stride=8), np.random.default_rng(0))
    full = at(1.0, 1.0, 1.0, 1.0, template=FULL)
    rest = [at(0.9, 0.2, 0.5, 0.5, template=other), at(0.95, 1.01, 0.1, 0.1, template=other), at(1.08, 1.5, 0.2, 0.2, template=other)]
    knees = pareto.knees([full, *rest])
    assert knees and not any(knee.row is full for knee in knees)
