"""The published numbers, recomputed; and that the comparison can fail."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mitigate.paper import PaperRow, format_paper_table, paper_table


@pytest.fixture(scope="module")
def rows() -> list[PaperRow]:
    return paper_table()


def test_every_published_run_is_there(rows: list[PaperRow]) -> None:
    kinds = [row.kind for row in rows]
    assert (kinds.count("compressed"), kinds.count("full_attention"), kinds.count("released")) == (23, 3, 5)
    assert len({row.id for row in rows}) == 31
    assert all([sweep.protocol for sweep in row.sweeps] == ["outer", "in_sequence"] for row in rows if row.kind == "compressed")
    assert {row.stride for row in rows} == {None, 2, 4, 6, 8, 12}


def test_printed_numbers_follow_from_the_curves(rows: list[PaperRow]) -> None:
    for row in rows:
        for sweep in row.sweeps:
            assert sweep.mean == pytest.approx(sweep.published_mean, abs=0.00501), row.name
            assert sweep.gap == pytest.approx(sweep.published_gap, abs=0.00501), row.name
            assert sweep.agrees, row.name
            if sweep.wilson_published:
                np.testing.assert_allclose(sweep.wilson_low, sweep.published_low, atol=0.00501, err_msg=row.name)
                np.testing.assert_allclose(sweep.wilson_high, sweep.published_high, atol=0.00501, err_msg=row.name)
            else:  # clustered bootstrap with one example a cluster: the same but for resampling noise and the Wilson interval's lean towards 50 %
                assert 0.05 < sweep.interval_difference < 0.5, row.name
        assert row.agrees


def test_known_rows(rows: list[PaperRow]) -> None:
    flash = next(row for row in rows if row.name == "DeepSeek-V4-Flash-Base")
    assert flash.sweeps[0].n == 256
    assert (round(flash.sweeps[0].mean, 2), round(flash.sweeps[0].worst, 2), round(flash.sweeps[0].gap, 2)) == (52.64, 29.69, 40.23)
    seed42 = rows[0]
    assert (seed42.window, seed42.stride) == (8, 8)
    assert [round(sweep.gap, 1) for sweep in seed42.sweeps] == [75.3, 44.0]
    assert seed42.sweeps[0].worst_residue == 23


def test_detected_periods(rows: list[PaperRow]) -> None:
    for row in rows:
        if row.kind == "compressed":
            assert row.period == row.stride, (row.name, row.detection.reason)
            assert row.p_value < 0.01
        elif row.kind == "full_attention":
            assert row.period is None
            assert row.detection.status == "none"
    released = {row.name: (row.period, row.detection.status) for row in rows if row.kind == "released"}
    assert released == {
        "DeepSeek-V4-Flash-Base": (4, "detected"),
        "DeepSeek-V4-Flash-0731": (4, "detected"),
        "DeepSeek-V4-Pro-Base": (4, "detected"),
        "DeepSeek-V4-Pro-0813": (None, "undecided"),
        "DeepSeek-V4.1-Flash": (None, "undecided"),
    }


def test_disagreement_is_noticed(rows: list[PaperRow]) -> None:
    needle = rows[-1].sweeps[0]
    for name, value in (("mean", needle.mean + 0.011), ("worst", needle.worst - 0.011), ("gap", needle.gap + 0.011)):
        assert not dataclasses.replace(needle, **{name: value}).agrees
    moved = (needle.wilson_low[0] + 0.02, *needle.wilson_low[1:])
    assert not dataclasses.replace(needle, wilson_low=moved).agrees
    wrong_period = dataclasses.replace(rows[0], detection=dataclasses.replace(rows[0].detection, period=4))
    assert not wrong_period.agrees


def test_table_is_legible(rows: list[PaperRow]) -> None:
    text = format_paper_table(rows)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 170
    assert sum(line.endswith("yes") for line in lines) == 54  # 23 runs twice, 8 once
    assert "stride detected at p < 0.01 in 26 of 28" in text.lower()
    assert lines[-1] == "Undecided: DeepSeek-V4-Pro-0813, DeepSeek-V4.1-Flash."
    broken = [dataclasses.replace(rows[0], sweeps=(dataclasses.replace(rows[0].sweeps[0], gap=0.0),)), *rows[1:]]
    assert "NO" in format_paper_table(broken)
    assert "to rounding in 30." in format_paper_table(broken)
