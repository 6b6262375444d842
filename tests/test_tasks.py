"""Retrieval prompts, token by token: one checker of a whole sweep, tried on planted mistakes and then on what the task makes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mitigate.config import TaskConfig
from mitigate.tasks import retrieval
from mitigate.tasks.retrieval import BOS, SEP, Prompts

PROTOCOLS: tuple[Literal["outer", "in_sequence"], ...] = ("outer", "in_sequence")
SMALL = TaskConfig(keys=9, names=5, filler_tokens=3, records=6, queries=8, filler=13, filler_in_sequence=17)


def parse(task: TaskConfig, row: list[int]) -> tuple[list[tuple[int, int, int]], list[int], list[tuple[int, int, int]]]:
    """Records (position, key, name), filler tokens in order, queries (position, key, name) of one prompt; ValueError where it is malformed."""
    keys = range(2, 2 + task.keys)
    names = range(keys.stop, keys.stop + task.names)
    filler = range(names.stop, names.stop + task.filler_tokens)
    if row[0] != BOS or row.count(BOS) != 1 or row.count(SEP) != 1:
        raise ValueError("one BOS in front, one SEP")
    separator = row.index(SEP)
    records, padding, at = [], [], 1
    while at < separator:
        if row[at] in filler:
            padding.append(row[at])
            at += 1
        elif row[at] in keys and row[at + 1] in names:
            records.append((at, row[at], row[at + 1]))
            at += 2
        else:
            raise ValueError(f"token {row[at]} at {at} is neither filler nor a key with its name")
    tail = row[separator + 1 :]
    if len(tail) % 2 or any(key not in keys or name not in names for key, name in zip(tail[::2], tail[1::2], strict=True)):
        raise ValueError("queries are keys with their names")
    return records, padding, [(separator + 1 + 2 * i, key, name) for i, (key, name) in enumerate(zip(tail[::2], tail[1::2], strict=True))]


def prompt_faults(task: TaskConfig, protocol: str, batch: Prompts) -> list[str]:
    """What is wrong with a batch, prompt by prompt."""
    faults = []
    filler = task.filler if protocol == "outer" else task.filler_in_sequence
    if batch.tokens.dtype != np.int64 or batch.tokens.shape[1] != 2 + 2 * task.records + filler + 2 * task.queries:
        faults.append("length")
    for b, row in enumerate(batch.tokens.tolist()):
        try:
            records, padding, queries = parse(task, row)
        except ValueError as error:
            faults.append(f"prompt {b}: {error}")
            continue
        by_key = {key: (at, name) for at, key, name in records}
        if len(records) != task.records or len(by_key) != task.records:
            faults.append(f"prompt {b}: records or distinct keys")
        if len(padding) != filler or len(queries) != task.queries:
            faults.append(f"prompt {b}: filler or queries")
        if [at for at, _, _ in queries] != batch.answer_from.tolist():
            faults.append(f"prompt {b}: answer_from")
        for q, (_, key, name) in enumerate(queries):
            if key not in by_key or by_key[key][1] != name or batch.gold[b, q] != name:
                faults.append(f"prompt {b}: query {q} has a wrong answer")
            elif by_key[key][0] != batch.target[b, q]:
                faults.append(f"prompt {b}: query {q} points at {batch.target[b, q]}, its record stands at {by_key[key][0]}")
            if batch.repeat[b, q] != (key in [other for _, other, _ in queries[:q]]):
                faults.append(f"prompt {b}: repeat flag of query {q}")
    return faults


def placement_faults(task: TaskConfig, period: int, batch: Prompts) -> list[str]:
    """What is wrong with the P placements of one logical prompt: contents that differ, or residues that a record misses."""
    faults = []
    parsed = [parse(task, row) for row in batch.tokens.tolist()]
    contents = {(tuple(r[1:] for r in records), tuple(padding), tuple(queries)) for records, padding, queries in parsed}
    if len(contents) != 1:
        faults.append(f"{len(contents)} different contents")
    if len(parsed) != period:
        faults.append(f"{len(parsed)} placements")
    for record in range(task.records):
        residues = sorted(records[record][0] % period for records, _, _ in parsed)
        if residues != list(range(period)):
            faults.append(f"record {record} stands at residues {residues}")
    return faults


@st.composite
def tasks(draw: st.DrawFn) -> tuple[TaskConfig, int]:
    period, records = draw(st.integers(2, 24)), draw(st.integers(1, 9))
    task = TaskConfig(
        keys=records + draw(st.integers(0, 3)),
        names=draw(st.integers(1, 5)),
        filler_tokens=draw(st.integers(1, 3)),
        records=records,
        queries=draw(st.integers(1, 5)),
        filler=period - 1 + draw(st.integers(0, 9)),
        filler_in_sequence=period + draw(st.integers(0, 30)),
    )
    return task, period


@settings(deadline=None, max_examples=60)
@given(drawn=tasks(), protocol=st.sampled_from(PROTOCOLS), seed=st.integers(0, 1000))
def test_a_sweep_is_token_exact_and_visits_every_residue_once(drawn: tuple[TaskConfig, int], protocol: Literal["outer", "in_sequence"], seed: int) -> None:
    task, period = drawn
    batches = list(retrieval.sweep(task, protocol, period=period, prompts=2, seed=seed))
    assert len(batches) == 2
    for batch in batches:
        assert prompt_faults(task, protocol, batch) == []
        assert placement_faults(task, period, batch) == []


@settings(deadline=None, max_examples=30)
@given(drawn=tasks(), protocol=st.sampled_from(PROTOCOLS), seed=st.integers(0, 1000))
def test_training_batches_are_token_exact(drawn: tuple[TaskConfig, int], protocol: Literal["outer", "in_sequence"], seed: int) -> None:
    task, _ = drawn
    batch = retrieval.training_batch(task, np.random.default_rng(seed), 5, protocol)
    assert len(batch.tokens) == 5
    assert prompt_faults(task, protocol, batch) == []
    if protocol == "outer":
        for row in batch.tokens.tolist():
            records, _, _ = parse(task, row)
            assert [at - records[0][0] for at, _, _ in records] == [2 * r for r in range(task.records)], "records stay together"


def test_a_full_size_sweep() -> None:
    task = TaskConfig()
    for protocol in PROTOCOLS:
        for batch in retrieval.sweep(task, protocol, period=24, prompts=2, seed=1):
            assert prompt_faults(task, protocol, batch) == []
            assert placement_faults(task, 24, batch) == []


def first(protocol: Literal["outer", "in_sequence"] = "outer") -> Prompts:
    return next(iter(retrieval.sweep(SMALL, protocol, period=6, prompts=1, seed=3)))


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        (lambda p: dataclasses.replace(p, target=p.target + 1), "points at"),
        (lambda p: dataclasses.replace(p, answer_from=p.answer_from - 2), "answer_from"),
        (lambda p: dataclasses.replace(p, repeat=~p.repeat), "repeat flag"),
        (lambda p: dataclasses.replace(p, tokens=np.roll(p.tokens, 1, axis=1)), "one BOS in front"),
        (lambda p: dataclasses.replace(p, tokens=np.where(p.tokens == 2, 3, p.tokens)), "prompt 0"),
    ],
)
def test_the_prompt_checker_sees_a_planted_mistake(plant: Callable[[Prompts], Prompts], complaint: str) -> None:
    faults = prompt_faults(SMALL, "outer", plant(first()))
    assert any(complaint in fault for fault in faults), faults


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_placement_checker_sees_a_planted_mistake(protocol: Literal["outer", "in_sequence"]) -> None:
    def only(batch: Prompts, rows: list[int]) -> Prompts:
        return Prompts(tokens=batch.tokens[rows], answer_from=batch.answer_from, target=batch.target[rows], repeat=batch.repeat[rows])

    batch = first(protocol)
    assert placement_faults(SMALL, 6, batch) == []
    assert placement_faults(SMALL, 6, only(batch, [0, 2, 4, 0, 2, 4]))[-1].startswith("record 5 stands at residues"), "only even placements"
    assert placement_faults(SMALL, 6, only(batch, [0, 1, 2, 3, 4]))[0] == "5 placements"
    shifted = batch.tokens.copy()
    body = shifted[2, 1 : shifted.shape[1] - 1 - 2 * SMALL.queries]
    body[:] = np.roll(body, 1)  # one placement, one token further
    broken = dataclasses.replace(batch, tokens=shifted)
    try:
        assert placement_faults(SMALL, 6, broken) != []
    except ValueError:
        assert prompt_faults(SMALL, protocol, broken) != []
    other = batch.tokens.copy()
    first_filler = 2 + SMALL.keys + SMALL.names
    column = int(np.flatnonzero(other[1] >= first_filler)[0])
    other[1, column] = first_filler + (other[1, column] - first_filler + 1) % SMALL.filler_tokens
    assert "2 different contents" in placement_faults(SMALL, 6, dataclasses.replace(batch, tokens=other))


def test_queries_are_drawn_with_replacement() -> None:
    batch = retrieval.training_batch(SMALL, np.random.default_rng(0), 400, "outer")
    targets = [len(set(row.tolist())) for row in batch.target]
    # 8 draws from 6 records: never all distinct, on average 6 (1 - (5/6)^8) = 4.6 distinct.
    assert np.mean(targets) == pytest.approx(6 * (1 - (5 / 6) ** 8), abs=0.15)
    assert batch.repeat[:, 0].sum() == 0
    assert (batch.repeat.sum(axis=1) == 8 - np.array(targets)).all()
    record = np.array([[sorted(set(row.tolist())).index(t) for t in row] for row in batch.target])
    assert record.max() == 5


def test_everything_is_drawn_evenly() -> None:
    batch = retrieval.training_batch(SMALL, np.random.default_rng(0), 3000, "in_sequence")
    counts = np.bincount(batch.tokens.ravel(), minlength=retrieval.vocabulary(SMALL).size)
    assert counts[BOS] == counts[SEP] == 3000
    for span in (slice(2, 11), slice(11, 16), slice(16, 19)):
        assert counts[span].min() > 0.9 * counts[span].mean()
    assert len(counts) == 19 == retrieval.vocabulary(SMALL).size
    gaps = batch.target.min(), batch.target.max()
    assert gaps == (1, 1 + 2 * 5 + 17), "records reach both ends of the body"


def resultant_lengths(task: TaskConfig, protocol: Literal["outer", "in_sequence"], period: int, prompts: int) -> np.ndarray:
    """Of every ordered pair of records: |mean over placements of exp(2 pi i (distractor - target) / P)|; 1 where they move in lockstep."""
    found = []
    for batch in retrieval.sweep(task, protocol, period=period, prompts=prompts, seed=0):
        at = np.array([[record[0] for record in parse(task, row)[0]] for row in batch.tokens.tolist()])
        angle = 2j * np.pi / period * (at[:, :, None] - at[:, None, :])
        pairs = ~np.eye(task.records, dtype=bool)
        found.append(np.abs(np.exp(angle).mean(axis=0))[pairs])
    return np.concatenate(found)


def test_distractors_do_not_move_in_lockstep_in_sequence() -> None:
    task = TaskConfig(filler_in_sequence=48)
    np.testing.assert_allclose(resultant_lengths(task, "outer", 24, 2), 1, atol=1e-12)
    lengths = resultant_lengths(task, "in_sequence", 24, 6)
    assert lengths.mean() < 0.6
    assert (lengths > 0.999).mean() < 0.1
    shuffled = np.random.default_rng(0).permuted(np.tile(np.arange(24), (500, 1)), axis=1)
    chance = np.abs(np.exp(2j * np.pi / 24 * (shuffled - np.arange(24))).mean(axis=1)).mean()
    assert chance < 0.25, "what independent placements would give"
    assert resultant_lengths(TaskConfig(records=8, filler_in_sequence=96), "in_sequence", 24, 6).mean() < 0.4, "more filler mixes more"


@pytest.mark.parametrize("filler", [24, 36, 48])
def test_pairs_in_lockstep_are_those_without_a_move_between_them(filler: int) -> None:
    """Of `moves` = filler - 23 moves put at random into 33 gaps, none falls between records d apart with probability (1 - d/33)^moves."""
    task = TaskConfig(filler_in_sequence=filler)
    expected = np.mean([(1 - abs(a - b) / 33) ** (filler - 23) for a in range(32) for b in range(32) if a != b])
    found = (resultant_lengths(task, "in_sequence", 24, 30) > 0.999).mean()
    assert found == pytest.approx(expected, abs=0.06)


def test_the_default_task_mixes() -> None:
    lengths = resultant_lengths(TaskConfig(), "in_sequence", 24, 20)
    assert lengths.mean() < 0.75
    assert (lengths > 0.999).mean() < 0.15


def test_lockstep_offsets_by_hand() -> None:
    task = dataclasses.replace(SMALL, records=3)
    assert retrieval.lockstep_offsets(task, 4).tolist() == [[0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 3, 3]]


@settings(deadline=None, max_examples=60)
@given(drawn=tasks(), seed=st.integers(0, 1000))
def test_mixed_offsets_hold_consecutive_integers_and_never_fall(drawn: tuple[TaskConfig, int], seed: int) -> None:
    task, period = drawn
    offsets = retrieval.mixed_offsets(task, period, np.random.default_rng(seed))
    assert offsets.shape == (period, task.records)
    assert (np.diff(offsets, axis=1) >= 0).all()
    assert offsets.min() >= 0
    assert offsets.max() <= task.filler_in_sequence
    for column in offsets.T:
        assert sorted(column - column.min()) == list(range(period))


def test_sweeps_depend_on_their_arguments_only() -> None:
    def digest(task: TaskConfig = SMALL, protocol: Literal["outer", "in_sequence"] = "in_sequence", period: int = 6, prompts: int = 3, seed: int = 0) -> str:
        state = hashlib.sha256()
        for batch in retrieval.sweep(task, protocol, period=period, prompts=prompts, seed=seed):
            state.update(batch.tokens.tobytes())
        return state.hexdigest()

    np.random.seed(1)
    before = digest()
    np.random.seed(2)
    assert digest() == before
    others = {digest(seed=1), digest(protocol="outer"), digest(period=7), digest(prompts=4), digest(task=dataclasses.replace(SMALL, queries=7)), before}
    assert len(others) == 6
    two, four = (list(retrieval.sweep(SMALL, "outer", period=6, prompts=n, seed=0)) for n in (2, 4))
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(two, four, strict=False)), "more prompts keep the first ones"
    assert not np.array_equal(four[0].tokens, four[1].tokens)


def test_lengths_by_hand() -> None:
    assert retrieval.prompt_length(SMALL, "outer") == 1 + 6 * 2 + 13 + 1 + 8 * 2
    assert retrieval.prompt_length(SMALL, "in_sequence") == 1 + 6 * 2 + 17 + 1 + 8 * 2
    assert first("outer").answer_from.tolist() == [27 + 2 * q for q in range(8)]
