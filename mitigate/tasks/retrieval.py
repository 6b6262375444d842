"""Key -> name retrieval in a small vocabulary of its own.

A prompt is ``BOS, records among filler, SEP, queries``. A record is a key directly followed by its name; a query repeats a key, and the model must say its
name. Keys and names are one to four tokens long; keys of a prompt are distinct, names are drawn freely.

Training draws the queried keys with replacement: without, a model learns to eliminate names already used instead of looking up. A sweep asks for distinct
records, so that every scored answer had to be looked up in its record.

Shapes: B prompts, R records, Q queries, T tokens, P placements (= residues).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mitigate.config import TaskConfig
from mitigate.tasks.placement import Design, Ints, Protocol
from mitigate.tasks.prompts import Content, Prompts, Sweep, assemble

BOS, SEP = 0, 1


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Token ids: BOS, SEP, then key, name and filler tokens, each a contiguous range."""

    keys: int
    names: int
    filler: int

    @property
    def size(self) -> int:
        """Number of token ids."""
        return 2 + self.keys + self.names + self.filler

    @property
    def first_name(self) -> int:
        """Id of the first name token."""
        return 2 + self.keys

    @property
    def first_filler(self) -> int:
        """Id of the first filler token."""
        return self.first_name + self.names


def vocabulary(task: TaskConfig) -> Vocabulary:
    """The vocabulary of a task."""
    return Vocabulary(keys=task.keys, names=task.names, filler=task.filler_tokens)


def filler_of(task: TaskConfig, protocol: Protocol) -> int:
    """Filler tokens of a prompt under a protocol."""
    return task.filler if protocol == "outer" else task.filler_in_sequence


def _distinct(rng: np.random.Generator, count: int, kinds: int, tokens: int, wanted: int) -> Ints:
    """Distinct words of `tokens` tokens out of `kinds`: [count, wanted, tokens]."""
    if tokens == 1:
        return rng.random((count, kinds)).argsort(axis=1)[:, :wanted, None]
    numbers = np.stack([rng.choice(kinds**tokens, size=wanted, replace=False) for _ in range(count)])
    return numbers[:, :, None] // kinds ** np.arange(tokens) % kinds


def _content(task: TaskConfig, rng: np.random.Generator, count: int, filler: int, asked_BQ: Ints | None = None) -> Content:
    """Contents of `count` prompts; the queried ordinals are drawn with replacement unless given."""
    words = vocabulary(task)
    keys_BRK = 2 + _distinct(rng, count, task.keys, task.key_tokens, task.records)
    names_BRA = words.first_name + rng.integers(task.names, size=(count, task.records, task.name_tokens))
    drawn_BQ = rng.integers(task.records, size=(count, task.queries))
    asked_BQ = drawn_BQ if asked_BQ is None else asked_BQ
    records_BRL = np.concatenate([keys_BRK, names_BRA], axis=2)
    queries_BQL = records_BRL[np.arange(count)[:, None], asked_BQ]
    first = task.record_length * np.arange(task.queries) + task.key_tokens  # SEP stands in front
    return Content(
        prefix=np.array([BOS]),
        records=records_BRL,
        filler=words.first_filler + rng.integers(task.filler_tokens, size=(count, filler)),
        tail=np.concatenate([np.full((count, 1), SEP), queries_BQL.reshape(count, -1)], axis=1),
        answers=first[:, None] + np.arange(task.name_tokens),
        asked=asked_BQ,
    )


def single_query(task: TaskConfig, rng: np.random.Generator, count: int, *, filler: int, ordinal: int) -> Content:
    """Contents with one query, for the record at `ordinal`. The record asked for is the same whatever the ordinal; it changes places with the one there."""
    content = _content(replace(task, queries=1), rng, count, 0)
    rows, asked = np.arange(count), content.asked[:, 0]
    records = content.records.copy()
    records[rows, ordinal], records[rows, asked] = content.records[rows, asked], content.records[rows, ordinal]
    padding = vocabulary(task).first_filler + rng.integers(task.filler_tokens, size=(count, filler))
    return replace(content, records=records, filler=padding, asked=np.full((count, 1), ordinal))


def training_batch(task: TaskConfig, rng: np.random.Generator, count: int, protocol: Protocol) -> Prompts:
    """Random prompts: one shift for all records of a prompt (outer), or random gaps (in-sequence)."""
    filler = filler_of(task, protocol)
    content = _content(task, rng, count, filler)
    columns = 1 if protocol == "outer" else task.records
    before = np.sort(rng.integers(filler + 1, size=(count, columns)), axis=1)
    return assemble(content, np.broadcast_to(before, (count, task.records)))


def sweep(task: TaskConfig, protocol: Protocol, *, period: int, prompts: int, seed: int) -> Sweep:
    """The phase sweep of a task under a protocol: `prompts` logical prompts, each at its `period` placements."""
    filler = filler_of(task, protocol)
    design = Design(
        protocol=protocol,
        period=period,
        prompts=prompts,
        records=task.records,
        record_length=task.record_length,
        queries=task.queries,
        filler=filler,
        seed=seed,
    )
    return Sweep(design=design, draw=lambda rng, asked: _content(task, rng, 1, filler, asked[None]))
