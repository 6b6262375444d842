"""Prompts for a transition sweep: the queried record moves away from its query, token by token, at every phase.

Near the query a record is held exactly (open tail, local window); further away only in summaries. A sweep over distance shows where exact tokens stop
hiding the fault. Distance counts tokens from the record's last token to the position from which its name is predicted; the separator and the query's key
lie between, so it starts at 1 + the tokens of a key.

Shapes: E prompts, R records, P residues, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mitigate.config import TaskConfig
from mitigate.tasks import retrieval
from mitigate.tasks.placement import Ints
from mitigate.tasks.prompts import Prompts, assemble


@dataclass(frozen=True, kw_only=True)
class Cell:
    """All prompts at one distance and one residue of the target; the prompts are [E, T] with one query each."""

    distance: int
    residue: int
    prompts: Prompts


def least_distance(task: TaskConfig) -> int:
    """Smallest distance of a record: the separator and the query's key follow it directly."""
    return 1 + task.key_tokens


def cells(task: TaskConfig, *, period: int, distances: range, prompts: int, seed: int) -> Iterator[Cell]:
    """Every distance at every residue, each over the same `prompts` logical prompts (records, and which of them is asked for).

    The queried record stands so far from the end of the records that whole records make up most of the distance; filler between the records and the query
    makes up the rest. Filler in front of the records sets the residue. So prompts of different cells differ in length by less than a period and a record, until
    all records stand behind the queried one and filler has to make up all of the distance.

    Raises:
        ValueError: a distance below `least_distance`.
    """
    least = least_distance(task)
    if distances.start < least:
        raise ValueError(f"cells.distances must start at {least} or later, got {distances.start}")
    for distance in distances:
        records_behind = min((distance - least) // task.record_length, task.records - 1)
        behind = distance - least - records_behind * task.record_length
        ordinal = task.records - 1 - records_behind
        for residue in range(period):
            front = (residue - 1 - ordinal * task.record_length) % period  # BOS stands in front
            yield Cell(distance=distance, residue=residue, prompts=_cell(task, ordinal, front, behind, prompts, seed))


def _cell(task: TaskConfig, ordinal: int, front: int, behind: int, prompts: int, seed: int) -> Prompts:
    content = retrieval.single_query(task, np.random.default_rng(seed), prompts, filler=front + behind, ordinal=ordinal)
    before: Ints = np.full((prompts, task.records), front)
    return assemble(content, before)
