"""Scores of a phase sweep with honest intervals: Wilson, clustered bootstrap, cross-fitting, and bounds that survive taking a minimum.

Shape suffixes: E logical examples, P residues (also _R for one value per residue), C clusters, B replicates, N pairs of residues, D random draws.
Accuracies and their intervals are fractions in [0, 1]; every interval is two-sided at 95 % unless it says otherwise.

The accuracy of the worst residue is a minimum of noisy means, and the phase gap a difference of two extremes, so both are biased: A_min low, the gap
high. A percentile bootstrap repeats the bias instead of removing it. Three kinds of interval are therefore given:

- percentile bootstrap (`a_min`, `gap`): what the paper prints (arXiv:2609.36322), comparable with it, but not centred on the truth;
- cross-fitted (`a_min_cross_fitted`, `gap_cross_fitted`): the extreme residue is chosen on one half of the clusters and measured on the other. Unbiased
  when all residues are equal and when the worst one stands apart; optimistic when several are nearly, but not quite, tied;
- bounds (`a_min_bounds`, `gap_bounds`): one end is an intersection-union bound, the other a simultaneous bound over the residues that may be the
  extreme one (moment selection after Chernozhukov, Lee and Rosen, Econometrica 81(2), 2013). They cover whatever the curve.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Array = npt.NDArray[Any]

CONFIDENCE = 0.95
_MISS_SEARCHED = 0.035  # of the 5 %: the end that has to allow for a search over residues
_MISS_PLAIN = 0.015  # the end that does not, and is conservative where residues tie
_DRAWS = 4000  # Gaussian draws behind a simultaneous critical value
_ROUNDING = 1e-6  # a smaller design effect is rounding of a variance of 0
_CHUNK_BYTES = 16 * 2**20  # of resampling counts held at once


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with the two ends of its interval."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """high - low."""
        return self.high - self.low


@dataclass(frozen=True, kw_only=True, eq=False)
class PhaseScores:
    """Scores of one phase sweep. Arrays are indexed by residue; accuracies are fractions.

    Attributes:
        examples, clusters, replicates: logical examples, independent groups of them, bootstrap replicates.
        n_R: scored examples per residue.
        accuracy_R, accuracy_low_R, accuracy_high_R: A_r with its percentile bootstrap interval. A residue that is all right or all wrong shows no spread to a
            bootstrap; it gets the Wilson interval over its clusters.
        mean, a_min, gap, spread: Ā, A_min, Δ = max - min and the population standard deviation over residues, with percentile bootstrap intervals.
        a_min_cross_fitted, gap_cross_fitted: extremes chosen on one half of the clusters, measured on the other, both ways, averaged; intervals from the
            error of that procedure on a curve whose candidates for an extreme are exactly tied.
        a_min_bounds, gap_bounds: the plain estimates with intervals that allow for the selection.
        spread_debiased: the spread with the sampling noise taken out, 0 if nothing is left.
        worst_residue, best_residue: of the plain accuracies; the first one of equals.
    """

    examples: int
    clusters: int
    replicates: int
    n_R: npt.NDArray[np.int64]
    accuracy_R: Floats
    accuracy_low_R: Floats
    accuracy_high_R: Floats
    mean: Estimate
    a_min: Estimate
    gap: Estimate
    spread: Estimate
    a_min_cross_fitted: Estimate
    gap_cross_fitted: Estimate
    a_min_bounds: Estimate
    gap_bounds: Estimate
    spread_debiased: float
    worst_residue: int
    best_residue: int

    @property
    def period(self) -> int:
        """Residues P."""
        return len(self.accuracy_R)

    @property
    def relative_gap(self) -> float | None:
        """Gap over mean; None when the mean is 0."""
        return self.gap.value / self.mean.value if self.mean.value > 0 else None


@dataclass(frozen=True, kw_only=True, eq=False)
class PairedDifference:
    """First minus second variant on the same examples; percentile bootstrap intervals, one resample for both, except the cross-fitted normal one.

    Attributes:
        accuracy_R, accuracy_low_R, accuracy_high_R: difference per residue.
        mean, a_min, gap, spread: differences of the plain scores. Biases of the two minima (and gaps) cancel only as far as the two curves are alike.
        a_min_cross_fitted: each variant's own worst residue is chosen on one half and measured on the other; normal interval with the bootstrap's standard
            error of the whole procedure, which errs on the wide side.
    """

    clusters: int
    replicates: int
    accuracy_R: Floats
    accuracy_low_R: Floats
    accuracy_high_R: Floats
    mean: Estimate
    a_min: Estimate
    gap: Estimate
    spread: Estimate
    a_min_cross_fitted: Estimate


def wilson(hits: npt.ArrayLike, n: npt.ArrayLike, confidence: float = CONFIDENCE) -> tuple[Floats, Floats]:
    """Two-sided Wilson score interval of a proportion (E. B. Wilson, JASA 22, 1927).

    Args:
        hits: successes, 0 <= hits <= n; any shape, fractions allowed.
        n: trials, broadcast against `hits`; n = 0 gives (0, 1).
        confidence: between 0 and 1, both excluded.

    Returns:
        (low, high), fractions, of the broadcast shape.

    Raises:
        ValueError: hits outside [0, n], n negative, or confidence out of bounds.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"wilson: confidence must be between 0 and 1, got {confidence}")
    hits_, n_ = np.broadcast_arrays(np.asarray(hits, float), np.asarray(n, float))
    if not (np.isfinite(hits_).all() and np.isfinite(n_).all() and (hits_ >= 0).all() and (hits_ <= n_).all()):
        raise ValueError("wilson: hits must be between 0 and n")
    some = n_ > 0
    share = np.where(some, hits_ / np.where(some, n_, 1.0), 0.5)
    low, high = _wilson(share, n_, NormalDist().inv_cdf(0.5 + confidence / 2))
    return np.where(some, low, 0.0), np.where(some, high, 1.0)


