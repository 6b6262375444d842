"""Where the records of a sweep's prompts stand: every queried record once at each residue, with matched target positions.

A logical prompt is placed P times. Each of its records visits P consecutive positions u .. u + P - 1, so it stands once at each residue mod P, and the
sweep is decided by the starts u. Over a set of starts, the mean target position is the same at all residues if u falls evenly on the residues, and the
variance is the same too if the mean of the u on each residue is the same (both follow from writing a position as ``u + ((r - u) mod P)``). So:

- P prompts make a *block*: they ask for the same records (by ordinal), and their starts are P consecutive positions. This equalises the means.
- P blocks make a *super-block*, whose first starts are shifted to fall once on each residue. This equalises the variances.

Sweeps of a multiple of P * P prompts are matched exactly. Of a multiple of P they are in the mean; their blocks are shifted one after the other to
where they level the variances best. What is left is measured in every sweep (`positions`) and recorded.

Under *outer padding* the placements of a prompt shift all records together. Under *in-sequence padding* the placements change places from record to
record, so that the distractors' phases do not move with the target's; `lockstep` says how far that succeeds.

Shapes: P placements (= residues), R records, Q queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Protocol = Literal["outer", "in_sequence"]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_CHAIN = 0.3  # chance of a placement to take part in a move; 0.2 to 0.5 mix alike


def filler_needed(period: int) -> int:
    """Filler tokens that matched positions take: starts spread over 2P - 1 shifts, and P - 1 more to visit every residue."""
    return 3 * (period - 1)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One logical prompt's places.

    Attributes:
        asked: ordinals of the queried records, distinct, int64 [Q].
        before: filler tokens in front of each record at each placement, int64 [P, R], never decreasing along a row.
    """

    asked: Ints
    before: Ints


