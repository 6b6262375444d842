"""The terminal's tables: what is in them, in which order, and that they fit."""

from __future__ import annotations

import numpy as np
import pytest

from mitigate import pareto
from mitigate.config import VariantConfig
from mitigate.report import tables
from tests.fake_rows import fake_failure, fake_row, fake_rows


@pytest.mark.parametrize("count", [1, 3, 20, 300])
def test_front_table_fits_and_lists_the_front_by_cost(count: int) -> None:
    rows = [row.model_copy(update={"trial": row.trial + 9000}) for row in fake_rows(count, seed=1) if row.trial is not None]
    text = tables.front_table(rows)
    assert max(map(len, text.splitlines())) <= 120
    body = [line for line in text.split("\n\n")[0].splitlines()[2:]]
    marked = [int(line[1:].split()[0]) for line in body if line.startswith("*")]
    best = sorted(pareto.front(rows), key=lambda row: (row.cost.kv_bytes_per_token if row.cost else 0, -(row.a_min or 0)))
    assert marked == [row.trial for row in best]


def test_dominated_plain_stays_in_the_table_without_a_mark() -> None:
    rows = fake_rows(20, seed=1)
    assert not any(row.label == "w8s8" for row in pareto.front(rows))
    line = next(line for line in tables.front_table(rows).splitlines() if "  w8s8  " in line)
    assert not line.startswith("*") and f"{rows[1].a_min:.3f} [" in line and f"{rows[1].mean_accuracy:.3f} [" in line


def test_table_says_what_the_intervals_rest_on() -> None:
    text = tables.front_table(fake_rows(3))
    assert "96 prompts" in text and "scored queries" in text


def test_nothing_to_show_says_so() -> None:
    assert tables.front_table([]) == "No trial has finished with metrics yet."
    assert tables.front_table([fake_failure(0, "x", VariantConfig())]).startswith("No trial has metrics: 1 infeasible (")


@pytest.mark.parametrize("protocols", [["outer"], ["in_sequence"], ["outer", "in_sequence"]])
def test_phase_curve_has_a_line_per_residue_and_marks_the_worst(protocols: list[str]) -> None:
    row = fake_row(4, "w8s8", VariantConfig(), np.random.default_rng(3), protocols)
    text = tables.phase_curve_text(row)
    lines = text.splitlines()
    bars = [line for line in lines if "▕" in line]
    assert len(bars) == 24 and max(map(len, lines)) <= 120
    assert text.count("◂ worst") == len(protocols)
    for score in row.scores:
        assert f"at residue {score.worst_residue}, cross-fitted {score.a_min_cross_fitted:.3f}" in text
        line = bars[score.worst_residue]
        assert line.split()[0] == str(score.worst_residue) and "◂ worst" in line and f"{min(score.accuracy):.2f}" in line


def test_bars_are_as_long_as_the_accuracy() -> None:
    row = fake_row(4, "w8s8", VariantConfig(), np.random.default_rng(3), ["outer"])
    for residue, line in enumerate(line for line in tables.phase_curve_text(row, width=20).splitlines() if "▕" in line):
        bar = line.split("▕")[1].split("▏0.")[0]
        full = bar.count("█")
        assert abs(full / 20 - row.scores[0].accuracy[residue]) < 1 / 20


def test_flat_curve_has_no_worst_residue() -> None:
    assert "worst" not in tables.phase_curve_text(fake_rows(1)[0])


def test_failed_trial_shows_its_error() -> None:
    assert "FloatingPointError" in tables.phase_curve_text(fake_failure(3, "x", VariantConfig()))