def _wilson(share: Floats, n: Floats, z: float | Floats) -> tuple[Floats, Floats]:
    """Wilson interval at z standard errors, n > 0 (n = 0 gives (0, 1)); exact at shares 0 and 1."""
    shrink = n + z * z
    centre = (n * share + z * z / 2) / shrink
    half = z / shrink * np.sqrt(n * share * (1 - share) + z * z / 4)
    return np.where(share == 0, 0.0, np.clip(centre - half, 0, 1)), np.where(share == 1, 1.0, np.clip(centre + half, 0, 1))


def examples_needed(width: float, p: float = 0.5, confidence: float = CONFIDENCE, design_effect: float = 1.0) -> int:
    """Fewest scored examples for which a Wilson interval around accuracy `p` is at most `width` wide.

    Args:
        width: wanted high - low, a fraction, 0 < width <= 1.
        p: expected accuracy; 0.5 is the widest case.
        confidence: of the interval.
        design_effect: variance of the clustered estimate over that of as many independent examples, > 0; multiplies the answer.

    Raises:
        ValueError: an argument out of bounds.
    """
    for name, value, holds in (
        ("width", width, 0 < width <= 1),
        ("p", p, 0 <= p <= 1),
        ("confidence", confidence, 0 < confidence < 1),
        ("design_effect", design_effect, 0 < design_effect < math.inf),
    ):
        if not holds:
            raise ValueError(f"examples_needed: {name} is out of bounds, got {value}")
    z2 = NormalDist().inv_cdf(0.5 + confidence / 2) ** 2
    # width^2 (n + z^2)^2 = 4 z^2 (n p q + z^2 / 4), solved for n
    a, b, c = width**2, 2 * z2 * (width**2 - 2 * p * (1 - p)), z2**2 * (width**2 - 1)
    root = (-b + math.sqrt(b * b - 4 * a * c)) / (2 * a)
    return max(1, math.ceil(root * design_effect * (1 - 1e-12)))


