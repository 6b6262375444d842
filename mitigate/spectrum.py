"""Period of a phase curve: autocorrelation, least-squares periodogram, folding, and a permutation test that allows for the search.

Shape suffixes: n positions, K curves over the same positions (replicates of one setup, for example the two padding protocols), D candidate periods,
B permutations. Positions are integers (tokens or residues), evenly spaced or with gaps.

Folding a curve mod d replaces each value by the mean of its class t mod d. A fold mod 8 explains whatever a fold mod 4 explains, so harmonics (divisors
and multiples of the true period) look periodic too. `find_period` therefore adds folds one at a time, then takes each one back to its divisors unless
what only the full period can express is there. Where it cannot tell, it says so and returns no period.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_EXACT = 40320  # permutations enumerated in full: all orders of up to 8 positions
_DOUBT = 5  # p-values between alpha and this many times alpha leave a question open
_LIMIT = 128  # largest candidate period tried by default
_NOTHING = 1e-20  # share of the variance below which a residual is rounding error

Status = Literal["detected", "none", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Component:
    """One period that carries power of its own, beyond that of its divisors.

    Attributes:
        period: in positions.
        strength: fraction of the variance explained by folding mod `period` alone, adjusted for the number of classes; below 0 means worse than chance.
        p_value: of what only this period expresses: against its largest proper divisors and the other components, by permuting residuals.
    """

    period: int
    strength: float
    p_value: float


@dataclass(frozen=True, kw_only=True)
class PeriodResult:
    """Outcome of `find_period`.

    Attributes:
        period: smallest period of the curve, the lcm of the components; None where nothing was found or the evidence is ambiguous.
        status: "detected", "none" (no candidate comes near significance) or "undecided" (the best p-value is above alpha but below 5 alpha, so few positions
            that no p-value below alpha is possible, or something is periodic, but not clearly with which period).
        strength: adjusted fraction of variance explained by all components together, averaged over curves; 0 where none was detected.
        p_value: permutation p-value of the best candidate, corrected for having searched all of them.
        smallest_p: least p-value the permutations could give; a value above `alpha` means that no detection was possible.
        components: periods with power of their own, none a divisor of another; several where strides are mixed. Empty unless detected.
        candidates: the periods searched.
        strengths: adjusted fraction of variance of each candidate's fold, in the order of `candidates`.
        reason: one sentence.
    """

    period: int | None
    status: Status
    strength: float
    p_value: float
    smallest_p: float
    components: tuple[Component, ...]
    candidates: tuple[int, ...]
    strengths: tuple[float, ...]
    reason: str


def autocorrelation(t: npt.ArrayLike, y: npt.ArrayLike, lags: Sequence[int], *, cycle: int | None = None) -> Floats:
    """Autocorrelation at integer lags, from the pairs of positions that are really there.

    Args:
        t: [n] distinct integer positions, any order.
        y: [n] values, or [K, n] curves, whose autocorrelations are averaged.
        lags: in positions, at least 0.
        cycle: positions are residues mod `cycle`, so that lags wrap around.

    Returns:
        One value per lag, in [-1, 1] for even spacing over whole cycles; NaN where no pair has that lag or no curve varies.

    Raises:
        ValueError: bad shapes or values, or repeated positions.
    """
    t_n, y_Kn = _curves("autocorrelation", t, y)
    if cycle is not None:
        if cycle < 1:
            raise ValueError(f"autocorrelation: cycle must be at least 1, got {cycle}")
        t_n = t_n % cycle
    if len(np.unique(t_n)) < len(t_n):
        raise ValueError("autocorrelation: positions must be distinct")
    deviation_Kn = _standard(y_Kn)
    if not len(deviation_Kn):
        return np.full(len(lags), np.nan)
    place = {int(position): index for index, position in enumerate(t_n)}
    out = np.full(len(lags), np.nan)
    for at, lag in enumerate(lags):
        if lag < 0:
            raise ValueError(f"autocorrelation: lags must be at least 0, got {lag}")
        later = [place.get(int(position) + lag if cycle is None else (int(position) + lag) % cycle, -1) for position in t_n]
        here, there = np.flatnonzero(np.array(later) >= 0), np.array([index for index in later if index >= 0], int)
        if len(here):
            out[at] = float((deviation_Kn[:, here] * deviation_Kn[:, there]).mean() * len(t_n))
    return out


def periodogram(t: npt.ArrayLike, y: npt.ArrayLike, periods: npt.ArrayLike) -> Floats:
    """Fraction of the variance that one sinusoid of each period explains, by least squares with a free mean (generalised Lomb-Scargle).

    For evenly spaced positions over whole cycles this is the discrete Fourier power over the total (the positive and negative frequency together).

    Args:
        t: [n] positions, even or with gaps. y: [n] or [K, n]; curves are averaged. periods: [D], at least 2 positions each, fractions allowed.

    Returns:
        [D] fractions in [0, 1]; 0 where no curve varies.

    Raises:
        ValueError: bad shapes or values, or a period below 2.
    """
    t_n, y_Kn = _curves("periodogram", t, y)
    periods_D = np.atleast_1d(np.asarray(periods, float))
    if not (np.isfinite(periods_D).all() and (periods_D >= 2).all()):
        raise ValueError("periodogram: periods must be at least 2 positions (one cycle in two samples)")
    deviation_Kn = _standard(y_Kn)
    if not len(deviation_Kn):
        return np.zeros(len(periods_D))
    out = []
    for period in periods_D:
        angle_n = 2 * np.pi * (t_n % period) / period
        out.append(_explained(_basis(np.stack([np.ones(len(t_n)), np.cos(angle_n), np.sin(angle_n)], 1)), deviation_Kn[None])[0])
    return np.array(out)


def find_period(
    t: npt.ArrayLike,
    y: npt.ArrayLike,
    *,
    cycle: int | None = None,
    candidates: Sequence[int] | None = None,
    alpha: float = 0.01,
    permutations: int = 5000,
    seed: int = 0,
) -> PeriodResult:
    """Find the smallest period of a curve, or the periods of mixed strides, or nothing.

    1. Search: every candidate's fold is compared, by its F ratio, with folds of the same values in permuted order (all orders of up to 8 positions, else a
       seeded sample). The best per-candidate p-value is compared with the best of each permutation, which corrects for the search. Of all candidates the
       one with the largest F is taken. The search repeats on the residuals until nothing more is significant.
    2. Reduction: a period stays if what it explains beyond its largest proper divisors (24 beyond 12 and 8) is significant at `alpha`. If it is not, the
       divisors take its place; if it is nearly so (p below 5 `alpha`), the result is "undecided".

    Args:
        t: [n] integer positions. y: [n] values or [K, n] curves over the same positions, which share a period but not a shape; each counts equally, and all
            are permuted together, so that noise or bumps they share do not pass for a repetition.
        cycle: positions are residues mod `cycle`: only its proper divisors can be periods.
        candidates: periods to search; default the proper divisors of `cycle`, else 2 … half the span of t (two repeats at least, 128 at most). Those that
            leave fewer than 2 degrees of freedom, or that have a class without positions, are passed over.
        alpha: level of every decision.
        permutations, seed: of the test.

    Raises:
        ValueError: bad shapes or values, a candidate below 2 or not a divisor of `cycle`, alpha or permutations out of bounds.
    """
    t_n, y_Kn = _curves("find_period", t, y)
    if not 0 < alpha < 0.2:
        raise ValueError(f"find_period: alpha must be between 0 and 0.2, got {alpha}")
    if permutations < 1:
        raise ValueError(f"find_period: permutations must be at least 1, got {permutations}")
    searched = _candidates(t_n, cycle, candidates)
    deviation_Kn = _standard(y_Kn)
    if not searched or not len(deviation_Kn):
        reason = f"{len(t_n)} positions do not hold two repeats of any candidate" if not searched else "the curve does not vary"
        return _nothing("none", 1.0, 1.0, searched, tuple(0.0 for _ in searched), reason)
    order_Bn = _orders(len(t_n), permutations, seed)
    folds = {d: _fold(t_n, d) for d in {divisor for d in searched for divisor in _divisors(d)}}
    strengths = tuple(_adjusted(_basis(folds[d]), deviation_Kn) for d in searched)
    smallest = 1 / len(order_Bn)

    # 1. search
    chosen: list[int] = []
    first_p = 1.0
    while len(chosen) < 4:
        found, p = _best(searched, chosen, folds, deviation_Kn, order_Bn)
        if not chosen:
            first_p = p
        elif found is not None and alpha / _DOUBT <= p < _DOUBT * alpha:
            reason = f"periodic (p = {first_p:.4g}), but whether more than {' and '.join(map(str, chosen))} is there is open (p = {p:.3g})"
            return _nothing("undecided", first_p, smallest, searched, strengths, reason)
        if found is None or p >= alpha:
            break
        chosen.append(found)
    smallest = _smallest_p(t_n, searched, smallest)
    if not chosen:
        reason = f"no period at p < {alpha:g} (best p = {first_p:.4g})"
        if smallest >= alpha:
            reason = f"{len(t_n)} positions cannot give p < {alpha:g} (least possible {smallest:.3g})"
        open_ = smallest >= alpha or first_p < _DOUBT * alpha
        return _nothing("undecided" if open_ else "none", first_p, smallest, searched, strengths, reason)

    # 2. reduction
    settled: dict[int, float] = {}
    waiting = sorted(_maximal(chosen), reverse=True)
    while waiting:
        period = waiting.pop(0)
        others = [d for d in {*waiting, *settled} if d % period]
        p = _own(period, others, folds, deviation_Kn, order_Bn)
        if p < alpha:
            settled[period] = p
        elif p < _DOUBT * alpha:
            reason = f"periodic (p = {first_p:.4g}), but period {period} against its divisors is open (p = {p:.3g})"
            return _nothing("undecided", first_p, smallest, searched, strengths, reason)
        else:
            waiting = sorted(set(_maximal([*waiting, *_largest_divisors(period)])) - set(settled), reverse=True)
    kept = sorted(_maximal(settled))
    if not kept:
        reason = f"periodic (p = {first_p:.4g}), but no single period is significant by itself"
        return _nothing("undecided", first_p, smallest, searched, strengths, reason)
    period = math.lcm(*kept)
    components = tuple(Component(period=d, strength=_adjusted(_basis(folds[d]), deviation_Kn), p_value=settled[d]) for d in kept)
    strength = _adjusted(_basis(np.concatenate([folds[d] for d in kept], 1)), deviation_Kn)
    reason = f"period {period}" + (f" from {' and '.join(map(str, kept))}" if len(kept) > 1 else "") + f" at p = {first_p:.4g}"
    return PeriodResult(
        period=period,
        status="detected",
        strength=strength,
        p_value=first_p,
        smallest_p=smallest,
        components=components,
        candidates=searched,
        strengths=strengths,
        reason=reason,
    )


def _nothing(status: Status, p_value: float, smallest: float, searched: tuple[int, ...], strengths: tuple[float, ...], reason: str) -> PeriodResult:
    return PeriodResult(
        period=None,
        status=status,
        strength=0.0,
        p_value=p_value,
        smallest_p=smallest,
        components=(),
        candidates=searched,
        strengths=strengths,
        reason=reason,
    )


def _curves(caller: str, t: npt.ArrayLike, y: npt.ArrayLike) -> tuple[Ints, Floats]:
    t_n, y_Kn = np.asarray(t), np.atleast_2d(np.asarray(y, float))
    if t_n.ndim != 1 or y_Kn.ndim != 2 or y_Kn.shape[1] != len(t_n) or not len(t_n):
        raise ValueError(f"{caller}: t must have shape [n] and y [n] or [K, n], got {list(t_n.shape)} and {list(np.shape(y))}")
    if not np.isfinite(y_Kn).all():
        raise ValueError(f"{caller}: y must be finite; leave positions without a value out of t and y")
    if not (t_n == np.round(t_n)).all():
        raise ValueError(f"{caller}: positions must be integers")
    return t_n.astype(np.int64), y_Kn


def _standard(y_Kn: Floats) -> Floats:
    """Curves with mean 0 and sum of squares 1; constant ones are left out."""
    deviation_Kn = y_Kn - y_Kn.mean(1, keepdims=True)
    total_K = (deviation_Kn**2).sum(1)
    varies_K = total_K > _NOTHING * np.maximum((y_Kn**2).sum(1), 1e-300)
    return np.asarray(deviation_Kn[varies_K] / np.sqrt(total_K[varies_K])[:, None])


def _candidates(t_n: Ints, cycle: int | None, candidates: Sequence[int] | None) -> tuple[int, ...]:
    if cycle is not None and cycle < 1:
        raise ValueError(f"find_period: cycle must be at least 1, got {cycle}")
    if candidates is None:
        half = (int(np.ptp(t_n)) + 1) // 2
        candidates = [d for d in _divisors(cycle) if d < cycle] if cycle is not None else range(2, min(half, _LIMIT) + 1)
    for d in candidates:
        if d < 2 or (cycle is not None and cycle % d):
            raise ValueError(f"find_period: candidates must be at least 2{'' if cycle is None else f' and divide cycle ({cycle})'}, got {d}")
    return tuple(d for d in sorted(set(candidates)) if len(np.unique(t_n % d)) == d and len(t_n) - d >= 2)


def _divisors(number: int) -> list[int]:
    """Divisors above 1, the number itself included."""
    return [d for d in range(2, number + 1) if number % d == 0]


def _largest_divisors(number: int) -> list[int]:
    """number / p for its primes p, without 1: together their folds hold every proper divisor's fold."""
    return [number // p for p in _divisors(number) if len(_divisors(p)) == 1 and p < number]


def _maximal(periods: Sequence[int] | dict[int, float]) -> list[int]:
    """Periods that divide no other one."""
    return [d for d in set(periods) if not any(other != d and other % d == 0 for other in periods)]


def _orders(n: int, permutations: int, seed: int) -> Ints:
    """Orders of n positions [B, n], the identity first; all of them if they are few."""
    if math.factorial(min(n, 9)) <= _EXACT:
        return np.array(list(itertools.permutations(range(n))), np.int64)
    generator = np.random.default_rng(seed)
    drawn = generator.permuted(np.tile(np.arange(n), (permutations, 1)), axis=1)
    return np.concatenate([np.arange(n)[None], drawn])


def _smallest_p(t_n: Ints, searched: tuple[int, ...], per_order: float) -> float:
    """Least p-value of the search: orders that only rename or shuffle within classes leave a fold's statistic as it is."""
    least = 1.0
    for d in searched:
        sizes = np.unique(t_n % d, return_counts=True)[1]
        same = sum(math.lgamma(size + 1) for size in sizes) + sum(math.lgamma(repeat + 1) for repeat in np.unique(sizes, return_counts=True)[1])
        least = min(least, math.exp(same - math.lgamma(len(t_n) + 1)))
    return max(least, per_order)


def _fold(t_n: Ints, period: int) -> Floats:
    """Indicator columns [n, period] of the classes t mod period."""
    return np.asarray(t_n[:, None] % period == np.arange(period), float)


def _basis(columns: Floats) -> Floats:
    """Orthonormal basis [n, rank] of the columns and the constant."""
    columns = np.concatenate([np.ones((len(columns), 1)), columns], 1)
    left, size, _ = np.linalg.svd(columns, full_matrices=False)
    return np.asarray(left[:, size > 1e-9 * size[0]])


def _explained(basis: Floats, curves_BKn: Floats) -> Floats:
    """[B] fraction of each batch's sum of squares in the span of `basis`, averaged over curves that were centred and scaled to 1."""
    return np.asarray(((curves_BKn @ basis) ** 2).sum((1, 2)) / (curves_BKn**2).sum((1, 2)))


def _adjusted(basis: Floats, deviation_Kn: Floats) -> float:
    n, rank = basis.shape
    if n <= rank:
        return 0.0
    return float(1 - (1 - _explained(basis, deviation_Kn[None])[0]) * (n - 1) / (n - rank))


def _ratio(residual_Kn: Floats, order_Bn: Ints, small: Floats, large: Floats) -> Floats:
    """[B] F ratios of `large` over `small` for the residuals of `small` in every order (Freedman and Lane, 1983), rounded so that equal orders tie."""
    degrees = large.shape[1] - small.shape[1], len(residual_Kn[0]) - large.shape[1]
    out = np.empty(len(order_Bn))
    for start in range(0, len(order_Bn), 2048):
        part_BKn = residual_Kn[:, order_Bn[start : start + 2048]].transpose(1, 0, 2)
        total_B = (part_BKn**2).sum((1, 2))
        before_B = total_B - ((part_BKn @ small) ** 2).sum((1, 2))
        after_B = np.maximum(total_B - ((part_BKn @ large) ** 2).sum((1, 2)), 1e-12 * total_B)
        out[start : start + 2048] = (before_B - after_B) / degrees[0] / (after_B / degrees[1])
    return np.asarray(np.round(np.log1p(np.maximum(out, 0)), 7))


def _tail(ratio_B: Floats) -> Floats:
    """[B] share of the orders whose ratio is at least as large."""
    ordered = np.sort(ratio_B)
    return np.asarray((len(ratio_B) - np.searchsorted(ordered, ratio_B, side="left")) / len(ratio_B))


def _rank(ratio_B: Floats) -> Floats:
    """`_tail`, with ties between candidates broken by how many standard deviations the ratio stands out, so that many candidates do not blunt the test."""
    deviation_B = (ratio_B - ratio_B.mean()) / max(float(ratio_B.std()), 1e-12)
    return np.asarray(_tail(ratio_B) - 0.4 / len(ratio_B) * np.round(deviation_B / (1 + np.abs(deviation_B)), 6))


def _residual(deviation_Kn: Floats, basis: Floats) -> Floats:
    return np.asarray(deviation_Kn - deviation_Kn @ basis @ basis.T)


def _best(searched: tuple[int, ...], chosen: list[int], folds: dict[int, Floats], deviation_Kn: Floats, order_Bn: Ints) -> tuple[int | None, float]:
    """The candidate that adds most to the chosen folds, and its p-value over the whole search."""
    n = deviation_Kn.shape[1]
    held = np.concatenate([np.ones((n, 1)), *(folds[d] for d in chosen)], 1)
    small = _basis(held)
    residual_Kn = _residual(deviation_Kn, small)
    if (residual_Kn**2).sum() < _NOTHING * len(residual_Kn):
        return None, 1.0
    best: tuple[float, int] | None = None
    least_B = np.full(len(order_Bn), 2.0)
    for d in searched:
        large = _basis(np.concatenate([held, folds[d]], 1))
        if large.shape[1] == small.shape[1] or n - large.shape[1] < 2:
            continue
        ratio_B = _ratio(residual_Kn, order_Bn, small, large)
        least_B = np.minimum(least_B, _rank(ratio_B))
        if best is None or ratio_B[0] > best[0]:
            best = float(ratio_B[0]), d
    if best is None:
        return None, 1.0
    return best[1], float((least_B <= least_B[0] + 1e-9 / len(order_Bn)).mean())


def _own(period: int, others: list[int], folds: dict[int, Floats], deviation_Kn: Floats, order_Bn: Ints) -> float:
    """p-value of what `period` explains beyond its divisors and the other components; 1 where that cannot be told."""
    n = deviation_Kn.shape[1]
    held = np.concatenate([np.ones((n, 1)), *(folds[d] for d in [*others, *_largest_divisors(period)])], 1)
    small, large = _basis(held), _basis(np.concatenate([held, folds[period]], 1))
    residual_Kn = _residual(deviation_Kn, small)
    if large.shape[1] == small.shape[1] or n <= large.shape[1] or (residual_Kn**2).sum() < _NOTHING * len(residual_Kn):
        return 1.0
    return float(_tail(_ratio(residual_Kn, order_Bn, small, large))[0])
