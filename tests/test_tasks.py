"""Retrieval prompts, token by token: one checker of a whole sweep, tried on planted mistakes and then on what the task makes."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mitigate.config import TaskConfig
from mitigate.tasks import retrieval
from mitigate.tasks.prompts import Prompts
from mitigate.tasks.retrieval import BOS, SEP

PROTOCOLS: tuple[Literal["outer", "in_sequence"], ...] = ("outer", "in_sequence")
SMALL = TaskConfig(keys=9, names=5, filler_tokens=3, records=6, queries=5, filler=18, filler_in_sequence=24)
LONG = dataclasses.replace(SMALL, keys=4, key_tokens=3, name_tokens=2)


def parse(task: TaskConfig, row: list[int]) -> tuple[list[tuple[int, list[int], list[int]]], list[int], list[tuple[int, list[int], list[int]]]]:
    """Records (position, key, name), filler tokens in order, queries (position, key, name) of one prompt; ValueError where it is malformed."""
    keys = range(2, 2 + task.keys)
    names = range(keys.stop, keys.stop + task.names)
    filler = range(names.stop, names.stop + task.filler_tokens)
    size = task.key_tokens

    def record(at: int) -> tuple[int, list[int], list[int]]:
        key, name = row[at : at + size], row[at + size : at + task.record_length]
        if len(name) != task.name_tokens or not all(token in keys for token in key) or not all(token in names for token in name):
            raise ValueError(f"token {row[at]} at {at} starts neither filler nor a key with its name")
        return at, key, name

    if row[0] != BOS or row.count(BOS) != 1 or row.count(SEP) != 1:
        raise ValueError("one BOS in front, one SEP")
    separator = row.index(SEP)
    records, padding, at = [], [], 1
    while at < separator:
        if row[at] in filler:
            padding.append(row[at])
            at += 1
        else:
            records.append(record(at))
            at += task.record_length
    if (len(row) - separator - 1) % task.record_length:
        raise ValueError("queries are keys with their names")
    return records, padding, [record(at) for at in range(separator + 1, len(row), task.record_length)]


def prompt_faults(task: TaskConfig, protocol: str, batch: Prompts) -> list[str]:
    """What is wrong with a batch, prompt by prompt."""
    faults = []
    filler = task.filler if protocol == "outer" else task.filler_in_sequence
    if batch.tokens.dtype != np.int64 or batch.tokens.shape[1] != 2 + task.record_length * (task.records + task.queries) + filler:
        faults.append("length")
    for b, row in enumerate(batch.tokens.tolist()):
        try:
            records, padding, queries = parse(task, row)
        except ValueError as error:
            faults.append(f"prompt {b}: {error}")
            continue
        by_key = {tuple(key): (at, name) for at, key, name in records}
        if len(records) != task.records or len(by_key) != task.records:
            faults.append(f"prompt {b}: records or distinct keys")
        if len(padding) != filler or len(queries) != task.queries:
            faults.append(f"prompt {b}: filler or queries")
        if [[at + task.key_tokens - 1 + i for i in range(task.name_tokens)] for at, _, _ in queries] != batch.answer_from.tolist():
            faults.append(f"prompt {b}: answer_from")
        for q, (_, key, name) in enumerate(queries):
            if tuple(key) not in by_key or by_key[tuple(key)][1] != name or batch.gold[b, q].tolist() != name:
                faults.append(f"prompt {b}: query {q} has a wrong answer")
            elif by_key[tuple(key)][0] != batch.target[b, q]:
                faults.append(f"prompt {b}: query {q} points at {batch.target[b, q]}, its record stands at {by_key[tuple(key)][0]}")
    return faults


def placement_faults(task: TaskConfig, period: int, batch: Prompts) -> list[str]:
    """What is wrong with the P placements of one logical prompt: contents that differ, a query asked twice, or residues that a record misses."""
    faults = []
    parsed = [parse(task, row) for row in batch.tokens.tolist()]
    contents = {str(([r[1:] for r in records], padding, queries)) for records, padding, queries in parsed}
    if len(contents) != 1:
        faults.append(f"{len(contents)} different contents")
    if len({str(key) for _, key, _ in parsed[0][2]}) != task.queries:
        faults.append("a record is asked for twice")
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
    least = 3 * (period - 1)
    task = TaskConfig(
        keys=records + draw(st.integers(0, 3)),
        names=draw(st.integers(1, 5)),
        filler_tokens=draw(st.integers(1, 3)),
        key_tokens=draw(st.integers(1, 4)),
        name_tokens=draw(st.integers(1, 4)),
        records=records,
        queries=draw(st.integers(1, records)),
        filler=least + draw(st.integers(0, 9)),
        filler_in_sequence=least + 1 + draw(st.integers(0, 30)),
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
            assert [at - records[0][0] for at, _, _ in records] == [task.record_length * r for r in range(task.records)], "records stay together"


def test_a_full_size_sweep() -> None:
    task = TaskConfig()
    for protocol in PROTOCOLS:
        for batch in retrieval.sweep(task, protocol, period=24, prompts=2, seed=1):
            assert prompt_faults(task, protocol, batch) == []
            assert placement_faults(task, 24, batch) == []


def first(protocol: Literal["outer", "in_sequence"] = "outer", task: TaskConfig = SMALL) -> Prompts:
    return next(iter(retrieval.sweep(task, protocol, period=6, prompts=1, seed=3)))


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        (lambda p: dataclasses.replace(p, target=p.target + 1), "points at"),
        (lambda p: dataclasses.replace(p, answer_from=p.answer_from - 2), "answer_from"),
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
        return Prompts(tokens=batch.tokens[rows], answer_from=batch.answer_from, target=batch.target[rows])

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
    # 5 draws from 6 records: on average 6 (1 - (5/6)^5) = 3.6 distinct.
    assert np.mean(targets) == pytest.approx(6 * (1 - (5 / 6) ** 5), abs=0.15)


def test_everything_is_drawn_evenly() -> None:
    batch = retrieval.training_batch(SMALL, np.random.default_rng(0), 3000, "in_sequence")
    counts = np.bincount(batch.tokens.ravel(), minlength=retrieval.vocabulary(SMALL).size)
    assert counts[BOS] == counts[SEP] == 3000
    for span in (slice(2, 11), slice(11, 16), slice(16, 19)):
        assert counts[span].min() > 0.9 * counts[span].mean()
    assert len(counts) == 19 == retrieval.vocabulary(SMALL).size
    gaps = batch.target.min(), batch.target.max()
    assert gaps == (1, 1 + 2 * 5 + 24), "records reach both ends of the body"


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
    others = {digest(seed=1), digest(protocol="outer"), digest(period=7), digest(prompts=4), digest(task=dataclasses.replace(SMALL, queries=4)), before}
    assert len(others) == 6
    one, other = itertools.islice(retrieval.sweep(SMALL, "outer", period=6, prompts=4, seed=0), 2)
    assert not np.array_equal(one.tokens, other.tokens)


def test_lengths_by_hand() -> None:
    assert first("outer").tokens.shape == (6, 1 + 6 * 2 + 18 + 1 + 5 * 2)
    assert first("in_sequence").tokens.shape == (6, 1 + 6 * 2 + 24 + 1 + 5 * 2)
    assert first("outer").answer_from.tolist() == [[32 + 2 * q] for q in range(5)]
    assert first("outer", LONG).answer_from.tolist() == [[1 + 6 * 5 + 18 + 1 + 5 * q + 2, 1 + 6 * 5 + 18 + 1 + 5 * q + 3] for q in range(5)]


def test_keys_of_several_tokens_are_distinct_as_wholes() -> None:
    """4 kinds of tokens, 3 tokens a key: 64 keys, of which 6 prompts of 60 records each must use no key twice though tokens repeat."""
    task = dataclasses.replace(LONG, records=60, queries=4)
    batch = retrieval.training_batch(task, np.random.default_rng(0), 6, "outer")
    assert prompt_faults(task, "outer", batch) == []