def phase_scores(
    correct_ER: npt.ArrayLike,
    scored_ER: npt.ArrayLike | None = None,
    cluster_E: npt.ArrayLike | None = None,
    *,
    replicates: int = 2000,
    seed: int = 0,
) -> PhaseScores:
    """Score a phase sweep; see `PhaseScores` for what is estimated and the module's docstring for what each interval covers.

    Clusters are resampled with replacement, all residues of a cluster together. Permuting the examples (with their masks and ids) changes nothing.

    Args:
        correct_ER: [E, P] bool, or float in [0, 1]: example e answered with its target at residue r.
        scored_ER: [E, P] bool, examples that count; default all. Values of `correct_ER` where it is False are ignored.
        cluster_E: [E] ids of what was drawn independently (the prompt of a query); default: every example by itself.
        replicates: bootstrap replicates, at least 2.
        seed: of the resampling and of the cross-fitting split.

    Raises:
        ValueError: wrong shapes or values, fewer than two clusters, a residue without a scored example, or no residue scored in both halves of the split.
    """
    _at_least("phase_scores: replicates", replicates, 2)
    table = _per_cluster("phase_scores", correct_ER, scored_ER, cluster_E)
    hits_CP, n_CP, half = _shuffled(_with_examples("phase_scores", [table]), seed)[0]
    clusters, period = hits_CP.shape
    n_R = n_CP.sum(0)
    accuracy_R = hits_CP.sum(0) / n_R
    point = _scores(hits_CP.sum(0)[None], n_CP.sum(0)[None]) | _cross_fitted(_halves(np.ones((1, clusters)), hits_CP, n_CP, half))
    if not np.isfinite(point["a_min_cross_fitted"][0]):
        raise ValueError("phase_scores: no residue has scored examples in both halves of the clusters; cross-fitting needs more clusters")

    parts: list[dict[str, Floats]] = []
    for counts_BC in _resamples(clusters, replicates, seed):
        halves = _halves(counts_BC, hits_CP, n_CP, half)
        parts.append(_scores(halves[0] + halves[2], halves[1] + halves[3]))
    boot = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    low_R, high_R = _percentiles(boot["accuracy"])
    flat_R = (accuracy_R == 0) | (accuracy_R == 1)
    clusters_R = (n_CP > 0).sum(0).astype(float)
    wilson_low_R, wilson_high_R = wilson(accuracy_R * clusters_R, clusters_R)
    low_R, high_R = np.where(flat_R, wilson_low_R, low_R), np.where(flat_R, wilson_high_R, high_R)
    mean = _percentile(point, boot, "mean")
    if flat_R.all():
        mean = Estimate(value=mean.value, low=float(low_R.mean()), high=float(high_R.mean()))

    covariance_RR = _covariance(hits_CP, n_CP, accuracy_R)
    noise = float(np.trace(covariance_RR) / period - covariance_RR.mean())
    cross_fitted = float(point["a_min_cross_fitted"][0]), float(point["gap_cross_fitted"][0])
    searched = _searched(accuracy_R, covariance_RR, n_R, clusters_R, clusters, cross_fitted, seed)
    return PhaseScores(
        examples=len(np.asarray(correct_ER)),
        clusters=clusters,
        replicates=replicates,
        n_R=n_R.astype(np.int64),
        accuracy_R=accuracy_R,
        accuracy_low_R=low_R,
        accuracy_high_R=high_R,
        mean=mean,
        a_min=_percentile(point, boot, "a_min"),
        gap=_percentile(point, boot, "gap"),
        spread=_percentile(point, boot, "spread"),
        **searched,
        spread_debiased=math.sqrt(max(0.0, float(accuracy_R.var()) - noise)),
        worst_residue=int(accuracy_R.argmin()),
        best_residue=int(accuracy_R.argmax()),
    )


