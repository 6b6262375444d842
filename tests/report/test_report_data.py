"""What the figures and tables show, before any drawing."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mitigate import pareto
from mitigate.config import VariantConfig
from mitigate.report import data
from mitigate.rows import Row
from tests.fake_rows import fake_failure, fake_row, fake_rows


def with_a_min(row: Row, value: float, half: float, kept: float = 0.125) -> Row:
    """A row with another worst phase, at the given KV bytes."""
    assert row.cost is not None
    cost = row.cost.model_copy(update={"kv_kept": kept, "kv_bytes_per_token": 512 * kept})
    return row.model_copy(update={"a_min": value, "a_min_low": value - half, "a_min_high": value + half, "cost": cost})


def test_points_leave_out_failures_and_name_the_roles() -> None:
    rows = fake_rows(20, seed=1)
    points = data.points(rows)
    assert [point.row for point in points] == [row for row in rows if row.status == "ok"]
    assert [point.row.label for point in points if point.role in ("full", "plain")] == ["full", "w8s8"]
    assert {id(point.row) for point in points if point.on_front} == {id(row) for row in pareto.front(rows)}
    assert all(point.role != "dominated" or not point.on_front for point in points)


def test_curves_put_outer_padding_first_and_keep_the_worst_residue() -> None:
    row = fake_row(0, "w8s8", VariantConfig(), np.random.default_rng(0), ["in_sequence", "outer"])
    curves = data.curves(row)
    assert [curve.protocol for curve in curves] == ["outer", "in_sequence"]
    assert all(curve.accuracy[curve.worst] == min(curve.accuracy) and not curve.flat for curve in curves)
    assert data.curves(fake_rows(1)[0])[0].flat


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=10))
def test_stairs_rise_and_leave_nothing_above_them(drawn: list[tuple[int, int]]) -> None:
    x, y = [a for a, _ in drawn], [b for _, b in drawn]
    best = data.stairs(x, y, x_min=True)
    assert all(x[i] < x[j] and y[i] < y[j] for i, j in itertools.pairwise(best))
    for a, b in drawn:
        assert any(x[i] <= a and y[i] >= b for i in best)


@given(st.lists(st.tuples(st.sampled_from([1 / 24, 1 / 12, 1 / 8, 1 / 7, 1 / 4, 1.0]), st.floats(0, 1)), max_size=40))
def test_spread_keeps_the_best_in_place_and_the_groups_apart(drawn: list[tuple[float, float]]) -> None:
    kept, rank = [k for k, _ in drawn], [r for _, r in drawn]
    shown = data.spread_sideways(kept, rank)
    for level in set(kept):
        group = [i for i, k in enumerate(kept) if k == level]
        best = max(group, key=lambda i: rank[i])
        assert shown[best] == pytest.approx(level)
        assert len({round(shown[i], 9) for i in group}) == len(group)
        assert all(min(kept, key=lambda other: abs(math.log2(other / shown[i]))) == level for i in group)


def test_shown_rows_start_with_the_references_and_stop_at_the_limit() -> None:
    rows = fake_rows(60, seed=2)
    shown = data.shown_rows(rows, 12)
    assert [row.label for row in shown[:2]] == ["full", "w8s8"] and len(shown) == 12
    assert all(any(knee.row is row for row in shown) for knee in pareto.knees(rows))
    costs = [data.by_cost(row) for row in shown[2:]]
    assert costs == sorted(costs)
    assert data.shown_rows([]) == [] and data.shown_rows([fake_failure(0, "x", VariantConfig())]) == []


def test_headlines_name_plain_with_mean_and_worst_phase() -> None:
    rows = fake_rows(2)
    lines = data.headlines(rows)
    plain = next(line for line in lines if line.startswith("Plain W8/S8"))
    assert f"{rows[1].mean_accuracy:.3f}" in plain and f"{rows[1].a_min:.3f}" in plain and "12.5 %" in plain
    assert lines[-1] == "No trial at no more bytes has a better worst phase than plain W8/S8."


@pytest.mark.parametrize(("half", "words"), [(0.01, "do not overlap"), (0.2, "may be chance")])
def test_headline_says_whether_the_intervals_overlap(half: float, words: str) -> None:
    full, plain = fake_rows(2)
    plain = with_a_min(plain, 0.28, half)
    rng = np.random.default_rng(1)
    better = with_a_min(fake_row(2, "w16s8", VariantConfig(window=16), rng), 0.43, half)
    dearer = with_a_min(fake_row(3, "w8s4", VariantConfig(stride=4), rng), 0.9, half, kept=0.25)
    line = data.headlines([full, plain, better, dearer])[-1]
    assert "w16s8 #2 with 0.430" in line and "of 2 trials" in line and words in line and f"mean accuracy {better.mean_accuracy:.3f}" in line


def test_headlines_without_metrics_or_references() -> None:
    assert data.headlines([]) == ["No trial has finished with metrics yet."]
    failed = fake_failure(0, "x", VariantConfig())
    assert data.headlines([failed])[0].startswith("No trial has metrics: 1 infeasible (")
    alone = fake_row(1, "w16s8", VariantConfig(window=16), np.random.default_rng(0))
    assert data.headlines([alone, failed]) == ["1 of 1 finished trials is on the four-objective front; 1 more was infeasible."]


def test_sample_line_counts_and_warns_about_a_single_protocol() -> None:
    both, one = data.sample_line(fake_rows(3)), data.sample_line(fake_rows(3, protocols=["outer"]))
    assert "96 prompts" in both and "24 residues" in both and "outer padding and in-sequence padding" in both
    assert "One protocol only" in one and "in-sequence" not in one
    assert data.sample_line([]) == "No phase sweep yet."


def test_names_are_one_line_and_cut() -> None:
    row = fake_rows(1)[0].model_copy(update={"label": "a\nvery " + "long " * 20, "trial": 7})
    assert data.named(row, 10) == "a very lo… #7"
    assert data.named(row.model_copy(update={"trial": None, "label": "x"})) == "x"


def test_trials_that_are_not_finished_are_counted_by_what_became_of_them() -> None:
    rows = [row for row in fake_rows(12) if row.status == "ok"]
    assert data.left_out_line(rows) == ""
    stopped = [row.model_copy(update={"status": "stopped", "cost": None}) for row in rows[2:5]]
    assert data.left_out_line([*rows, *stopped]) == "Not finished, and left out: 3 stopped at a rung; trials.csv has them."
    assert data.headlines([*rows[:2], *stopped])[0].endswith("; 3 more were stopped at a rung.")
    prompts = rows[0].scores[0].clusters
    fewer = [row.model_copy(update={"scores": [s.model_copy(update={"clusters": 1}) for s in row.scores]}) for row in stopped]
    assert data.sample_line([*rows, *fewer]).startswith(f"Accuracy: {prompts} prompts"), "the small sweep of a rung is not what stands behind the front"