@dataclass(frozen=True, kw_only=True)
class Design:
    """The placements of a whole sweep, one `Placement` for each logical prompt; iterating holds one at a time.

    Args:
        protocol: how the placements of a prompt differ.
        period: residues P.
        prompts: logical prompts E.
        records, record_length: records of a prompt, and tokens of each.
        queries: queried records of a prompt, at most as many as are `askable`.
        filler: filler tokens of a prompt, at least `filler_needed(period)`; under in-sequence padding the surplus mixes the gaps.
        seed: of the queried ordinals and of the gaps.
        askable: the ordinals that may be asked for, as a range; default all.

    Raises:
        ValueError: an argument out of bounds.
    """

    protocol: Protocol
    period: int
    prompts: int
    records: int
    record_length: int
    queries: int
    filler: int
    seed: int
    askable: range | None = None
    _ordinals: range = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ordinals", range(self.records) if self.askable is None else self.askable)
        for name in ("period", "prompts", "records", "record_length", "queries"):
            if getattr(self, name) < 1:
                raise ValueError(f"Design.{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self._ordinals.start < self._ordinals.stop <= self.records or self._ordinals.step != 1:
            raise ValueError(f"Design.askable must be a range within records ({self.records}), got {self._ordinals}")
        if self.queries > len(self._ordinals):
            raise ValueError(f"Design.queries must be at most the askable records ({len(self._ordinals)}), got {self.queries}")
        if self.filler < filler_needed(self.period):
            raise ValueError(f"Design.filler must be at least 3 * (period - 1) = {filler_needed(self.period)}, got {self.filler}")

    def __iter__(self) -> Iterator[Placement]:
        whole = self.prompts // self.period // self.period * self.period  # blocks in complete super-blocks
        leveller = _Leveller(self.period, centre=self.record_length * self.records // 2)
        for block in range(-(-self.prompts // self.period)):
            # A complete super-block keeps its pattern, so that each of its queries alone is matched; a single query is matched by its start anyway.
            pattern = block if self.queries == 1 or block >= whole else whole + block // self.period
            asked, drift = self._asked(pattern), self._drift(pattern)
            place_Q = self.record_length * asked + drift[asked]
            members = min(self.period, self.prompts - block * self.period)
            if block < whole:
                starts = _window(self.period, int(block - place_Q[0]) % self.period)
            else:
                starts = leveller.starts(place_Q, members)
            for member, start in enumerate(starts.tolist()):
                rng = np.random.default_rng([self.seed, block, member, 2])
                yield Placement(asked=asked, before=self._lead + start + drift + self._columns(drift, rng))

    @property
    def _lead(self) -> int:
        """Filler in front of everything: half of the surplus under outer padding; under in-sequence padding the surplus is for the gaps."""
        return (self.filler - filler_needed(self.period)) // 2 if self.protocol == "outer" else 0

    def _asked(self, pattern: int) -> Ints:
        """Queried ordinals of a pattern. Consecutive patterns share out all askable ordinals before one comes up again."""
        shares = len(self._ordinals) // self.queries
        order = np.random.default_rng([self.seed, pattern // shares, 0]).permutation(len(self._ordinals)) + self._ordinals.start
        return order[pattern % shares * self.queries :][: self.queries]

    def _drift(self, pattern: int) -> Ints:
        """Moves in front of each record, [R]: by so much its P positions lie further back than shift and record length say."""
        if self.protocol == "outer":
            return np.zeros(self.records, dtype=np.int64)
        moves = self.filler - filler_needed(self.period)
        place = np.random.default_rng([self.seed, pattern, 1]).integers(self.records + 1, size=moves)  # those at R fall behind the last record
        return np.bincount(place, minlength=self.records + 1)[:-1].cumsum()

    def _columns(self, drift: Ints, rng: np.random.Generator) -> Ints:
        """0 .. P - 1 in each record's column: in order under outer padding, mixed by moves under in-sequence padding. [P, R]."""
        in_order = np.arange(self.period)
        if self.protocol == "outer":
            return np.repeat(in_order[:, None], self.records, axis=1)
        columns = np.empty((self.period, self.records), dtype=np.int64)
        by_value, moved = rng.permutation(self.period), 0  # placement that holds the i-th smallest value
        for record in range(self.records):
            for _ in range(int(drift[record]) - moved):
                by_value = _move(by_value, rng)
            moved = int(drift[record])
            columns[by_value, record] = in_order
        return columns


def _move(by_value: Ints, rng: np.random.Generator) -> Ints:
    """One move: values v .. v+P-1 become v+1 .. v+P. The smallest goes to v + P through a random chain of placements, each taking the value of the next."""
    period = len(by_value)
    chain = np.flatnonzero(np.concatenate([[True], rng.random(period - 1) < _CHAIN]))
    moved = np.append(by_value[1:], -1)
    moved[np.append(chain[1:], period) - 1] = by_value[chain]
    return moved


def _window(period: int, first: int) -> Ints:
    """P consecutive starts, as 0 .. P - 1 with P added to those below `first`."""
    start = np.arange(period)
    return np.where(start < first, start + period, start)


class _Leveller:
    """Starts for blocks of an incomplete super-block: of each pair (a, a + P) the one that keeps the variances level over all blocks so far.

    Moving a prompt back by P moves all its targets by P, at whatever residue, so the means stay level; the mean squares change in proportion to the
    target's position, a sawtooth over residues. The choice is a descent on the unevenness, one prompt at a time.
    """

    def __init__(self, period: int, *, centre: int) -> None:
        self._period, self._centre = period, centre
        self._uneven_P = np.zeros(period)  # sum of squared target positions at each residue, less the average over residues

    def starts(self, place_Q: Ints, members: int) -> Ints:
        """Starts of the block's first `members` prompts; `place_Q` is where the queried records stand with no start added."""
        period = self._period
        start_M = (2 * np.arange(members) + 1) * period // (2 * members)  # 0 .. P - 1 in a whole block, evenly spread in a smaller one
        first_MQ = start_M[:, None] + place_Q
        target_MQP = first_MQ[:, :, None] + (np.arange(period) - first_MQ[:, :, None]) % period - self._centre - period
        now_P = self._uneven_P + _level((target_MQP**2).sum((0, 1)))
        change_MP = _level((2 * period * target_MQP + period**2).sum(1)) * (start_M < period - 1)[:, None]
        back_M, now_P = _descend(now_P, change_MP)
        self._uneven_P = now_P
        return start_M + period * back_M


def _descend(now_P: Floats, change_MP: Floats) -> tuple[npt.NDArray[np.bool_], Floats]:
    """Which changes to make, one or two at a time, so that the sum of squares falls as far as it goes; and what is then left."""
    done_M, gram_MM = np.zeros(len(change_MP), dtype=bool), change_MP @ change_MP.T
    while True:
        sign_M = np.where(done_M, -1.0, 1.0)
        single_M = 2 * sign_M * (change_MP @ now_P) + gram_MM.diagonal()
        pair_MM = single_M[:, None] + single_M + 2 * sign_M[:, None] * sign_M * gram_MM
        np.fill_diagonal(pair_MM, single_M)
        i, j = divmod(int(pair_MM.argmin()), len(done_M))
        if pair_MM[i, j] > -1e-9 * (1 + now_P @ now_P):
            return done_M, now_P
        for m in {i, j}:
            now_P = now_P + sign_M[m] * change_MP[m]
            done_M[m] = ~done_M[m]


def _level(x: npt.NDArray[Any]) -> Floats:
    """Deviation from the mean over the last axis."""
    return np.asarray(x - x.mean(-1, keepdims=True), dtype=np.float64)


@dataclass(kw_only=True)
class Positions:
    """Moments of the target position at each residue, in exact integers while a sweep streams by."""

    period: int
    count_P: Ints = field(init=False)
    sum_P: Ints = field(init=False)
    square_P: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.count_P, self.sum_P, self.square_P = (np.zeros(self.period, dtype=np.int64) for _ in range(3))

    def add(self, target_PQ: Ints) -> None:
        """Count the target positions of one logical prompt."""
        flat = target_PQ.ravel()
        np.add.at(self.count_P, flat % self.period, 1)
        np.add.at(self.sum_P, flat % self.period, flat)
        np.add.at(self.square_P, flat % self.period, flat * flat)

    @property
    def mean_P(self) -> Floats:
        """Mean target position of each residue, tokens."""
        return self.sum_P / self.count_P

    @property
    def sd_P(self) -> Floats:
        """Standard deviation of the target position of each residue, tokens."""
        variance = (self.count_P * self.square_P - self.sum_P * self.sum_P) / (self.count_P * self.count_P)
        return np.asarray(np.sqrt(variance))


def lockstep(before_PR: Ints, asked_Q: Ints, period: int) -> float:
    """How far distractor phases move with the target's residue: 1 in lockstep, 0 on average for independent phases (it may be below 0).

    For a queried record and a distractor, ``|mean over placements of exp(2 pi i (phase - residue) / P)|^2`` is 1 if their distance mod P never changes and 1/P
    on average if it is random; rescaled to 0 there, and averaged over all pairs. 0 for a prompt without distractors, 1 at P = 1.
    """
    placements, records = before_PR.shape
    if records < 2:
        return 0.0
    if placements < 2:
        return 1.0
    angle = np.exp(2j * np.pi * before_PR / period)
    coherence = np.abs(angle[:, asked_Q].conj().T @ angle / placements) ** 2  # the record lengths between two records turn all placements alike
    pairs = len(asked_Q) * (records - 1)
    share = (coherence.sum() - len(asked_Q)) / pairs
    return float((placements * share - 1) / (placements - 1))