def paired_difference(
    a_ER: npt.ArrayLike,
    b_ER: npt.ArrayLike,
    scored_a_ER: npt.ArrayLike | None = None,
    scored_b_ER: npt.ArrayLike | None = None,
    cluster_E: npt.ArrayLike | None = None,
    *,
    replicates: int = 2000,
    seed: int = 0,
) -> PairedDifference:
    """Scores of variant a minus those of variant b on the same examples at the same residues; the same clusters are drawn for both.

    Args:
        a_ER, b_ER: [E, P] as `correct_ER` of `phase_scores`; row e is the same example in both.
        scored_a_ER, scored_b_ER: [E, P] bool, default all; `scored_b_ER` defaults to `scored_a_ER`.
        cluster_E: [E] cluster ids, shared.
        replicates, seed: as in `phase_scores`.

    Raises:
        ValueError: as in `phase_scores`, or a and b differ in shape.
    """
    _at_least("paired_difference: replicates", replicates, 2)
    if np.shape(a_ER) != np.shape(b_ER):
        raise ValueError(f"paired_difference: a_ER and b_ER must have one shape, got {np.shape(a_ER)} and {np.shape(b_ER)}")
    if scored_b_ER is None:
        scored_b_ER = scored_a_ER
    tables = [_per_cluster("paired_difference", a_ER, scored_a_ER, cluster_E), _per_cluster("paired_difference", b_ER, scored_b_ER, cluster_E)]
    shuffled = _shuffled(_with_examples("paired_difference", tables), seed)
    clusters = len(shuffled[0][0])

    def difference(counts_BC: Floats) -> dict[str, Floats]:
        sides = []
        for hits_CP, n_CP, half in shuffled:
            halves = _halves(counts_BC, hits_CP, n_CP, half)
            sides.append(_scores(halves[0] + halves[2], halves[1] + halves[3]) | _cross_fitted(halves))
        return {name: sides[0][name] - sides[1][name] for name in sides[0]}

    point = difference(np.ones((1, clusters)))
    parts = [difference(counts_BC) for counts_BC in _resamples(clusters, replicates, seed)]
    boot = {name: np.concatenate([part[name] for part in parts]) for name in point}
    low_R, high_R = _percentiles(boot["accuracy"])
    return PairedDifference(
        clusters=clusters,
        replicates=replicates,
        accuracy_R=point["accuracy"][0],
        accuracy_low_R=low_R,
        accuracy_high_R=high_R,
        mean=_percentile(point, boot, "mean"),
        a_min=_percentile(point, boot, "a_min"),
        gap=_percentile(point, boot, "gap"),
        spread=_percentile(point, boot, "spread"),
        a_min_cross_fitted=_normal(point, boot, "a_min_cross_fitted", -1, 1),
    )


def _at_least(name: str, value: int, bound: int) -> None:
    if value < bound:
        raise ValueError(f"{name} must be at least {bound}, got {value}")


def _per_cluster(caller: str, correct_ER: npt.ArrayLike, scored_ER: npt.ArrayLike | None, cluster_E: npt.ArrayLike | None) -> tuple[Floats, Floats]:
    """Hits and scored examples per cluster and residue, both [C, P], clusters in the order of their ids."""
    correct = np.asarray(correct_ER)
    if correct.ndim != 2 or 0 in correct.shape:
        raise ValueError(f"{caller}: accuracies must have shape [examples, residues], got {list(correct.shape)}")
    scored = np.ones(correct.shape, bool) if scored_ER is None else np.asarray(scored_ER)
    if scored.shape != correct.shape or scored.dtype != np.bool_:
        raise ValueError(f"{caller}: the scored mask must be bool of shape {list(correct.shape)}, got {scored.dtype} of shape {list(scored.shape)}")
    values = np.where(scored, correct, 0).astype(float)
    if not (np.isfinite(values).all() and (values >= 0).all() and (values <= 1).all()):
        raise ValueError(f"{caller}: accuracies of scored examples must be between 0 and 1")
    missing = np.flatnonzero(~scored.any(0))
    if len(missing):
        raise ValueError(f"{caller}: residue {missing[0]} has no scored example")
    if cluster_E is None:
        hits_CP, n_CP = values, scored.astype(float)
    else:
        ids = np.asarray(cluster_E)
        if ids.shape != correct.shape[:1]:
            raise ValueError(f"{caller}: cluster_E must have shape [{len(correct)}], got {list(ids.shape)}")
        order = np.argsort(ids, kind="stable")
        starts = np.flatnonzero(np.r_[True, np.diff(ids[order]) != 0])
        hits_CP, n_CP = np.add.reduceat(values[order], starts), np.add.reduceat(scored[order].astype(float), starts)
    return hits_CP, n_CP


def _with_examples(caller: str, tables: list[tuple[Floats, Floats]]) -> list[tuple[Floats, Floats]]:
    """The tables without the clusters in which nothing was scored."""
    some_C = sum(n_CP.sum(1) for _, n_CP in tables) > 0
    if some_C.sum() < 2:
        raise ValueError(f"{caller}: an interval needs at least 2 clusters with scored examples, got {some_C.sum()}")
    return [(hits_CP[some_C], n_CP[some_C]) for hits_CP, n_CP in tables]


