"""Dominance among finished trials: the front, its hypervolume, how sure it is, and a few candidates to look at first.

A trial is a point in four objectives, always in the order of `OBJECTIVES`. Trials without metrics are nowhere on the front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import moocore
import numpy as np
from numpy.typing import NDArray

from mitigate.config import VariantConfig, to_dict
from mitigate.rows import Interval, Row

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One axis of the front. `name` is the column in a flat table, `axis` the words on a figure's axis."""

    name: str
    maximise: bool
    axis: str


OBJECTIVES = (
    Objective(name="cost.kv_bytes_per_token", maximise=False, axis="KV bytes per token"),
    Objective(name="cost.throughput_ratio", maximise=True, axis="decode throughput relative to full attention"),
    Objective(name="mean_accuracy", maximise=True, axis="mean accuracy"),
    Objective(name="a_min", maximise=True, axis="worst-phase accuracy A_min"),
)
MAXIMISE = tuple(objective.maximise for objective in OBJECTIVES)

# Worst corner for the hypervolume: a little more KV than full attention (so that full attention itself counts), no speed, no accuracy.
REFERENCE = (1.1, 0.0, 0.0, 0.0)

_NORMAL_95 = 1.959964  # half width of a 95 % interval in standard deviations
_QUARTILES = 1.348980  # distance of the quartiles in standard deviations


def objectives(row: Row) -> Array | None:
    """[4] objectives in raw units, in the order of `OBJECTIVES`; None for a trial without metrics."""
    if row.status != "ok" or row.cost is None or row.mean_accuracy is None or row.a_min is None:
        return None
    return np.array([row.cost.kv_bytes_per_token, row.cost.throughput_ratio.value, row.mean_accuracy, row.a_min])


def intervals(row: Row) -> tuple[Interval, Interval, Interval, Interval] | None:
    """The four objectives with their intervals; None for a trial without metrics.

    KV bytes are exact. Throughput carries quartiles over repeats. The mean's interval averages the ends of both protocols' intervals, which is
    never too narrow, because the protocols share their prompts.
    """
    if row.status != "ok" or row.cost is None or row.mean_accuracy is None or row.a_min is None:
        return None
    kv = row.cost.kv_bytes_per_token
    return Interval(value=kv, low=kv, high=kv), row.cost.throughput_ratio, *accuracy_intervals(row)


def accuracy_intervals(row: Row) -> tuple[Interval, Interval]:
    """Mean accuracy and A_min of a scored row with their intervals; see `intervals`. ValueError for a row without scores."""
    if row.mean_accuracy is None or row.a_min is None:
        raise ValueError(f"accuracy_intervals: trial {row.trial} ({row.status}) has no scores")
    means = [score.mean for score in row.scores]
    mean = Interval(
        value=row.mean_accuracy,
        low=sum(m.low for m in means) / len(means) if means else row.mean_accuracy,
        high=sum(m.high for m in means) / len(means) if means else row.mean_accuracy,
    )
    low = row.a_min if row.a_min_low is None else row.a_min_low
    high = row.a_min if row.a_min_high is None else row.a_min_high
    return mean, Interval(value=row.a_min, low=low, high=high)


def non_dominated(points: Array, maximise: Sequence[bool] = MAXIMISE) -> NDArray[np.bool_]:
    """[N] mask over points [N, D]: no other point is at least as good everywhere and better somewhere. Of equal points the first is kept."""
    if len(points) == 0:
        return np.zeros(0, dtype=bool)
    return np.asarray(moocore.is_nondominated(points, maximise=list(maximise)), dtype=bool)


def weakly_non_dominated(points: Array, maximise: Sequence[bool] = MAXIMISE) -> NDArray[np.bool_]:
    """As `non_dominated`, but of equal points all are kept."""
    return np.asarray(moocore.is_nondominated(points, maximise=list(maximise), keep_weakly=True), dtype=bool)


def front(rows: Sequence[Row]) -> list[Row]:
    """Rows that no other row dominates, in the order given; of rows with equal objectives the first."""
    finished = [(row, point) for row in rows if (point := objectives(row)) is not None]
    mask = non_dominated(np.array([point for _, point in finished]))
    return [row for (row, _), keep in zip(finished, mask, strict=True) if keep]


def dominates(row: Row, other: Row) -> bool:
    """Whether a finished row is at least as good as another in all four objectives and better in one."""
    point, held = objectives(row), objectives(other)
    if point is None or held is None:
        return False
    gain = (point - held) * np.where(MAXIMISE, 1.0, -1.0)
    return bool((gain >= 0).all() and (gain > 0).any())


