"""Progress, the space, importance and gates: the numbers before any drawing, then the figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text
from safetensors.numpy import save_file

from mitigate import pareto
from mitigate.config import VariantConfig
from mitigate.config_files import from_dict
from mitigate.report import gates, gates_figure, inline, progress, search_figures, space, style
from mitigate.rows import Row
from tests.fake_rows import fake_failure, fake_row, fake_rows, store_gates

SPACE = {"stride": (4, 8), "overlap": ("1", "3/2", "2"), "stagger": ("none", "half"), "gate": ("scalar", "vector")}


def words(figure: Figure) -> str:
    """All visible text of a figure."""
    found = figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_visible())
    return "\n".join(text.get_text() for text in found if isinstance(text, Text))


# ---------------------------------------------------------------- progress


def test_progress_is_the_hypervolume_of_each_prefix_and_the_sum_of_times() -> None:
    rows = fake_rows(25, 3)
    found = progress.progress(rows, {"name": "quick", "sampler": "tpe"})
    assert found.volume == pytest.approx([pareto.hypervolume(rows[: n + 1]) for n in range(25)])
    assert found.hours == pytest.approx(np.cumsum([row.wall_s for row in rows]) / 3600)
    assert all(a <= b + 1e-12 for a, b in zip(found.volume, found.volume[1:], strict=False))
    assert (found.name, found.sampler, found.anchors) == ("quick", "tpe", 2)


def test_progress_goes_by_trial_number_and_takes_any_rows() -> None:
    rows = fake_rows(9, 3)
    assert progress.progress(rows[::-1], {}).volume == progress.progress(rows, {}).volume
    assert progress.progress([], {}).volume == []
    assert progress.progress([fake_failure(0, "x", VariantConfig())], {}).volume == [0.0]


def test_baseline_note_says_what_is_there_or_why_nothing_is() -> None:
    this, other = progress.progress(fake_rows(3), {"sampler": "tpe"}, "a"), progress.progress(fake_rows(4), {"sampler": "random"}, "b")
    assert progress.baseline_note(this, [other]) == "Random baseline: b (4 trials)."
    assert 'sampler = "random"' in progress.baseline_note(this, []) and progress.baseline_note(this, []).startswith("No random baseline")
    assert "it is a baseline itself" in progress.baseline_note(other, [])


# ---------------------------------------------------------------- the space


def test_parameters_are_those_of_the_space_as_far_as_they_vary() -> None:
    rng = np.random.default_rng(0)
    changes = [{"window": 8}, {"window": 12}, {"window": 16, "gate": "vector"}, {"window": 4, "stride": 4}, {"window": 6, "stride": 4}]
    rows = [fake_row(i, "x", from_dict(VariantConfig, one), rng) for i, one in enumerate(changes)]
    found = space.parameters(rows, SPACE)
    assert [axis.name for axis in found] == ["stride", "overlap", "gate"]  # stagger never varies
    assert found[1].levels == ["1", "3/2", "2"] and found[1].level_N == [0, 1, 2, 0, 1]
    assert [axis.name for axis in space.parameters(rows)] == ["window", "stride", "gate"]
    assert space.parameters(rows)[0].levels == ["4", "6", "8", "12", "16"]
    assert space.parameters([], SPACE) == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5)), min_size=2, max_size=30))
def test_eta_squared_is_between_over_total(drawn: list[tuple[int, int]]) -> None:
    level, value = [a for a, _ in drawn], np.array([float(b) for _, b in drawn])
    share = float(space.eta_squared(value[None], level)[0])
    total = ((value - value.mean()) ** 2).sum()
    means = np.array([value[[i for i, own in enumerate(level) if own == one]].mean() for one in level])
    expected = ((means - value.mean()) ** 2).sum() / total if total > 0 else 0.0
    assert share == pytest.approx(expected, abs=1e-9) and -1e-9 <= share <= 1 + 1e-9


def test_what_decides_is_beyond_chance_and_what_does_not_is_not() -> None:
    found = {(one.objective, one.parameter): one for one in space.importances(fake_rows(120, 4))}
    kv_of_stride = found["cost.kv_bytes_per_token", "stride"]
    assert kv_of_stride.beyond_chance and kv_of_stride.p_value < 0.001 and kv_of_stride.share > 0.5
    assert not found["cost.kv_bytes_per_token", "gate"].beyond_chance
    assert found["a_min", "stagger"].beyond_chance


def test_chance_alone_seldom_passes() -> None:
    rng, passed = np.random.default_rng(0), 0
    for _ in range(40):
        rows = fake_rows(40, int(rng.integers(1_000_000)), infeasible=0.0)
        shuffled = rng.permutation(len(rows) - 1) + 1
        mixed = [rows[0], *[row.model_copy(update={"a_min": rows[i].a_min}) for row, i in zip(rows[1:], shuffled, strict=True)]]
        passed += any(one.beyond_chance for one in space.importances(mixed, shuffles=400) if one.objective == "a_min")
    assert passed <= 7  # 2 expected of 40; 8 or more has a chance below 0.001


def test_few_trials_tell_nothing() -> None:
    rows = fake_rows(6)
    assert space.importances(rows) == []
    assert space.importance_note(rows, []) == f"{len(space.compressed(rows))} compressed trials: too few to tell (at least 8)."
    alike = [fake_row(i, "x", VariantConfig(), np.random.default_rng(i)) for i in range(9)]
    assert space.importances(alike) == [] and "No parameter varies over 9" in space.importance_note(alike, [])


def test_a_constant_objective_explains_nothing() -> None:
    rows = [row.model_copy(update={"a_min": 0.25}) for row in fake_rows(20, 1, infeasible=0.0)]
    assert all(one.share == 0 and not one.beyond_chance for one in space.importances(rows) if one.objective == "a_min")


def test_parallel_has_a_line_per_compressed_trial_near_its_level() -> None:
    rows = fake_rows(40, 2)
    found = space.parallel(rows)
    assert found.height_NA.shape == (len(space.compressed(rows)), len(found.names))
    assert sum(found.on_front) == sum(not pareto.is_full(row) for row in pareto.front(rows))
    for place, levels in enumerate(found.levels):
        assert sum(level.trials for level in levels) == len(found.rows) and sum(level.on_front for level in levels) == sum(found.on_front)
        heights = np.array([level.height for level in levels])
        axis = space.parameters(found.rows)[place]
        assert np.abs(found.height_NA[:, place, None] - heights).argmin(axis=1).tolist() == axis.level_N
    assert space.parallel([]).names == []


# ---------------------------------------------------------------- gates


def test_static_gates_by_hand() -> None:
    bias = np.log(np.array([[1.0, 2.0, 1.0, 1.0], [3.0, 2.0, 1.0, 3.0]]))  # two offsets; K heads 0 and 1, then V heads 0 and 1
    found = gates.static_gates({"0.gate_bias": bias, "0.gate_weight": np.zeros((2, 3, 4))}, kv_heads=2)
    assert [(one.layer, one.branch, one.head) for one in found] == [(0, "K", 0), (0, "K", 1), (0, "V", 0), (0, "V", 1)]
    assert [one.weights for one in found] == [pytest.approx(pair) for pair in ([0.25, 0.75], [0.5, 0.5], [0.5, 0.5], [0.25, 0.75])]
    vector = gates.static_gates({"10.gate_bias": bias, "2.gate_bias": bias}, kv_heads=2, branches=("K and V",))
    assert [(one.layer, one.head) for one in vector] == [(2, 0), (2, 1), (10, 0), (10, 1)]
    assert vector[0].weights == pytest.approx([0.375, 0.625])  # the mean of two channels
    with pytest.raises(ValueError, match="4 gate outputs"):
        gates.static_gates({"0.gate_bias": bias}, kv_heads=3)


def test_gates_of_a_trial_or_why_there_are_none(tmp_path: Path) -> None:
    full, plain, *_ = fake_rows(3)
    assert gates.of_trial(tmp_path, full) == "Full attention has no gates."
    assert gates.of_trial(tmp_path, plain) == "Its weights are not in the study folder."
    store_gates(tmp_path, 1, window=8)
    profiles = gates.of_trial(tmp_path, plain)
    assert not isinstance(profiles, str) and len(profiles) == 4 and all(sum(one.weights) == pytest.approx(1) for one in profiles)
    path = tmp_path / "trials" / "0001" / gates.WEIGHTS
    save_file({"0.gate_weight": np.zeros((1, 4, 2), np.float32)}, path)
    assert "has no bias" in str(gates.of_trial(tmp_path, plain))
    path.write_bytes(b"rubbish")
    assert "cannot be read" in str(gates.of_trial(tmp_path, plain))


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("rows", [[], [fake_failure(0, "x", VariantConfig())], fake_rows(1), fake_rows(3), fake_rows(30, 1)], ids=["0", "bad", "1", "3", "30"])
def test_search_figures_come_out_of_any_rows(rows: list[Row]) -> None:
    drawn = [
        search_figures.hypervolume(progress.progress(rows, {"sampler": "tpe"}, "quick"), [progress.progress(rows[:2], {"sampler": "random"}, "r")]),
        search_figures.parallel_coordinates(rows),
        search_figures.importance(rows),
        gates_figure.gate_profiles([]),
    ]
    for figure in drawn:
        assert style.svg(figure) and words(figure).strip()


def test_hypervolume_names_its_axes_and_the_lack_of_a_baseline() -> None:
    rows = fake_rows(12, 1)
    text = words(search_figures.hypervolume(progress.progress(rows, {"sampler": "tpe"}, "quick")))
    assert "trials, infeasible ones counted" in text and "(min)" in text and "hypervolume of the front" in text
    assert "No random baseline" in text and "anchors end: 2" in text and f"{pareto.hypervolume(rows):.3f}" in text


def test_parallel_coordinates_name_every_level_with_its_counts() -> None:
    rows = fake_rows(60, 1)
    text, found = words(search_figures.parallel_coordinates(rows)), space.parallel(rows)
    for name, levels in zip(found.names, found.levels, strict=True):
        assert name.replace("_", "\n") in text
        assert all(level.name in text and f"{level.on_front} / {level.trials}" in text for level in levels)


def with_results(rows: list[Row], a_min: list[float], kept: list[float]) -> list[Row]:
    """The compressed rows with other results, in turn."""
    found = []
    for number, row in enumerate(row for row in rows if row.cost is not None and not pareto.is_full(row)):
        assert row.cost is not None
        cost = row.cost.model_copy(update={"kv_kept": kept[number % len(kept)]})
        found.append(row.model_copy(update={"a_min": a_min[number % len(a_min)], "cost": cost}))
    return found


@pytest.mark.parametrize(
    ("a_min", "kept", "a_min_marks", "kept_marks"),
    [
        ([0.0, 0.02, 0.043], [0.0625, 0.5, 0.8], "0 0.01 0.02 0.03 0.04 0.05", "50 20 10"),
        ([0.3, 1.0], [0.125, 0.25], "0 0.2 0.4 0.6 0.8 1", "25 22.5 20 17.5 15 12.5"),
        ([0.25], [17 / 128], "0 0.05 0.1 0.15 0.2 0.25", "16 14 12"),
        ([0.0], [0.125, 0.12502], "0 0.2 0.4 0.6 0.8 1", "12.502 12.5015 12.501 12.5005 12.5"),
    ],
)
def test_results_have_round_marks_where_they_belong(a_min: list[float], kept: list[float], a_min_marks: str, kept_marks: str) -> None:
    rows = with_results(fake_rows(20, 1), a_min, kept)
    _, height, marks = search_figures._a_min_axis(rows)
    assert [words for _, words in marks] == a_min_marks.split()
    top = float(marks[-1][1])
    assert height == pytest.approx([(row.a_min or 0) / top for row in rows]) and max(height) <= 1
    assert [at for at, _ in marks] == pytest.approx([float(words) / top for _, words in marks])
    _, height, marks = search_figures._kept_axis(rows)
    assert [words for _, words in marks] == [f"{mark} %" for mark in kept_marks.split()]
    assert all(0 <= at <= 1 for at in [*height, *(at for at, _ in marks)])
    known = sorted(
        [*((float(words[:-2]), at) for at, words in marks), *((100 * row.cost.kv_kept, at) for row, at in zip(rows, height, strict=True) if row.cost)]
    )
    assert [at for _, at in known] == sorted((at for _, at in known), reverse=True), "lines and marks keep one scale"
    text = words(search_figures.parallel_coordinates(rows)).splitlines()
    assert {*a_min_marks.split(), *(f"{mark} %" for mark in kept_marks.split())} <= set(text)


@settings(deadline=None)
@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0))
def test_round_marks_differ_whatever_the_range(one: float, other: float) -> None:
    rows = with_results(fake_rows(6, 1), [one, other], [one, other])
    for _, _, marks in (search_figures._a_min_axis(rows), search_figures._kept_axis(rows)):
        assert len({words for _, words in marks}) == len(marks) >= 2
        assert all(len(words.removesuffix(" %").lstrip("0.").replace(".", "")) <= 8 for _, words in marks)


def test_importance_draws_each_share_beside_its_chance() -> None:
    rows = fake_rows(60, 1)
    figure, found = search_figures.importance(rows), space.importances(rows)
    widths = sorted(round(float(patch.get_width()), 9) for axes in figure.axes for patch in axes.patches)
    assert widths == sorted(round(one.share, 9) for one in found)
    assert "share of the objective's variance" in words(figure)


def test_gate_profiles_draw_a_bar_an_offset_and_say_what_is_left_out() -> None:
    row, profiles = fake_rows(2)[1], [gates.GateProfile(layer=i, branch="K", head=0, weights=[0.5, 0.25, 0.25]) for i in range(20)]
    figure = gates_figure.gate_profiles([(row, profiles)])
    assert sum(len(axes.patches) for axes in figure.axes) == gates_figure.MOST_STRIPS * 3
    assert "8 more heads not drawn" in words(figure) and "L0 K h0" in words(figure)


@pytest.mark.parametrize("panels", [1, 2, 3, 6])
def test_gate_profiles_have_a_whole_title_and_legend(panels: int) -> None:
    profiles = [gates.GateProfile(layer=0, branch="K", head=0, weights=[0.5, 0.25, 0.25])]
    figure = gates_figure.gate_profiles([(row, profiles) for row in fake_rows(panels + 1)[1:]])
    figure.draw_without_rendering()
    (title,) = figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_text().startswith("Static gates"))
    (legend,) = figure.legends
    for box in (title.get_window_extent(), legend.get_window_extent()):
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert 0 <= box.y0 < box.y1 <= figure.bbox.y1


def test_gate_profiles_of_coarse_layers_number_the_offsets_of_each_window() -> None:
    row = fake_rows(2)[1]
    profiles = [gates.GateProfile(layer=i, branch="K", head=0, weights=[1 / w] * w) for i, w in enumerate((32, 2, 32, 2))]
    figure = gates_figure.gate_profiles([(row, profiles)])
    assert "offset in the window of 32 or 2 tokens, by layer" in words(figure)
    assert [[int(tick) for tick in axes.get_xticks()] for axes in figure.axes] == [list(range(0, 32, 2)), [0, 1]] * 2
    text = inline.gates(profiles)
    assert "offset in the window of 32 or 2 tokens, by layer" in text and text.count(">30</text>") == 2 and text.count(">1</text>") == 2
    same = inline.gates(profiles[1::2])
    assert "offset in the window of 2 tokens" in same and same.count(">1</text>") == 1, "one scale serves strips of one window"


def test_small_pictures_keep_to_their_frame() -> None:
    row = fake_rows(2)[1]
    text = inline.curve(row)
    assert text.count("<polyline") == 2 and text.count("<circle") == 2 and "t mod 24" in text
    assert inline.curve(fake_failure(0, "x", VariantConfig())) == "" and inline.gates([]) == ""
    flat = inline.curve(fake_rows(1)[0])
    assert "<circle" not in flat
