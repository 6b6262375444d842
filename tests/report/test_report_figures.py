"""Figures come out for any rows, show what they should, and leave matplotlib as it was."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from mitigate.config import VariantConfig
from mitigate.report import figures, kernels_figure, style
from mitigate.report.labels import Label, place
from mitigate.rows import Row
from tests.fake_rows import fake_failure, fake_row, fake_rows

FAILURES = [fake_failure(trial, "failed", VariantConfig()) for trial in range(2)]
DRAWN = (figures.a_min_vs_kv, figures.phase_curves, figures.front_matrix)


def words(figure: Figure) -> str:
    """All visible text of a figure."""
    found = figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_visible())
    return "\n".join(text.get_text() for text in found if isinstance(text, Text))


@pytest.mark.parametrize("draw", DRAWN)
@pytest.mark.parametrize("rows", [[], FAILURES], ids=["none", "failures"])
def test_nothing_finished_gives_a_figure_that_says_so(draw: object, rows: list[Row]) -> None:
    assert callable(draw)
    figure = draw(rows)
    assert "No finished trial yet" in words(figure)
    assert style.png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize("draw", DRAWN)
@pytest.mark.parametrize(
    "rows", [fake_rows(1), fake_rows(3, protocols=["outer"]), fake_rows(3)[2:], fake_rows(14, 1) + FAILURES], ids=["1", "outer", "no-anchor", "14"]
)
def test_figures_of_few_rows_save(draw: object, rows: list[Row]) -> None:
    assert callable(draw)
    figure = draw(rows)
    assert style.png(figure).startswith(b"\x89PNG") and b"</svg>" in style.svg(figure)


def test_hundreds_of_rows_stay_readable() -> None:
    figure = figures.a_min_vs_kv(fake_rows(300, 1))
    labels = [line for line in words(figure).splitlines() if "#" in line]
    assert 3 <= len(labels) <= figures.MOST_LABELS
    assert len([axes for axes in figures.phase_curves(fake_rows(300, 1)).axes if axes.lines]) == 12


@pytest.mark.parametrize("draw", [figures.a_min_vs_kv, figures.phase_curves])
@pytest.mark.parametrize("count", [1, 2, 12, 300])
def test_legend_is_whole_and_clear_of_the_title(draw: Callable[[list[Row]], Figure], count: int) -> None:
    figure = draw(fake_rows(count, 1))
    legends = [*figure.legends, *(legend for axes in figure.axes if (legend := axes.get_legend()))]
    titles = figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_text().startswith(("Worst-phase accuracy", "Accuracy by phase")))
    assert len(legends) == len(titles) == 1
    legend, title = legends[0].get_window_extent(), titles[0].get_window_extent()
    for box in (legend, title):
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert 0 <= box.y0 < box.y1 <= figure.bbox.y1
    assert not legend.overlaps(title)
    assert legend.y0 >= max(axes.bbox.y1 for axes in figure.axes)


def test_headline_figure_names_the_references_and_shows_both_numbers() -> None:
    rows = fake_rows(12, 1)
    figure = figures.a_min_vs_kv(rows)
    text = words(figure)
    assert "full #0" in text and "w8s8 #1" in text and "full attention" in text and "plain W8/S8" in text
    axes = figure.axes[0]
    drawn = {round(float(y), 6) for line in axes.lines for y in np.atleast_1d(line.get_ydata())}
    for row in rows:
        if row.status == "ok":
            assert row.a_min is not None and row.mean_accuracy is not None
            assert {round(row.a_min, 6), round(row.mean_accuracy, 6)} <= drawn
    assert axes.get_ylim()[0] == 0


def test_phase_curves_draw_each_protocol_over_the_whole_range() -> None:
    row = fake_row(5, "w16s8", VariantConfig(window=16), np.random.default_rng(0))
    figure = figures.phase_curve(row, fake_rows(2))
    axes = figure.axes[0]
    curves = [np.asarray(line.get_ydata()).tolist() for line in axes.lines]
    assert all(score.accuracy in curves for score in row.scores)
    assert axes.get_ylim()[0] == 0 and 1 <= axes.get_ylim()[1] < 1.1
    text = words(figure)
    assert "w16s8 #5" in text and f"A_min {row.a_min:.3f}" in text and f"mean {row.mean_accuracy:.3f}" in text
    assert all(str(score.worst_residue) in text.splitlines() for score in row.scores)


def test_phase_curve_of_a_failure_says_so() -> None:
    assert "no phase sweep" in words(figures.phase_curve(FAILURES[0]))


def test_matrix_has_six_panels_with_named_axes() -> None:
    figure = figures.front_matrix(fake_rows(10, 1))
    assert len([axes for axes in figure.axes if axes.axison]) == 6
    text = words(figure)
    for name in ("KV bytes kept, %", "decode throughput relative to full attention", "mean accuracy (fraction)", "A_min, worst phase (fraction)"):
        assert name in text


def test_global_settings_neither_change_nor_matter() -> None:
    rows = fake_rows(3)
    plain = style.svg(figures.a_min_vs_kv(rows))
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "axes.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        assert style.svg(figures.a_min_vs_kv(rows)) == plain
        assert dict(matplotlib.rcParams) == before


def test_markup_in_a_label_is_drawn_as_it_stands() -> None:
    row = fake_rows(2)[1].model_copy(update={"label": "$\\frac{1}{$ <b>"})
    figure = figures.a_min_vs_kv([fake_rows(1)[0], row])
    assert "$\\frac{1}{$ <b> #1" in words(figure)
    assert style.svg(figure) and style.svg(figures.phase_curves([row])) and style.svg(figures.front_matrix([row]))


def test_labels_do_not_overlap_each_other_or_a_mark() -> None:
    with style.styled():
        figure = style.new_figure(6, 4)
        axes = figure.subplots()
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        marks = [(0.5 + 0.01 * i, 0.5 + 0.02 * (i % 3)) for i in range(6)]
        place(axes, [Label(x=x, y=y, text=f"a label {i}") for i, (x, y) in enumerate(marks)], marks)
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
    assert len(boxes) == 6
    for i, box in enumerate(boxes):
        assert all(box.x1 <= other.x0 or other.x1 <= box.x0 or box.y1 <= other.y0 or other.y1 <= box.y0 for other in boxes[:i])
        assert not any(box.contains(*axes.transData.transform(mark)) for mark in marks)


def test_inline_svg_takes_its_colours_and_ids_from_the_page() -> None:
    figure = figures.a_min_vs_kv(fake_rows(3))
    text = style.inline(style.svg(figure), "front", "a description")
    assert text.startswith("<svg ") and "var(--blue)" in text and "var(--surface)" in text
    assert not any(value in text for value in style.COLOURS.values())
    assert "<!DOCTYPE" not in text and "<metadata" not in text
    assert 'href="#front-' in text and "url(#front-" in text


@pytest.mark.parametrize("last", [2048, 4096])
def test_the_scaling_figure_says_where_masked_sdpa_stops_and_why(last: int) -> None:
    ways = [(way, length) for way in ("training path", "masked SDPA") for length in (1024, 2048, 4096) if way == "training path" or length <= last]
    figure = kernels_figure.attend_scaling([{"way": way, "length": length, "us_per_query": length / 50, "peak_mib": length / 200} for way, length in ways])
    notes = [text for axes in figure.axes for text in axes.texts if text.get_text().startswith("not run beyond")]
    assert len(notes) == (2 if last < 4096 else 0)
    figure.draw_without_rendering()
    for note in notes:
        assert note.get_text() == "not run beyond 2K tokens:\nits mask and its time\ngrow with T²"
        box = note.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1 and 0 <= box.y0 < box.y1 <= figure.bbox.y1
