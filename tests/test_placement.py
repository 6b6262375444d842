"""Where records stand in a sweep: matched target positions, tried on planted mistakes, then over periods, protocols and record lengths."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mitigate.config import TaskConfig
from mitigate.tasks import retrieval
from mitigate.tasks.placement import Design, Placement, Positions, filler_needed, lockstep
from mitigate.tasks.prompts import Prompts

PROTOCOLS: tuple[Literal["outer", "in_sequence"], ...] = ("outer", "in_sequence")
ProtocolName = Literal["outer", "in_sequence"]


def matching_faults(period: int, batches: Iterable[Prompts], *, exact_variance: bool, variance_within: float = 0.01) -> list[str]:
    """What keeps a sweep from being matched: counts, prompt length, query position, logical examples, mean and variance of the target position by residue.

    Reads token positions from the prompts themselves (each key occurs once before the queries), not from what the generator says about them.
    """
    faults: set[str] = set()
    lengths, positions, answers, per_example = set(), Positions(period=period), set(), []
    for batch in batches:
        lengths.add(batch.tokens.shape[1])
        answers.add(tuple(batch.answer_from.ravel().tolist()))
        position_PQ = _found_targets(batch)
        if not np.array_equal(position_PQ, batch.target):
            faults.add("targets are not where the prompts say")
        per_example.append(np.sort(position_PQ % period, axis=0))
        positions.add(position_PQ)
    if len(lengths) != 1 or len(answers) != 1:
        faults.add("prompt lengths or query positions differ")
    if any(not np.array_equal(found, np.repeat(np.arange(period)[:, None], found.shape[1], axis=1)) for found in per_example):
        faults.add("some example does not stand once at each residue")
    if len(set(positions.count_P.tolist())) != 1 or positions.count_P[0] == 0:
        faults.add("counts differ")
        return sorted(faults)
    means, variances = positions.mean_P, positions.sd_P**2
    if np.ptp(means) > 1e-9 * means.mean():
        faults.add(f"means differ by {np.ptp(means):.3g}")
    if np.ptp(variances) > (1e-9 if exact_variance else variance_within) * variances.mean():
        faults.add(f"variances differ by {np.ptp(variances) / variances.mean():.2%}")
    return sorted(faults)


def _found_targets(batch: Prompts) -> np.ndarray:
    """Positions of the queried keys' first tokens, found in the tokens: the place before the queries whose following tokens are the query's record. [P, Q]."""
    first_answer, answer_tokens = int(batch.answer_from.min()), batch.answer_from.shape[1]
    length = abs(int(batch.answer_from[1, 0] - batch.answer_from[0, 0])) if len(batch.answer_from) > 1 else None
    found = np.empty(batch.target.shape, dtype=np.int64)
    for row, tokens in enumerate(batch.tokens):
        for query, answer in enumerate(batch.answer_from[:, 0]):
            size = length if length is not None else batch.tokens.shape[1] - list(tokens).index(retrieval.SEP) - 1
            record = tokens[answer + 1 + answer_tokens - size : answer + 1 + answer_tokens]
            windows = np.lib.stride_tricks.sliding_window_view(tokens[: first_answer - (size - answer_tokens) + 1], size)
            places = np.flatnonzero((windows == record).all(axis=1))
            assert len(places) == 1, "each record stands once before the queries"
            found[row, query] = places[0]
    return found


def task_for(period: int, key_tokens: int, name_tokens: int, records: int, queries: int, extra: int) -> TaskConfig:
    return TaskConfig(
        keys=max(records, 5),
        names=6,
        filler_tokens=3,
        key_tokens=key_tokens,
        name_tokens=name_tokens,
        records=records,
        queries=queries,
        filler=filler_needed(period) + extra,
        filler_in_sequence=filler_needed(period) + 1 + extra,
    )


@settings(deadline=None, max_examples=40)
@given(
    period=st.integers(2, 24),
    protocol=st.sampled_from(PROTOCOLS),
    key_tokens=st.integers(1, 4),
    name_tokens=st.integers(1, 4),
    records=st.integers(1, 9),
    queries=st.integers(1, 4),
    extra=st.integers(0, 20),
    seed=st.integers(0, 99),
)
@example(period=24, protocol="in_sequence", key_tokens=1, name_tokens=1, records=9, queries=4, extra=20, seed=1)
@example(period=24, protocol="outer", key_tokens=4, name_tokens=4, records=9, queries=1, extra=0, seed=0)
@example(period=2, protocol="in_sequence", key_tokens=1, name_tokens=1, records=1, queries=1, extra=0, seed=0)
def test_sweeps_of_a_multiple_of_the_period_squared_match_exactly(
    period: int, protocol: ProtocolName, key_tokens: int, name_tokens: int, records: int, queries: int, extra: int, seed: int
) -> None:
    queries = min(queries, records)
    design = design_of(task_for(period, key_tokens, name_tokens, records, queries, extra), protocol, period, period * period * (1 + seed % 2), seed)
    assert position_faults(design, exact_variance=True) == []


def design_of(task: TaskConfig, protocol: ProtocolName, period: int, prompts: int, seed: int) -> Design:
    return retrieval.sweep(task, protocol, period=period, prompts=prompts, seed=seed).design


def position_faults(design: Design, *, exact_variance: bool, variance_within: float = 0.01) -> list[str]:
    """`matching_faults` from placements alone, for sweeps too large to lay out."""
    positions, faults = Positions(period=design.period), set()
    for placement in design:
        target = 1 + design.record_length * placement.asked + placement.before[:, placement.asked]
        if not (np.sort(target % design.period, axis=0) == np.arange(design.period)[:, None]).all():
            faults.add("some example does not stand once at each residue")
        if (np.diff(placement.before, axis=1) < 0).any() or placement.before.min() < 0 or placement.before.max() > design.filler:
            faults.add("impossible filler counts")
        if len(set(placement.asked.tolist())) != design.queries:
            faults.add("a record is asked for twice")
        positions.add(target)
    if set(positions.count_P.tolist()) != {design.prompts * design.queries}:
        faults.add("counts differ")
        return sorted(faults)
    if np.ptp(positions.mean_P) > 1e-9 * positions.mean_P.mean():
        faults.add(f"means differ by {np.ptp(positions.mean_P):.3g}")
    variance = positions.sd_P**2
    if np.ptp(variance) > (1e-9 if exact_variance else variance_within) * variance.mean():
        faults.add(f"variances differ by {np.ptp(variance) / variance.mean():.2%}")
    return sorted(faults)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("period", "prompts"), [(24, 96), (24, 192), (24, 1000 // 24 * 24), (8, 96), (12, 96), (6, 96), (16, 192)])
def test_the_reference_task_is_matched_in_the_mean_and_within_one_per_cent_in_the_variance(protocol: ProtocolName, period: int, prompts: int) -> None:
    design = design_of(TaskConfig(), protocol, period, prompts, seed=1)
    assert position_faults(design, exact_variance=False) == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("period", [2, 3, 7, 24, 31, 48, 64])
def test_any_period_up_to_64(protocol: ProtocolName, period: int) -> None:
    """Thousands of prompts where P * P asks for them: whole super-blocks are exact whatever P is."""
    design = Design(protocol=protocol, period=period, prompts=period * period, records=6, record_length=3, queries=2, filler=filler_needed(period) + 9, seed=2)
    assert position_faults(design, exact_variance=True) == []


@settings(deadline=None, max_examples=30)
@given(period=st.integers(2, 24), blocks=st.integers(1, 30), records=st.integers(1, 40), length=st.integers(2, 8), protocol=st.sampled_from(PROTOCOLS))
def test_fewer_prompts_stay_near_what_integers_allow(period: int, blocks: int, records: int, length: int, protocol: ProtocolName) -> None:
    """Whole blocks match the means exactly. A mean square of E targets moves in steps of 2 P^2 / E (see Positions); within three steps or 1 %."""
    prompts = period * blocks
    design = Design(
        protocol=protocol, period=period, prompts=prompts, records=records, record_length=length, queries=1, filler=filler_needed(period) + 9, seed=3
    )
    positions = Positions(period=period)
    for placement in design:
        positions.add(1 + length * placement.asked + placement.before[:, placement.asked])
    assert np.ptp(positions.mean_P) < 1e-9 * positions.mean_P.mean()
    variance = positions.sd_P**2
    assert np.ptp(variance) <= max(0.01 * variance.mean(), 3 * 2 * period**2 / prompts)


def test_a_number_that_is_no_multiple_of_the_period_is_nearly_matched() -> None:
    positions = Positions(period=24)
    for placement in design_of(TaskConfig(), "outer", 24, 1000, seed=0):
        positions.add(1 + 2 * placement.asked + placement.before[:, placement.asked])
    assert set(positions.count_P.tolist()) == {16000}
    assert 0 < np.ptp(positions.mean_P) < 0.001 * positions.mean_P.mean()
    assert np.ptp(positions.sd_P**2) < 0.01 * (positions.sd_P**2).mean()


# -- planted mistakes -------------------------------------------------------------------------------------------------------------------------------


def small_sweep(protocol: ProtocolName = "outer") -> list[Prompts]:
    task = TaskConfig(keys=7, names=5, filler_tokens=3, key_tokens=2, records=5, queries=3, filler=12, filler_in_sequence=20)
    return list(retrieval.sweep(task, protocol, period=4, prompts=16, seed=3))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("key_tokens", "name_tokens"), [(1, 1), (2, 1), (1, 3), (4, 4)])
def test_prompts_as_laid_out_are_matched(protocol: ProtocolName, key_tokens: int, name_tokens: int) -> None:
    task = dataclasses.replace(task_for(5, key_tokens, name_tokens, 6, 3, 9), queries=3)
    assert matching_faults(5, retrieval.sweep(task, protocol, period=5, prompts=25, seed=1), exact_variance=True) == []


def _shift(batch: Prompts, rows: Any) -> Prompts:
    """The records of some placements one token further: the last filler token of the body comes to its front."""
    tokens = batch.tokens.copy()
    body = slice(1, int(batch.answer_from[0, 0]) - 2)
    tokens[rows, body] = np.roll(tokens[rows, body], 1, axis=1)
    target = batch.target.copy()
    target[rows] += 1
    return dataclasses.replace(batch, tokens=tokens, target=target)


def _only(batch: Prompts, rows: list[int]) -> Prompts:
    return dataclasses.replace(batch, tokens=batch.tokens[rows], target=batch.target[rows])


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        (lambda b: _shift(b, [0]), "once at each residue"),
        (lambda b: dataclasses.replace(b, target=b.target + 1), "not where the prompts say"),
        (lambda b: _only(b, [0, 0, 2, 2]), "once at each residue"),
        (lambda b: _only(b, [0, 1, 2]), "once at each residue"),
        (lambda b: dataclasses.replace(b, answer_from=b.answer_from[::-1]), "not where the prompts say"),
    ],
    ids=["one placement shifted by one", "targets shifted by one", "records at even positions only", "a placement left out", "queries in another order"],
)
def test_the_matching_check_sees_a_planted_mistake(plant: Callable[[Prompts], Prompts], complaint: str) -> None:
    sweep = small_sweep()
    assert matching_faults(4, sweep, exact_variance=True) == []
    faults = matching_faults(4, [plant(batch) for batch in sweep], exact_variance=True)
    assert any(complaint in fault for fault in faults), faults


class _AllFromZero(Design):
    """The tempting design: every prompt at shifts 0 .. P - 1."""

    def __iter__(self) -> Any:
        for placement in super().__iter__():
            yield Placement(asked=placement.asked, before=np.repeat(np.arange(self.period)[:, None], self.records, axis=1))


class _EvenOnly(Design):
    """Records at even positions only: every shift doubled, so odd residues are never visited."""

    def __iter__(self) -> Any:
        for placement in super().__iter__():
            yield Placement(asked=placement.asked, before=placement.before // 2 * 2)


class _OffByOne(Design):
    """The placements of every fourth prompt one token further back."""

    def __iter__(self) -> Any:
        for number, placement in enumerate(super().__iter__()):
            yield Placement(asked=placement.asked, before=placement.before + (number % 4 == 0))


@pytest.mark.parametrize(("kind", "complaint"), [(_AllFromZero, "means differ"), (_EvenOnly, "once at each residue"), (_OffByOne, "means differ")])
def test_the_moment_check_sees_a_planted_design(kind: type[Design], complaint: str) -> None:
    arguments: dict[str, Any] = {"protocol": "outer", "period": 24, "records": 8, "record_length": 2, "queries": 3, "filler": 80, "seed": 0}
    assert position_faults(Design(prompts=576, **arguments), exact_variance=True) == []
    faults = position_faults(kind(prompts=576, **arguments), exact_variance=True)
    assert any(complaint in fault for fault in faults), faults


# -- distractors ------------------------------------------------------------------------------------------------------------------------------------


def mean_lockstep(task: TaskConfig, protocol: ProtocolName, period: int, prompts: int = 24) -> float:
    return float(np.mean([lockstep(p.before, p.asked, period) for p in design_of(task, protocol, period, prompts, seed=0)]))


def test_lockstep_by_hand() -> None:
    asked = np.array([0])
    together = np.repeat(np.arange(4)[:, None], 3, axis=1)
    assert lockstep(together, asked, 4) == pytest.approx(1)
    opposite = np.array([[0, 0], [1, 3], [2, 2], [3, 1]])  # phase -r against r: the difference visits 0, 2, 0, 2, whose mean angle is 0
    assert lockstep(opposite, asked, 4) == pytest.approx((4 * 0 - 1) / 3)
    assert lockstep(np.arange(4)[:, None], asked, 4) == 0, "no distractor"
    rng = np.random.default_rng(0)
    independent = [lockstep(np.stack([np.arange(24), rng.permutation(24)], axis=1), asked, 24) for _ in range(4000)]
    assert np.mean(independent) == pytest.approx(0, abs=0.005)


def test_lockstep_is_the_correlation_of_distractor_phase_with_target_residue_read_from_tokens() -> None:
    """The same number from token positions of whole prompts: record lengths and ordinals between two records do not matter to it."""
    task = TaskConfig(keys=9, records=6, queries=2, filler=21, filler_in_sequence=40)
    sweep = retrieval.sweep(task, "in_sequence", period=8, prompts=3, seed=4)
    for batch, placement in sweep.placed():
        keys = (batch.tokens[0] >= 2) & (batch.tokens[0] < 2 + task.keys)
        names_of_rows = [[int(np.flatnonzero(row == key)[0]) for key in batch.tokens[0, keys][: task.records]] for row in batch.tokens]
        at_PR = np.array(names_of_rows)
        found = []
        for query in range(2):
            for record in range(task.records):
                difference = at_PR[:, record] - batch.target[:, query]
                if (difference == 0).all():
                    continue
                found.append((8 * np.abs(np.exp(2j * np.pi * difference / 8).mean()) ** 2 - 1) / 7)
        assert len(found) == 2 * 5
        assert lockstep(placement.before, placement.asked, 8) == pytest.approx(np.mean(found))


def test_distractors_do_not_move_with_the_target_in_sequence() -> None:
    default, quickstart = TaskConfig(), TaskConfig(filler=24, filler_in_sequence=36)
    assert mean_lockstep(default, "outer", 24) == pytest.approx(1)
    assert mean_lockstep(default, "in_sequence", 24) < 0.35
    assert mean_lockstep(quickstart, "in_sequence", 8) < 0.25
    more = TaskConfig(filler_in_sequence=200)
    assert mean_lockstep(more, "in_sequence", 24) < 0.15, "more filler mixes more"


# -- the rest ---------------------------------------------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_prompts_stream() -> None:
    """4,167 logical prompts at 24 placements: what is alive at any time is one of them, whatever the length of the sweep."""
    task = TaskConfig(records=8, queries=4)
    sweep = retrieval.sweep(task, "outer", period=24, prompts=4167, seed=0)
    tracemalloc.start()
    rows = sum(len(batch.tokens) for batch in sweep)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows == 100_008
    assert peak < 4e6, f"{peak} bytes; all tokens would be {rows * (2 + 16 + 72 + 8) * 8}"


def test_consecutive_prompts_share_out_the_records() -> None:
    design = Design(protocol="outer", period=4, prompts=3 * 4, records=12, record_length=2, queries=4, filler=9, seed=5)
    asked = [tuple(p.asked.tolist()) for p in itertools.islice(design, 0, None, 4)]
    assert sorted(itertools.chain(*asked)) == list(range(12)), "three blocks of four queries ask for each of twelve records once"
    middle = dataclasses.replace(design, askable=range(5, 9), queries=2)
    assert {ordinal for p in middle for ordinal in p.asked.tolist()} == {5, 6, 7, 8}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"period": 0}, "Design.period must be at least 1, got 0"),
        ({"prompts": 0}, "Design.prompts must be at least 1, got 0"),
        ({"filler": 8}, "Design.filler must be at least 3 * (period - 1) = 9, got 8"),
        ({"queries": 13}, "Design.queries must be at most the askable records (12), got 13"),
        ({"askable": range(5, 9)}, None),
        ({"askable": range(5, 13)}, "Design.askable must be a range within records (12), got range(5, 13)"),
        ({"askable": range(5, 5)}, "Design.askable must be a range within records (12), got range(5, 5)"),
    ],
)
def test_bad_designs_are_refused(change: dict[str, Any], words: str | None) -> None:
    arguments: dict[str, Any] = {"protocol": "outer", "period": 4, "prompts": 3, "records": 12, "record_length": 2, "queries": 4, "filler": 9, "seed": 5}
    if words is None:
        Design(**arguments | change)
        return
    with pytest.raises(ValueError) as error:
        Design(**arguments | change)
    assert str(error.value) == words