def hypervolume(rows: Sequence[Row]) -> float:
    """Volume dominated by the rows, measured from `REFERENCE`; the KV axis is the fraction of full attention's bytes, so studies compare."""
    points = [point for row in rows if (point := _normalised(row)) is not None]
    return float(moocore.hypervolume(np.array(points), ref=REFERENCE, maximise=list(MAXIMISE))) if points else 0.0


def _normalised(row: Row) -> Array | None:
    point = objectives(row)
    if point is None or row.cost is None:
        return None
    point[0] = row.cost.kv_kept
    return point


def front_probability(rows: Sequence[Row], draws: int = 400, seed: int = 0) -> Array:
    """[N] approximate probability of each row to be on the front, given the intervals; NaN for a trial without metrics.

    Every objective is drawn from a normal distribution fitted to its interval (accuracies clipped to [0, 1]), independently of all others. In truth
    the trials share their prompts, so their errors go together: take the number as a hint of how fragile a place on the front is, not as a test.
    """
    probability = np.full(len(rows), np.nan)
    finished = [i for i, row in enumerate(rows) if objectives(row) is not None]
    if not finished:
        return probability
    value, scale = (np.array(part) for part in zip(*[_normal(rows[i]) for i in finished], strict=True))
    rng, hits = np.random.default_rng(seed), np.zeros(len(finished))
    for _ in range(draws):
        sample = value + scale * rng.standard_normal(value.shape)
        sample[:, 2:] = sample[:, 2:].clip(0, 1)
        hits += weakly_non_dominated(sample)
    probability[finished] = hits / draws
    return probability


def _normal(row: Row) -> tuple[Array, Array]:
    """Centre and standard deviation of the four objectives of a finished row."""
    four = intervals(row)
    assert four is not None
    width = np.array([interval.high - interval.low for interval in four])
    return np.array([interval.value for interval in four]), width / np.array([1.0, _QUARTILES, 2 * _NORMAL_95, 2 * _NORMAL_95])


def variant_of(row: Row) -> dict[str, Any]:
    """The variant table of a row's config."""
    variant = row.config.get("variant", {})
    return variant if isinstance(variant, dict) else {}


def is_full(row: Row) -> bool:
    """Full attention: nothing is compressed."""
    return variant_of(row).get("compress") is False


def is_plain(row: Row) -> bool:
    """The plain compressor: every field at its default but for window = stride."""
    variant = variant_of(row)
    window = variant.get("window")
    return isinstance(window, int) and window >= 1 and variant == to_dict(VariantConfig(window=window, stride=window))


def full_row(rows: Sequence[Row]) -> Row | None:
    """The finished full-attention trial, an anchor if there is one."""
    return _first([row for row in rows if is_full(row) and objectives(row) is not None])


def plain_row(rows: Sequence[Row]) -> Row | None:
    """The finished plain trial to compare with: W8/S8 if there is one, else the shortest plain window; anchors first."""
    plain = [row for row in rows if is_plain(row) and objectives(row) is not None]
    plain.sort(key=lambda row: (variant_of(row)["window"] != 8, variant_of(row)["window"]))
    return _first([row for row in plain if variant_of(row)["window"] == variant_of(plain[0])["window"]])


def plain_name(row: Row) -> str:
    """'plain W8/S8' for the row that `plain_row` gives."""
    return f"plain W{variant_of(row)['window']}/S{variant_of(row)['stride']}"


def _first(rows: list[Row]) -> Row | None:
    return next((row for row in rows if row.anchor), rows[0] if rows else None)


@dataclass(frozen=True)
class Knee:
    """A candidate from the front, and in a sentence what it trades."""

    row: Row
    reason: str


def knees(rows: Sequence[Row]) -> list[Knee]:
    """Up to three different compressed candidates from the front; a row chosen by two rules appears once, with both reasons.

    The first three rules name the candidates; where they agree, the two after them fill up to three.
    """
    best, plain = front(rows), plain_row(rows)
    chosen: list[Knee] = []
    for rule, (row, reason) in enumerate((_by_contribution(best), _by_a_min(best, rows), _by_achievement(best), _by_bytes(best, plain), _by_mean(best))):
        same = next((i for i, knee in enumerate(chosen) if knee.row is row), None)
        if row is None or (rule >= 3 and (same is not None or len(chosen) == 3)):
            continue
        if same is None:
            chosen.append(Knee(row, f"{reason[0].upper()}{reason[1:]}. {_trade(row, plain)}"))
        else:
            chosen[same] = Knee(row, f"{chosen[same].reason} Also: {reason}.")
    return chosen


