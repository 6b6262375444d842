"""The transition sweep: where the queried record stands in each cell, whose answers land in which cell, and what is drawn and said."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from mitigate import score
from mitigate.config import TaskConfig, VariantConfig
from mitigate.kernels import reference
from mitigate.report import style, tables
from mitigate.report import transition as drawing
from mitigate.rows import Transition
from mitigate.tasks.retrieval import BOS, SEP
from mitigate.tasks.transition import Cell, cells, least_distance

TASK = TaskConfig(keys=7, names=5, filler_tokens=3, records=4, queries=2)


def found_in(task: TaskConfig, row: list[int]) -> tuple[list[tuple[int, ...]], int, int, int, list[int]]:
    """Records of one prompt, the ordinal asked for, its first token, the distance from its last token to the one that predicts the name, and the filler."""
    key, length = task.key_tokens, task.record_length
    filler_from = 2 + task.keys + task.names
    separator = row.index(SEP)
    body, query = row[1:separator], row[separator + 1 :]
    records, starts, filler, at = [], [], [], 0
    while at < len(body):
        if body[at] >= filler_from:
            filler.append(body[at])
            at += 1
        else:
            records.append(tuple(body[at : at + length]))
            starts.append(1 + at)
            at += length
    assert row[0] == BOS
    assert row.count(SEP) == 1
    assert all(2 <= token < 2 + task.keys for record in records for token in record[:key])
    assert all(2 + task.keys <= token < filler_from for record in records for token in record[key:])
    assert len({record[:key] for record in records}) == len(records) == task.records
    assert len(query) == length
    ordinal = records.index(tuple(query))
    predicts = separator + key
    return records, ordinal, starts[ordinal], predicts - (starts[ordinal] + length - 1), filler


def cell_faults(task: TaskConfig, period: int, found: list[Cell], distances: range, prompts: int) -> list[str]:
    """What is wrong with a transition sweep."""
    faults: set[str] = set()
    if [(cell.distance, cell.residue) for cell in found] != list(itertools.product(distances, range(period))):
        faults.add("not every cell once, in order")
    examples = set()
    for cell in found:
        batch = cell.prompts
        if len(batch.tokens) != prompts:
            faults.add("number of prompts")
        asked = []
        for row, target in zip(batch.tokens.tolist(), batch.target[:, 0].tolist(), strict=True):
            records, ordinal, start, distance, _ = found_in(task, row)
            asked.append((records[ordinal], frozenset(records)))
            if distance != cell.distance:
                faults.add(f"distance is {distance - cell.distance:+d} off")
            if start % period != cell.residue:
                faults.add("residue")
            if start != target:
                faults.add("target")
        examples.add(tuple(asked))
        length, name = batch.tokens.shape[1], task.name_tokens
        if batch.answer_from.tolist() != [list(range(length - name - 1, length - 1))]:
            faults.add("answer_from")
        if not (batch.gold[:, 0] == batch.tokens[:, -name:]).all():
            faults.add("gold")
    if len(examples) != 1:
        faults.add("the logical examples differ")
    return sorted(faults)


@st.composite
def tasks(draw: st.DrawFn) -> TaskConfig:
    records = draw(st.integers(1, 6))
    return dataclasses.replace(
        TASK,
        keys=records + 1,
        records=records,
        queries=1,
        key_tokens=draw(st.integers(1, 4)),
        name_tokens=draw(st.integers(1, 4)),
        names=draw(st.integers(1, 6)),
    )


@settings(deadline=None, max_examples=60)
@given(task=tasks(), period=st.integers(1, 9), first=st.integers(0, 12), count=st.integers(1, 12), prompts=st.integers(1, 4), seed=st.integers(0, 99))
@example(task=TaskConfig(), period=24, first=0, count=4, prompts=2, seed=1)
@example(task=dataclasses.replace(TASK, records=1, queries=1), period=8, first=30, count=2, prompts=2, seed=1)
def test_every_cell_is_where_it_says(task: TaskConfig, period: int, first: int, count: int, prompts: int, seed: int) -> None:
    distances = range(least_distance(task) + first, least_distance(task) + first + count)
    found = list(cells(task, period=period, distances=distances, prompts=prompts, seed=seed))
    assert cell_faults(task, period, found, distances, prompts) == []
    lengths = [cell.prompts.tokens.shape[1] for cell in found]
    most = (task.records - 1) * task.record_length + least_distance(task)  # beyond it filler alone makes up the distance
    if distances[-1] <= most:
        assert max(lengths) - min(lengths) < period + task.record_length
    else:
        assert max(lengths) - min(lengths) < period + max(task.record_length, distances[-1] - most + 1)


def test_records_make_up_most_of_the_distance() -> None:
    """The text between a record and its query is made of whole records, and of less than one record of filler: as in a prompt without a sweep."""
    for cell in cells(TaskConfig(), period=8, distances=range(2, 50), prompts=1, seed=0):
        row = cell.prompts.tokens[0].tolist()
        start = int(cell.prompts.target[0, 0])
        between = row[start + 2 : row.index(SEP)]
        filler = sum(token >= 2 + 64 + 64 for token in between)
        assert filler == (cell.distance - 2) % 2
        assert len(between) - filler == (cell.distance - 2) // 2 * 2


def test_the_least_distance_and_what_is_below_it() -> None:
    task = dataclasses.replace(TASK, key_tokens=3)
    assert least_distance(task) == 4
    cell = next(cells(task, period=1, distances=range(4, 5), prompts=1, seed=0))
    row = cell.prompts.tokens[0].tolist()
    assert row[row.index(SEP) - 4 : row.index(SEP)] == row[row.index(SEP) + 1 :], "the record, the separator, its query"
    with pytest.raises(ValueError, match=r"^cells\.distances must start at 4 or later, got 3$"):
        next(cells(task, period=1, distances=range(3, 5), prompts=1, seed=0))


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        (lambda c: dataclasses.replace(c, distance=c.distance + 1), "not every cell once, in order"),
        (lambda c: _with(c, tokens=_filler_moved(c.prompts.tokens)), "distance is -1 off"),
        (lambda c: _with(c, target=c.prompts.target + 1), "target"),
        (lambda c: _with(c, answer_from=c.prompts.answer_from - 1), "answer_from"),
        (lambda c: _with(c, tokens=c.prompts.tokens[::-1].copy(), target=c.prompts.target[::-1].copy()), "the logical examples differ"),
        (lambda c: _with(c, tokens=c.prompts.tokens[:-1], target=c.prompts.target[:-1]), "number of prompts"),
    ],
)
def test_the_checker_sees_a_planted_mistake(plant: Any, complaint: str) -> None:
    """Of all the cells, the one at distance 3 and residue 1 is spoilt: one filler token stands between its record and the query."""
    found = list(cells(TASK, period=3, distances=range(2, 6), prompts=3, seed=0))
    assert cell_faults(TASK, 3, found, range(2, 6), 3) == []
    spoilt = [plant(cell) if (cell.distance, cell.residue) == (3, 1) else cell for cell in found]
    assert complaint in cell_faults(TASK, 3, spoilt, range(2, 6), 3)


def _with(cell: Cell, **changes: Any) -> Cell:
    return dataclasses.replace(cell, prompts=dataclasses.replace(cell.prompts, **changes))


def _filler_moved(tokens: np.ndarray) -> np.ndarray:
    """The filler token in front of the separator comes to the front of the body."""
    separator = tokens[0].tolist().index(SEP)
    moved = tokens.copy()
    moved[:, 1:separator] = np.roll(tokens[:, 1:separator], 1, axis=1)
    return moved


# answers -------------------------------------------------------------------------------------------------------------------------------------


def test_answers_land_in_their_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the model that reads distance and residue off the prompt, and is right in as many prompts as a table says."""
    period, distances, prompts = 4, range(3, 9), 5
    right = np.random.default_rng(0).integers(prompts + 1, size=(len(distances), period))
    right[0, 0], right[1, 2] = 0, prompts

    def logits_at(attached: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*tokens.shape[:1], len(positions), 30)
        for index, row in enumerate(tokens.tolist()):
            _, _, start, distance, _ = found_in(TASK, row)
            good = index < right[distance - distances.start, start % period]
            for place, position in enumerate(positions.tolist()):
                gold = row[position + 1]
                logits[index, place, gold if good else (gold + 1) % 30] = 2.0
        return logits

    monkeypatch.setattr(score, "logits_at", logits_at)
    stub: Any = SimpleNamespace(model=SimpleNamespace(modules=list, eval=lambda: None, device=torch.device("cpu")))
    found = score.run_transition(stub, TASK, period=period, distances=distances, prompts=prompts, seed=0)
    assert found.distances == list(distances)
    assert (found.period, found.prompts) == (4, 5)
    np.testing.assert_allclose(found.accuracy, right / prompts, atol=1e-12)
    high, low = np.exp([2, 0]) / (np.exp(2) + 29)
    np.testing.assert_allclose(found.gold_probability, (right * high + (prompts - right) * low) / prompts, atol=1e-6)
    assert Transition.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize("variant", [VariantConfig(compress=False), VariantConfig(window=4, stride=2, local_window=3)], ids=["full", "w4s2"])
