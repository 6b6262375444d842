"""Which trials of a bracket go on from a rung: successive halving with several objectives.

KV bytes are exact before anything runs; mean accuracy and A_min come from the rung's sweep. Throughput does not depend on training and is measured once, at
the end, so it takes no part. Objectives are scaled by fixed bounds, not by what the bracket holds, so that a rank means the same in every bracket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import moocore
import numpy as np
from numpy.typing import NDArray

from mitigate.rows import Interval

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A trial at a rung. `kept` is the fraction of full attention's KV bytes; accuracies are fractions with 95 % intervals."""

    number: int
    kept: float
    mean: Interval
    a_min: Interval

    @property
    def loss(self) -> Array:
        """[3] to minimise, each in [0, 1] but for `kept`, which bypass may lift above 1."""
        return np.array([self.kept, 1 - self.mean.value, 1 - self.a_min.value])

    @property
    def hopeful(self) -> Array:
        """The same at the upper ends of the intervals."""
        return np.array([self.kept, 1 - self.mean.high, 1 - self.a_min.high])


def promoted(candidates: Sequence[Candidate], *, eta: int) -> list[int]:
    """Numbers of those that go on, rising.

    The first ``ceil(n / eta)`` by non-domination rank, then crowding distance with the extremes of each objective first; ties, which extremes are among each
    other, go to the better A_min, then the better mean, the fewer bytes, the lower number. Besides, for the noise, those that
    would be among them with their accuracies at the upper ends of their intervals and all others where they are: at most half as many again, the closest first.
    """
    if not candidates:
        return []
    candidates = sorted(candidates, key=lambda candidate: candidate.number)
    places = ceil(len(candidates) / eta)
    loss = np.array([candidate.loss for candidate in candidates])
    order = _order(loss)
    chosen = order[:places]
    spare = [index for index in order[places:] if _would_enter(loss, index, candidates[index].hopeful, places)]
    return sorted(candidates[index].number for index in [*chosen, *spare[: places // 2]])


def _would_enter(loss_NM: Array, index: int, hopeful_M: Array, places: int) -> bool:
    changed = loss_NM.copy()
    changed[index] = hopeful_M
    return index in _order(changed)[:places]


def _order(loss_NM: Array) -> list[int]:
    """Indices, best first."""
    rank = np.asarray(moocore.pareto_rank(loss_NM))
    crowding = np.empty(len(loss_NM))
    for level in np.unique(rank):
        members = np.flatnonzero(rank == level)
        crowding[members] = _crowding(loss_NM[members])
    kept, mean, a_min = loss_NM.T
    return [int(i) for i in np.lexsort((np.arange(len(rank)), kept, mean, a_min, -crowding, rank))]


def _crowding(loss_NM: Array) -> Array:
    """[N] sum over objectives of the gap between a point's two neighbours; infinite at an end. An objective in which all are equal has no ends."""
    total = np.zeros(len(loss_NM))
    for column in loss_NM.T:
        if np.ptp(column) == 0:
            continue
        order = np.argsort(column, kind="stable")
        total[order[1:-1]] += column[order[2:]] - column[order[:-2]]
        total[order[[0, -1]]] = np.inf
    return total