def _trade(row: Row, plain: Row | None) -> str:
    """What the row costs and gives, and against the plain compressor what it gains and gives up."""
    point = _normalised(row)
    assert point is not None
    kept, speed, mean, a_min = point
    cost = f"Keeps {100 * kept:.3g} % of the KV bytes and decodes {speed:.2f} times as fast as full attention"
    level = f"{cost}; accuracy {mean:.3f} in the mean, {a_min:.3f} in the worst phase."
    if plain is None or plain is row:
        return level
    held = _normalised(plain)
    assert held is not None
    moves = [(bool(up) == (change > 0), words) for words, up, change in _changes(point, held)]
    gained, lost = ([words for good, words in moves if good is wanted] for wanted in (True, False))
    gain, price = ", ".join(gained) or "no gain", f"; the price: {', '.join(lost)}" if lost else ", at no price"
    return f"{level} Against {plain_name(plain)}: {gain}{price}."


def _changes(point: Array, held: Array) -> list[tuple[str, bool, float]]:
    """What differs visibly between two points with KV as a fraction: words, whether more is better, the change."""
    found = []
    if abs(point[0] / held[0] - 1) > 0.005:
        found.append((f"{100 * point[0] / held[0] - 100:+.0f} % KV bytes", False, float(point[0] - held[0])))
    if abs(point[1] / max(held[1], 1e-9) - 1) > 0.02:
        found.append((f"{100 * point[1] / max(held[1], 1e-9) - 100:+.0f} % decode speed", True, float(point[1] - held[1])))
    found += [
        (f"{point[i] - held[i]:+.3f} {words}", True, float(point[i] - held[i]))
        for i, words in ((2, "mean accuracy"), (3, "A_min"))
        if abs(point[i] - held[i]) >= 5e-4
    ]
    return found


def _by_contribution(best: list[Row]) -> tuple[Row | None, str]:
    """The front row whose loss would shrink the hypervolume most."""
    reason = "fills the part of the front that no other trial reaches (largest hypervolume contribution)"
    if not any(not is_full(row) for row in best):
        return None, reason
    points = np.array([_normalised(row) for row in best])
    volume = np.asarray(moocore.hv_contributions(points, ref=REFERENCE, maximise=list(MAXIMISE)))
    volume[[is_full(row) for row in best]] = -1
    return best[int(volume.argmax())], reason


def _by_a_min(best: list[Row], rows: Sequence[Row]) -> tuple[Row | None, str]:
    """The front row with the best A_min among those that keep no more bytes than the plain compressor."""
    plain = plain_row(rows)
    if plain is None:
        return None, ""
    most = objectives(plain)
    assert most is not None
    within = [(point, row) for row in best if not is_full(row) and (point := objectives(row)) is not None and point[0] <= most[0]]
    row = max(within, key=lambda pair: (pair[0][3], pair[0][2], -pair[0][0]))[1] if within else None
    reason = f"has the best worst phase at no more KV bytes than {plain_name(plain)}"
    return row, f"{reason}, which nothing found so far beats" if row is plain else reason


def _by_achievement(best: list[Row], rho: float = 0.05) -> tuple[Row | None, str]:
    """The front row closest to the ideal point: least augmented Chebyshev distance, each axis scaled to the front's range."""
    reason = "is the most even compromise (closest to the ideal point by achievement scalarisation)"
    if not any(not is_full(row) for row in best):
        return None, reason
    loss = np.array([_normalised(row) for row in best]) * np.where(MAXIMISE, -1.0, 1.0)
    spread = np.ptp(loss, axis=0)
    distance = (loss - loss.min(axis=0)) / np.where(spread > 0, spread, 1.0)
    score = distance.max(axis=1) + rho * distance.sum(axis=1)
    score[[is_full(row) for row in best]] = np.inf
    return best[int(score.argmin())], reason


def _by_bytes(best: list[Row], plain: Row | None) -> tuple[Row | None, str]:
    """The front row of the fewest bytes whose A_min is no worse than the plain compressor's."""
    if plain is None:
        return None, ""
    within = [row for row in best if not is_full(row) and row.a_min is not None and plain.a_min is not None and row.a_min >= plain.a_min]
    row = min(within, key=lambda row: (row.cost.kv_kept if row.cost else 0.0, -(row.a_min or 0.0))) if within else None
    return row, f"keeps the fewest KV bytes at no worse a worst phase than {plain_name(plain)}"


def _by_mean(best: list[Row]) -> tuple[Row | None, str]:
    """The compressed front row of the best mean."""
    within = [row for row in best if not is_full(row)]
    return (
        max(within, key=lambda row: (row.mean_accuracy or 0.0, row.a_min or 0.0)) if within else None
    ), "has the best mean accuracy of all compressed trials"