def test_answers_are_those_of_the_whole_model(variant: VariantConfig) -> None:
    """Two tokens to a name: an answer is right if both are, and its probability is their product."""
    task = dataclasses.replace(tiny_models.TASK, name_tokens=2, queries=1)
    attached = tiny_models.attached(tiny_models.tiny(), variant)
    found = score.run_transition(attached, task, period=2, distances=range(2, 12), prompts=6, seed=3)
    with attached, torch.inference_mode():
        for cell in cells(task, period=2, distances=range(2, 12), prompts=6, seed=3):
            hits, chances = [], []
            for row in cell.prompts.tokens:
                chance = attached.model(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0].softmax(-1)
                gold = row[-2:].tolist()
                hits.append(all(int(chance[-3 + i].argmax()) == gold[i] for i in (0, 1)))
                chances.append(float(chance[-3, gold[0]] * chance[-2, gold[1]]))
            at = (cell.distance - 2, cell.residue)
            assert np.array(found.accuracy)[at] == pytest.approx(np.mean(hits))
            assert np.array(found.gold_probability)[at] == pytest.approx(np.mean(chances), rel=1e-4)
    assert np.ptp(found.gold_probability) > 0


# figure and text -----------------------------------------------------------------------------------------------------------------------------


def made(distances: range = range(2, 12), period: int = 3) -> Transition:
    accuracy = np.random.default_rng(1).random((len(distances), period)).tolist()
    return Transition(distances=list(distances), period=period, prompts=5, seed=0, accuracy=accuracy, gold_probability=accuracy)


