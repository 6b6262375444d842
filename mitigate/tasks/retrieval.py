"""Key -> name retrieval, built from token ids.

A prompt is ``BOS, records among filler, SEP, queries``. A record is a key directly followed by its name; a query repeats a key, and the model
must say its name at the next position. Keys of a prompt are distinct, names are drawn freely, queried keys are drawn with replacement (without,
a model learns to eliminate names already used instead of looking up).

*Outer padding* shifts all records together. *In-sequence padding* changes the gaps between records. A sweep places every prompt P times so that
each of its records stands once at each residue mod P, with the prompt's length and the query's position fixed; under in-sequence padding the
gaps are redrawn from placement to placement, so that the distractors' phases do not move in lockstep with the target's.

Shapes: B prompts, R records, Q queries, T tokens, P placements (= residues).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mitigate.config import TaskConfig

BOS, SEP = 0, 1
Protocol = Literal["outer", "in_sequence"]


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Token ids: BOS, SEP, then keys, names and filler, each a contiguous range."""

    keys: int
    names: int
    filler: int

    @property
    def size(self) -> int:
        """Number of token ids."""
        return 2 + self.keys + self.names + self.filler

    @property
    def first_name(self) -> int:
        """Id of the first name."""
        return 2 + self.keys

    @property
    def first_filler(self) -> int:
        """Id of the first filler token."""
        return self.first_name + self.names


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """A batch of prompts.

    Attributes:
        tokens: int64 [B, T].
        answer_from: positions whose next token is a queried name, int64 [Q], the same in every prompt.
        target: position of the queried record's key, int64 [B, Q].
        repeat: bool [B, Q], true where an earlier query of the prompt already showed the answer.
    """

    tokens: np.ndarray
    answer_from: np.ndarray
    target: np.ndarray
    repeat: np.ndarray

    @property
    def gold(self) -> np.ndarray:
        """The queried names, int64 [B, Q]."""
        return self.tokens[:, self.answer_from + 1]


def vocabulary(task: TaskConfig) -> Vocabulary:
    """The vocabulary of a task."""
    return Vocabulary(keys=task.keys, names=task.names, filler=task.filler_tokens)


def filler_of(task: TaskConfig, protocol: Protocol) -> int:
    """Filler tokens of a prompt under a protocol."""
    return task.filler if protocol == "outer" else task.filler_in_sequence


def prompt_length(task: TaskConfig, protocol: Protocol) -> int:
    """Tokens of a prompt under a protocol."""
    return 2 + 2 * task.records + filler_of(task, protocol) + 2 * task.queries


def _content(task: TaskConfig, rng: np.random.Generator, count: int, filler: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Keys [B, R], names [B, R], queried records [B, Q] and filler tokens [B, filler] of `count` prompts."""
    words = vocabulary(task)
    keys = 2 + rng.random((count, task.keys)).argsort(axis=1)[:, : task.records]
    names = words.first_name + rng.integers(task.names, size=(count, task.records))
    queried = rng.integers(task.records, size=(count, task.queries))
    return keys, names, queried, words.first_filler + rng.integers(task.filler_tokens, size=(count, filler))


def _assemble(keys: np.ndarray, names: np.ndarray, queried: np.ndarray, filler: np.ndarray, before: np.ndarray) -> Prompts:
    """Lay prompts out; `before` [B, R] is the number of filler tokens in front of each record, never decreasing along a prompt."""
    count, records = keys.shape
    body = 2 * records + filler.shape[1]
    key_at = 2 * np.arange(records) + before
    tokens = np.empty((count, body), dtype=np.int64)
    free = np.ones((count, body), dtype=bool)
    rows = np.arange(count)[:, None]
    tokens[rows, key_at], tokens[rows, key_at + 1] = keys, names
    free[rows, key_at] = free[rows, key_at + 1] = False
    tokens[free] = filler.ravel()
    pairs = np.stack([keys[rows, queried], names[rows, queried]], axis=2).reshape(count, -1)
    edge = np.full((count, 1), BOS), np.full((count, 1), SEP)
    earlier = (queried[:, :, None] == queried[:, None, :]) & np.tri(queried.shape[1], k=-1, dtype=bool)
    return Prompts(
        tokens=np.concatenate([edge[0], tokens, edge[1], pairs], axis=1),
        answer_from=2 + body + 2 * np.arange(queried.shape[1]),
        target=1 + key_at[rows, queried],
        repeat=earlier.any(axis=2),
    )


def training_batch(task: TaskConfig, rng: np.random.Generator, count: int, protocol: Protocol) -> Prompts:
    """Random prompts: one shift for all records of a prompt (outer), or random gaps (in-sequence)."""
    filler = filler_of(task, protocol)
    keys, names, queried, padding = _content(task, rng, count, filler)
    columns = 1 if protocol == "outer" else task.records
    before = np.sort(rng.integers(filler + 1, size=(count, columns)), axis=1)
    return _assemble(keys, names, queried, padding, np.broadcast_to(before, (count, task.records)))


def lockstep_offsets(task: TaskConfig, period: int) -> np.ndarray:
    """Filler in front of each record at each placement under outer padding: [P, R], equal along a row."""
    return np.repeat(np.arange(period)[:, None], task.records, axis=1)


def mixed_offsets(task: TaskConfig, period: int, rng: np.random.Generator) -> np.ndarray:
    """Filler in front of each record at each placement under in-sequence padding: [P, R].

    Down a column the P values are P consecutive integers, so each record visits each residue once. From one record to the next the placements
    move on by random amounts: a *move* takes the smallest value v of the column to v + P through a random chain of placements, each taking the
    value of the next one in the chain. There are `filler_in_sequence - (period - 1)` moves, put at random among the records.
    """
    moves = task.filler_in_sequence - (period - 1)
    place = rng.integers(task.records + 1, size=moves)  # moves in front of record r; those at R fall behind the last one
    by_value = rng.permutation(period)  # placement that holds the i-th smallest value
    offsets = np.empty((period, task.records), dtype=np.int64)
    smallest = 0
    for record in range(task.records):
        for _ in range(int((place == record).sum())):
            by_value = _move(by_value, rng)
            smallest += 1
        offsets[by_value, record] = smallest + np.arange(period)
    return offsets


def _move(by_value: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One move of `mixed_offsets`: values v .. v+P-1 become v+1 .. v+P."""
    period = len(by_value)
    chain = np.flatnonzero(np.concatenate([[True], rng.random(period - 1) < 0.3]))
    moved = np.append(by_value[1:], -1)
    moved[np.append(chain[1:], period) - 1] = by_value[chain]
    return moved


def sweep(task: TaskConfig, protocol: Protocol, *, period: int, prompts: int, seed: int) -> Iterator[Prompts]:
    """`prompts` logical prompts, each as one batch of its P placements (row order is arbitrary, see `Prompts.target`).

    Keys, names, queries and the order of filler tokens are the same at every placement, and do not depend on anything but the arguments.
    """
    filler = filler_of(task, protocol)
    for index in range(prompts):
        rng = np.random.default_rng([seed, index, int(protocol == "in_sequence")])
        content = _content(task, rng, 1, filler)
        before = lockstep_offsets(task, period) if protocol == "outer" else mixed_offsets(task, period, rng)
        keys, names, queried, padding = (np.repeat(part, period, axis=0) for part in content)
        yield _assemble(keys, names, queried, padding, before)