def _shuffled(tables: list[tuple[Floats, Floats]], seed: int) -> list[tuple[Floats, Floats, int]]:
    """The tables in one random order of clusters, so that the first `half` of them is a random half."""
    clusters = len(tables[0][0])
    order = np.random.default_rng([seed, 0]).permutation(clusters)
    return [(hits_CP[order], n_CP[order], clusters // 2) for hits_CP, n_CP in tables]


def _resamples(clusters: int, replicates: int, seed: int) -> Iterator[Floats]:
    """How often each cluster is drawn: multinomial counts [B, C], in chunks that add up to `replicates` rows."""
    generator = np.random.default_rng([seed, 1])
    chunk = max(1, min(replicates, _CHUNK_BYTES // (8 * clusters)))
    for start in range(0, replicates, chunk):
        rows = min(chunk, replicates - start)
        drawn = generator.integers(0, clusters, size=(rows, clusters))
        drawn += np.arange(rows)[:, None] * clusters
        yield np.bincount(drawn.ravel(), minlength=rows * clusters).reshape(rows, clusters).astype(float)


def _halves(counts_BC: Floats, hits_CP: Floats, n_CP: Floats, half: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Hits and n of the first half, hits and n of the second, each [B, P]."""
    first, second = counts_BC[:, :half], counts_BC[:, half:]
    return first @ hits_CP[:half], first @ n_CP[:half], second @ hits_CP[half:], second @ n_CP[half:]


def _scores(hits_BP: Floats, n_BP: Floats) -> dict[str, Floats]:
    """Scores per replicate; a residue that a replicate happens not to hold is left out of that replicate."""
    drawn_BP = n_BP > 0
    accuracy_BP = np.where(drawn_BP, hits_BP / np.where(drawn_BP, n_BP, 1), np.nan)
    if drawn_BP.all():
        low, high, mean, spread = accuracy_BP.min(1), accuracy_BP.max(1), accuracy_BP.mean(1), accuracy_BP.std(1)
    else:
        low, high = np.nanmin(accuracy_BP, 1), np.nanmax(accuracy_BP, 1)
        mean, spread = np.nanmean(accuracy_BP, 1), np.nanstd(accuracy_BP, 1)
    return {"accuracy": accuracy_BP, "mean": mean, "a_min": low, "gap": high - low, "spread": spread}


def _cross_fitted(halves: tuple[Floats, Floats, Floats, Floats]) -> dict[str, Floats]:
    """A_min and gap with the residues chosen on one half and measured on the other, both ways, averaged; NaN where no residue is in both halves."""
    hits_a, n_a, hits_b, n_b = halves
    both = (n_a > 0) & (n_b > 0)
    first = np.where(both, hits_a / np.where(both, n_a, 1), np.nan)
    second = np.where(both, hits_b / np.where(both, n_b, 1), np.nan)
    rows = np.arange(len(first))

    def measured(choice: Floats, measure: Floats, sign: int) -> Floats:
        return np.asarray(measure[rows, np.where(both, sign * choice, np.inf).argmin(1)])

    worst = (measured(first, second, 1) + measured(second, first, 1)) / 2
    best = (measured(first, second, -1) + measured(second, first, -1)) / 2
    return {"a_min_cross_fitted": worst, "gap_cross_fitted": best - worst}


def _percentiles(values_B: Floats) -> tuple[Floats, Floats]:
    quantile = np.nanquantile if np.isnan(values_B).any() else np.quantile
    low, high = quantile(values_B, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return np.asarray(low, float), np.asarray(high, float)


def _percentile(point: dict[str, Floats], boot: dict[str, Floats], name: str) -> Estimate:
    low, high = _percentiles(boot[name])
    return Estimate(value=float(point[name][0]), low=float(low), high=float(high))


def _normal(point: dict[str, Floats], boot: dict[str, Floats], name: str, least: float, most: float) -> Estimate:
    value = float(point[name][0])
    reach = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * float(np.nanstd(boot[name], ddof=1))
    return Estimate(value=value, low=max(least, value - reach), high=min(most, value + reach))


def _covariance(hits_CP: Floats, n_CP: Floats, accuracy_R: Floats) -> Floats:
    """Linearised cluster covariance [P, P] of the accuracies (ratios of cluster totals)."""
    influence_CP = (hits_CP - accuracy_R * n_CP) / n_CP.sum(0)
    clusters = len(hits_CP)
    return np.asarray(influence_CP.T @ influence_CP * (clusters / (clusters - 1)))


def _searched(
    accuracy_R: Floats, covariance_RR: Floats, n_R: Floats, clusters_R: Floats, clusters: int, cross_fitted: tuple[float, float], seed: int
) -> dict[str, Estimate]:
    """Intervals of the true minimum and of the true gap that allow for having searched the extremes.

    Bounds of the minimum. Lower end: were the truth below it, the truth of some residue r would lie below r's own one-sided bound, so the least of the
    one-sided bounds needs no correction. Upper end: the least of simultaneous upper bounds over the residues that the data do not rule out as the worst.
    Bounds of the gap: the same with signs turned, over ordered pairs of residues, ends from one-residue ends by Newcombe's combination (Statistics in
    Medicine 17, 1998).
    Cross-fitted: its error is drawn for a curve on which the residues that may be extreme are exactly tied.
    """
    period = len(accuracy_R)
    n_effective_R, correlation_RR = _effective(accuracy_R, covariance_RR, n_R, clusters_R)
    error_R = np.sqrt(_variance(accuracy_R, n_effective_R))
    z_plain = NormalDist().inv_cdf(1 - _MISS_PLAIN)
    keep = 1 - 0.1 / math.log(max(clusters, 3))  # moment selection: sure to keep the truly extreme as clusters grow
    weight, vectors = np.linalg.eigh(correlation_RR)
    root = vectors * np.sqrt(np.clip(weight, 0, None))
    generator = np.random.default_rng([seed, 2])
    first_DR, second_DR = (generator.standard_normal((_DRAWS, period)) @ root.T for _ in range(2))  # the noise of each half, in standard errors of a half

    low_R, high_R = _wilson(accuracy_R, n_effective_R, float(np.quantile(first_DR.max(1), keep)))
    bottom_R, top_R = low_R <= high_R.min(), high_R >= low_R.max()
    k = float(np.quantile(first_DR[:, bottom_R].max(1), 1 - _MISS_SEARCHED))
    low = float(_skewed(accuracy_R, n_effective_R, z_plain)[0].min())
    high = float(_skewed(accuracy_R, n_effective_R, k)[1][bottom_R].min())
    worst = float(accuracy_R.min())
    a_min_bounds = Estimate(value=worst, low=min(low, worst), high=max(high, worst))
    gap_bounds = _gap_bounds(accuracy_R, n_effective_R, correlation_RR, error_R, first_DR, z_plain, keep) if period > 1 else Estimate(value=0, low=0, high=0)

    tied_R = accuracy_R.copy()
    if (bottom_R & top_R).any():
        tied_R[bottom_R | top_R] = accuracy_R[bottom_R | top_R].mean()
    else:
        tied_R[bottom_R], tied_R[top_R] = accuracy_R[bottom_R].mean(), accuracy_R[top_R].mean()
    ones = np.ones((_DRAWS, period))
    half_error_R = math.sqrt(2) * error_R
    drawn = _cross_fitted((tied_R + first_DR * half_error_R, ones, tied_R + second_DR * half_error_R, ones))
    tails = [(1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2]
    found = {"a_min_bounds": a_min_bounds, "gap_bounds": gap_bounds}
    for name, value, truth, least in (
        ("a_min_cross_fitted", cross_fitted[0], float(tied_R.min()), 0.0),
        ("gap_cross_fitted", cross_fitted[1], float(np.ptp(tied_R)), -1.0),
    ):
        low, high = (value + truth - float(end) for end in np.quantile(drawn[name], tails))
        found[name] = Estimate(value=value, low=min(max(least, low), value), high=max(min(1.0, high), value))
    return found


def _gap_bounds(accuracy_R: Floats, n_effective_R: Floats, correlation_RR: Floats, error_R: Floats, noise_DR: Floats, z_plain: float, keep: float) -> Estimate:
    """Bounds of the gap over the ordered pairs N of residues; see `_searched`."""
    up_N, down_N = np.nonzero(~np.eye(len(accuracy_R), dtype=bool))
    correlation_N = correlation_RR[up_N, down_N]
    difference_N = accuracy_R[up_N] - accuracy_R[down_N]

    def reach(one: Floats, other: Floats) -> Floats:
        return np.asarray(np.sqrt(np.clip(one**2 + other**2 - 2 * correlation_N * one * other, 0, None)))

    def ends(z: float) -> tuple[Floats, Floats]:
        low_R, high_R = _skewed(accuracy_R, n_effective_R, z)
        below_R, above_R = accuracy_R - low_R, high_R - accuracy_R
        return difference_N - reach(below_R[up_N], above_R[down_N]), difference_N + reach(above_R[up_N], below_R[down_N])

    error_N = np.maximum(reach(error_R[up_N], error_R[down_N]), 1e-150)
    scaled_DR = noise_DR * error_R

    def critical(may_N: npt.NDArray[np.bool_], level: float) -> float:
        largest_D = np.full(len(scaled_DR), -np.inf)
        for up, down, error in zip(up_N[may_N], down_N[may_N], error_N[may_N], strict=True):
            np.maximum(largest_D, (scaled_DR[:, up] - scaled_DR[:, down]) / error, out=largest_D)
        return float(np.quantile(largest_D, level))

    low_N, high_N = ends(critical(np.ones(len(up_N), bool), keep))
    may_N = high_N >= low_N.max()
    gap = float(np.ptp(accuracy_R))
    low = float(ends(critical(may_N, 1 - _MISS_SEARCHED))[0][may_N].max())
    high = float(ends(z_plain)[1].max())
    return Estimate(value=gap, low=min(max(0.0, low), gap), high=max(min(1.0, high), gap))


def _skewed(share_R: Floats, n_R: Floats, z: float) -> tuple[Floats, Floats]:
    """Wilson interval, widened (never narrowed) for the skewness of the binomial at its ends: first Cornish-Fisher term."""
    ends = []
    for side, end_R in zip((-1, 1), _wilson(share_R, n_R, z), strict=True):
        variance_R = np.maximum(end_R * (1 - end_R), 1e-12)
        skewness_R = (1 - 2 * end_R) / np.sqrt(n_R * variance_R)
        extra_R = np.clip(-side * skewness_R * (z * z - 1) / 6, 0, 1)
        ends.append(_wilson(share_R, n_R, z + extra_R)[0 if side < 0 else 1])
    return ends[0], ends[1]


def _variance(accuracy_R: Floats, n_effective_R: Floats) -> Floats:
    """Binomial variance on effective counts, kept above 0 at accuracies 0 and 1 by half a hit."""
    inside_R = (accuracy_R * n_effective_R + 0.5) / (n_effective_R + 1)
    share_R = np.where((accuracy_R == 0) | (accuracy_R == 1), inside_R, accuracy_R)
    return np.asarray(share_R * (1 - share_R) / n_effective_R)


def _effective(accuracy_R: Floats, covariance_RR: Floats, n_R: Floats, clusters_R: Floats) -> tuple[Floats, Floats]:
    """Effective counts (independent examples with the same variance) and the correlation matrix of the residues.

    A residue that is all right or all wrong shows no variance: it takes the design effect of the others together, or its clusters where there are no others.
    Residues that miss the same few examples show correlation 1, hence no error of their difference; one event of each residue's own is added to what was
    seen, so that the least error of a difference is about that of two discordant examples. On residues with many hits and misses that changes nothing.
    """
    variance_R = np.diag(covariance_RR)
    binomial_R = accuracy_R * (1 - accuracy_R)
    known_R = (binomial_R > 0) & (variance_R * n_R > _ROUNDING * binomial_R)
    safe_R = np.where(known_R, variance_R, 1.0)
    if known_R.any():
        design = float(variance_R[known_R].sum() / (binomial_R[known_R] / n_R[known_R]).sum())
        fallback_R = np.minimum(n_R / design, n_R)
    else:
        fallback_R = clusters_R
    n_effective_R = np.where(known_R, binomial_R / safe_R, fallback_R)
    events_R = np.where(known_R, n_effective_R * binomial_R, 0.0)
    shared_R = np.sqrt(events_R / (events_R + 1) / safe_R)
    correlation_RR = covariance_RR * np.outer(shared_R, shared_R)
    np.fill_diagonal(correlation_RR, 1.0)
    return n_effective_R, correlation_RR