def rules(figure: Figure) -> list[float]:
    """Places of the vertical rules in each of the two panels."""
    lines = [line for axes in figure.axes for line in axes.get_lines() if list(line.get_ydata()) == [0, 1] and line.get_linestyle() == "--"]
    return [float(line.get_xdata()[0]) for line in lines]  # type: ignore[index]


@pytest.mark.parametrize(("local", "at"), [(None, None), (5, 4.5), (2, 1.5), (11, 10.5), (1, None), (12, None), (100, None)])
def test_the_figure_draws_the_window_where_it_lies(local: int | None, at: float | None) -> None:
    found = made()
    figure = drawing.figure(found, local, title="w8s8")
    assert rules(figure) == ([] if at is None else [at, at])
    said = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert said == ([] if at is None else [f"the fact leaves\nthe local window\n(L = {local})"])


def test_the_figure_shows_every_number() -> None:
    found = made()
    figure = drawing.figure(found, 5, title="w8s8, a title")
    lines, cells_ = figure.axes[:2]
    assert lines.get_title(loc="left").startswith("w8s8, a title")
    curves = {line.get_label(): line for line in lines.get_lines()}
    assert list(curves["mean over residues"].get_xdata()) == found.distances
    np.testing.assert_allclose(np.asarray(curves["mean over residues"].get_ydata()), np.mean(found.accuracy, axis=1))
    np.testing.assert_allclose(np.asarray(curves["worst residue"].get_ydata()), np.min(found.accuracy, axis=1))
    (image,) = cells_.get_images()
    np.testing.assert_allclose(np.asarray(image.get_array()), np.transpose(found.accuracy))
    assert image.get_extent() == [1.5, 11.5, 2.5, -0.5], "pixels are centred on distance and residue, residue 0 on top"
    assert image.get_clim() == (0, 1)


@pytest.mark.parametrize(("found", "local"), [(made(), None), (made(), 5), (made(range(7, 8), 1), 7)], ids=["no window", "window", "one cell"])
def test_the_figure_is_saved(found: Transition, local: int | None) -> None:
    figure = drawing.figure(found, local, title="x")
    assert style.png(figure).startswith(b"\x89PNG")
    assert len(style.svg(figure)) > 5000


def test_the_text_marks_the_window() -> None:
    found = Transition(distances=[4, 5, 6], period=2, prompts=9, seed=0, accuracy=[[1.0, 0.5], [0.25, 0.75], [0.0, 1.0]], gold_probability=[[0.0, 0.0]] * 3)
    lines = tables.transition_text(found, 5).splitlines()
    assert [line.split() for line in (lines[1], lines[3], lines[4])] == [
        ["4", "0.75", "0.50", "at", "1"],
        ["5", "0.50", "0.25", "at", "0"],
        ["6", "0.50", "0.00", "at", "0"],
    ]
    assert "9 prompts at each of 2 residues" in lines[0]
    assert "leaves the local window of 5" in lines[2]
    for local in (None, 3, 7):
        text = tables.transition_text(found, local)
        assert "window" not in text
        assert len(text.splitlines()) == 4
    assert all(len(line) <= tables.WIDTH for line in lines)


def test_the_window_is_left_where_the_last_token_is_no_longer_exact() -> None:
    """The rule stands at distance L: the last L tokens, the current one included, are exact, so a token L back is not."""
    local = 4
    seen = {distance: distance < local for distance in range(1, 8)}
    # One window, far from complete beyond the query's reach: what is exact at the query is the local window alone.
    query = torch.tensor([31])
    visible = reference.visible(query, torch.arange(32), 4, window=8, stride=8, origin=0, local=local, bypass=())
    exact = visible[0, 4:].tolist()
    assert {distance: bool(exact[31 - distance]) for distance in range(1, 8)} == seen
