"""What the figures and tables show, as plain data: no drawing here, and no arithmetic in the drawing."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mitigate import pareto
from mitigate.config import VariantConfig, to_dict
from mitigate.rows import Interval, ProtocolScore, Row

Role = Literal["full", "plain", "front", "dominated"]

PROTOCOL_WORDS = {"outer": "outer padding", "in_sequence": "in-sequence padding"}


@dataclass(frozen=True, kw_only=True)
class Point:
    """A finished trial among the objectives. `axes` are KV bytes kept, throughput ratio, mean accuracy and A_min, each with its interval."""

    row: Row
    role: Role
    on_front: bool
    axes: tuple[Interval, Interval, Interval, Interval]

    @property
    def kept(self) -> float:
        """KV bytes kept, a fraction of full attention's."""
        return self.axes[0].value


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Accuracy against residue under one protocol; every list has `period` entries."""

    protocol: str
    accuracy: list[float]
    low: list[float]
    high: list[float]
    worst: int
    flat: bool

    @property
    def residues(self) -> list[int]:
        """0 … P-1."""
        return list(range(len(self.accuracy)))


def points(rows: Sequence[Row]) -> list[Point]:
    """The finished rows in the order given."""
    on_front = {id(row) for row in pareto.front(rows)}
    plain, full = pareto.plain_row(rows), pareto.full_row(rows)
    found = []
    for row in rows:
        four = pareto.intervals(row)
        if four is None or row.cost is None:
            continue
        kept = Interval(value=row.cost.kv_kept, low=row.cost.kv_kept, high=row.cost.kv_kept)
        role: Role = "full" if row is full else "plain" if row is plain else "front" if id(row) in on_front else "dominated"
        found.append(Point(row=row, role=role, on_front=id(row) in on_front, axes=(kept, *four[1:])))
    return found


def curves(row: Row) -> list[Curve]:
    """The sweeps of a row, outer padding first."""
    scores = sorted(row.scores, key=lambda score: list(PROTOCOL_WORDS).index(score.protocol))
    return [
        Curve(
            protocol=score.protocol,
            accuracy=score.accuracy,
            low=score.accuracy_low,
            high=score.accuracy_high,
            worst=score.worst_residue,
            flat=max(score.accuracy, default=0.0) == min(score.accuracy, default=0.0),
        )
        for score in scores
    ]


def stairs(x: Sequence[float], y: Sequence[float], x_min: bool, y_min: bool = False) -> list[int]:
    """Indices of the two-objective front, by x. `x_min` and `y_min` say which axis is better when small."""
    if not len(x):
        return []
    mask = pareto.non_dominated(np.column_stack([x, y]), maximise=(not x_min, not y_min))
    return sorted((int(i) for i in np.flatnonzero(mask)), key=lambda i: x[i])


def spread_sideways(kept: Sequence[float], rank: Sequence[float], step: float = 0.075, room: float = 0.3) -> list[float]:
    """Where to draw points of equal KV bytes on a log axis: the best `rank` stays in place, the others alternate right and left.

    `step` is in octaves; a group stays within `room` octaves, and clear of the neighbouring group.
    """
    levels = sorted({round(math.log2(k), 6) for k in kept if k > 0})
    nearest = min((b - a for a, b in itertools.pairwise(levels)), default=1.0)
    room, shown = min(room, 0.7 * nearest), [0.0] * len(kept)
    for level in levels:
        group = [i for i, k in enumerate(kept) if k > 0 and round(math.log2(k), 6) == level]
        group.sort(key=lambda i: -rank[i])
        pitch = min(step, room / max(len(group) - 1, 1))
        for place, i in enumerate(group):
            shown[i] = kept[i] * 2 ** (pitch * ((place + 1) // 2) * (1 if place % 2 else -1))
    return shown


def shown_rows(rows: Sequence[Row], limit: int = 12) -> list[Row]:
    """Rows worth a panel: full attention, plain, the candidates, then the front by A_min; at most `limit`, and in that order of reading."""
    first = [row for row in (pareto.full_row(rows), pareto.plain_row(rows)) if row is not None]
    rest = [knee.row for knee in pareto.knees(rows)]
    rest += sorted(pareto.front(rows), key=lambda row: -(row.a_min or 0.0))
    for row in rest:
        if len(first) < limit and not any(row is other for other in first):
            first.append(row)
    head = [row for row in first if row.scores and (pareto.is_full(row) or row is pareto.plain_row(rows))]
    tail = [row for row in first if row.scores and not any(row is other for other in head)]
    return head + sorted(tail, key=by_cost)


def by_cost(row: Row) -> tuple[float, float]:
    """Sort key: fewest KV bytes first, then the best worst phase."""
    return (row.cost.kv_bytes_per_token if row.cost else math.inf, -(row.a_min or 0.0))


def named(row: Row, width: int = 28) -> str:
    """'w16s8 #3', the label cut to `width` characters."""
    label = " ".join(row.label.split())
    label = label if len(label) <= width else f"{label[: width - 1]}…"
    return f"{label} #{row.trial}" if row.trial is not None else label


def variant_words(variant: dict[str, Any]) -> str:
    """'window 16, stride 8, stagger half': window, stride, and what is not at its default."""
    if variant.get("compress") is False:
        return "full attention, nothing compressed"
    defaults = to_dict(VariantConfig())
    changed = [name for name, value in variant.items() if name not in ("compress", "window", "stride") and defaults.get(name) != value]
    return ", ".join(f"{name.replace('_', ' ')} {variant.get(name)}" for name in ("window", "stride", *changed))


def standing(row: Row, rows: Sequence[Row]) -> str:
    """Whether a trial is on the front of all rows, else which trials dominate it."""
    point = pareto.objectives(row)
    if point is None:
        return f"{row.status}: no metrics" + (f" ({row.error.kind}: {' '.join(row.error.message.split())})" if row.error else "")
    if any(row is other for other in pareto.front(rows)):
        return "on the four-objective front"
    above = [other for other in rows if other is not row and pareto.dominates(other, row)]
    shown = ", ".join(named(other) for other in above[:3])
    if not above:
        return "level in all four objectives with a trial on the front"
    return f"dominated by {shown}{f' and {len(above) - 3} more' if len(above) > 3 else ''}"


def mean_interval(row: Row) -> Interval | None:
    """Mean accuracy with its interval."""
    four = pareto.intervals(row)
    return four[2] if four else None


def a_min_interval(row: Row) -> Interval | None:
    """A_min with its interval."""
    four = pareto.intervals(row)
    return four[3] if four else None


def percent(fraction: float) -> str:
    """'12.5 %'."""
    return f"{100 * fraction:.3g} %"


def bracket(interval: Interval | None) -> str:
    """'0.284 [0.26, 0.31]'."""
    return "-" if interval is None else f"{interval.value:.3f} [{interval.low:.2f}, {interval.high:.2f}]"


def sample_line(rows: Sequence[Row]) -> str:
    """What stands behind the intervals, in a sentence."""
    scores: list[ProtocolScore] = [score for row in rows if row.status != "stopped" for score in row.scores]
    if not scores:
        return "No phase sweep yet."
    prompts, periods = _range({score.clusters for score in scores}), _range({score.period for score in scores})
    queries = _range({n for score in scores for n in score.n})
    protocols = " and ".join(words for name, words in PROTOCOL_WORDS.items() if any(score.protocol == name for score in scores))
    lower = "A_min: the lower protocol." if len({score.protocol for score in scores}) > 1 else "One protocol only: A_min may be lower under the other."
    return f"Accuracy: {prompts} prompts, {queries} scored queries at each of {periods} residues; {protocols}. 95 % intervals by prompt. {lower}"


def period_line(row: Row) -> str:
    """What the phase curves say about their period, in one sentence; empty where nothing was searched."""
    if row.curve is None:
        return ""
    residues = min(score.period for score in row.scores)
    within = f"among the divisors of {residues} below it" if row.curve.searched else f"within {residues} residues"
    if row.curve.status == "detected":
        return f"Period: {row.curve.period} (p = {row.curve.p_value:.2g})."
    return f"Period: {row.curve.status} {within} (best p = {row.curve.p_value:.2g})."


def _range(values: set[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def nothing_finished(rows: Sequence[Row]) -> str:
    """Why there is nothing to show: no trial is done, or all of them are infeasible, by kind of error."""
    kinds = Counter(row.error.kind for row in rows if row.error is not None)
    if not kinds:
        return "No trial has finished with metrics yet."
    counted = ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common())
    return f"No trial has metrics: {kinds.total()} infeasible ({counted})."


def left_out_line(rows: Sequence[Row]) -> str:
    """How many trials a front leaves out because they are not finished, and why; empty if none."""
    states = Counter[str](row.status for row in rows)
    words = {"stopped": "stopped at a rung", "infeasible": "infeasible"}
    parts = [f"{states[status]} {said}" for status, said in words.items() if states[status]]
    return f"Not finished, and left out: {', '.join(parts)}; trials.csv has them." if parts else ""


def headlines(rows: Sequence[Row]) -> list[str]:
    """What the study says so far, each sentence computed from the rows, the worst phase beside every mean."""
    finished = [row for row in rows if pareto.objectives(row) is not None]
    if not finished:
        return [nothing_finished(rows)]
    left_out = Counter(row.status for row in rows if row.status != "ok")
    best = len(pareto.front(rows))
    count = f"{best} of {len(finished)} finished trials {'is' if best == 1 else 'are'} on the four-objective front"
    words = {"stopped": "stopped at a rung", "infeasible": "infeasible"}
    more = [f"{n} more {'was' if n == 1 else 'were'} {words[status]}" for status, n in sorted(left_out.items(), reverse=True)]
    lines = ["; ".join([count, *more]) + "."]
    full, plain = pareto.full_row(rows), pareto.plain_row(rows)
    if full is not None:
        lines.append(f"Full attention: mean accuracy {bracket(mean_interval(full))}, worst phase {bracket(a_min_interval(full))}.")
    if plain is not None and plain.cost is not None:
        name = pareto.plain_name(plain)
        lines.append(
            f"{name[0].upper()}{name[1:]} keeps {percent(plain.cost.kv_kept)} of the KV bytes: mean accuracy {bracket(mean_interval(plain))}, "
            f"but {bracket(a_min_interval(plain))} at its worst phase."
        )
        lines.append(_best_within(finished, plain))
    return lines


def _best_within(finished: Sequence[Row], plain: Row) -> str:
    within = [row for row in finished if not pareto.is_full(row) and by_cost(row)[0] <= by_cost(plain)[0]]
    best = max(within, key=lambda row: (row.a_min or 0.0, row.mean_accuracy or 0.0))
    if best is plain:
        return f"No trial at no more bytes has a better worst phase than {pareto.plain_name(plain)}."
    high, low = a_min_interval(plain), a_min_interval(best)
    assert high is not None and low is not None
    verdict = "the worst-phase intervals do not overlap" if low.low > high.high else "the worst-phase intervals overlap, so this may be chance"
    found = f"Best worst phase of {len(within)} trials at no more bytes: {named(best)} with {bracket(low)}"
    return f"{found}, mean accuracy {bracket(mean_interval(best))}; {verdict}."
