"""Chosen trials as the search saw them and as fresh seeds see them: a table and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from mitigate import rescored
from mitigate.report import data, figures, style, tables
from mitigate.rescored import Rescored


def text(found: Sequence[Rescored]) -> str:
    """A line per trial, fewest KV bytes first, and what luck there was in the choice."""
    if not found:
        return "Nothing is re-scored yet."
    head = ["", "trial", "label", "KV kept", "mean: chosen", "fresh [95 %]", "A_min: chosen", "fresh [95 %]", "P(front)"]
    lines = tables.aligned([head, *(_cells(one) for one in _by_bytes(found))])
    lines[1:1] = ["─" * len(lines[0])]
    return "\n".join([*lines, "", *tables.wrapped(luck_line(found))])


def luck_line(found: Sequence[Rescored]) -> str:
    """How much the chosen trials' A_min falls on fresh seeds, in a sentence or two."""
    seeds = sorted({len(one.fresh) for one in found})
    counted = f"{seeds[0]} fresh seeds" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} fresh seeds"
    intervals = "Intervals are t-intervals over seeds." if seeds[0] > 1 else "Intervals of trials with one seed are that seed's own."
    luck = rescored.luck(found)
    if luck is None:
        return f"{counted} (of fine-tuning and of prompts). {intervals}"
    direction = "lower" if luck.value > 0 else "higher"
    size = f"{abs(luck.value):.3f} {direction} than when it was chosen (95 % of the mean over trials: {luck.low:+.3f} to {luck.high:+.3f})"
    return f"{counted} (of fine-tuning and of prompts). On them A_min is on average {size}. {intervals}"


def _cells(one: Rescored) -> list[str]:
    row = one.selected
    assert row.cost is not None
    cells = [str(row.trial), row.label, data.percent(row.cost.kv_kept), f"{row.mean_accuracy:.3f}", data.bracket(one.mean)]
    return ["", *cells, f"{row.a_min:.3f}", data.bracket(one.a_min), f"{one.probability:.2f}"]


def _by_bytes(found: Sequence[Rescored]) -> list[Rescored]:
    return sorted(found, key=lambda one: (one.selected.cost.kv_kept if one.selected.cost else 0.0, -one.a_min.value))


def figure(found: Sequence[Rescored]) -> Figure:
    """A_min of each trial when it was chosen, under each fresh seed, and their mean with its interval; fewest KV bytes on top."""
    ordered = _by_bytes(found)
    with style.styled():
        drawn = style.new_figure(9.6, 1.7 + 0.36 * max(len(ordered), 2))
        axes = drawn.subplots()
        if not ordered:
            return figures.empty(drawn, axes, "No trial has been re-scored on fresh seeds: mitigate rescore STUDY")
        blue, orange = style.COLOURS["blue"], style.COLOURS["orange"]
        for place, one in enumerate(ordered):
            first = place == 0
            axes.plot(
                [one.a_min.low, one.a_min.high], [place, place], color=blue, linewidth=1.6, alpha=0.45, label="95 % interval of the mean" if first else None
            )
            each = [row.a_min or 0.0 for row in one.fresh]
            axes.plot(each, [place] * len(each), "o", color=blue, markersize=3.6, alpha=0.7, label="each fresh seed" if first else None)
            axes.plot([one.a_min.value], [place], "|", color=blue, markersize=13, markeredgewidth=2.2, label="mean of fresh seeds" if first else None)
            look: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": orange, "markeredgewidth": 1.8, "markersize": 7}
            axes.plot([one.selected.a_min or 0.0], [place], "D", label="when chosen" if first else None, **look)
        axes.set_yticks(range(len(ordered)), [_name(one) for one in ordered])
        axes.set_ylim(len(ordered) - 0.4, -0.6)
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("worst-phase accuracy A_min (fraction of queries)")
        drawn.suptitle("The chosen trials on fresh seeds", x=0.012, ha="left", fontsize=12, fontweight="bold")
        drawn.legend(loc="outside lower right", ncols=4)
        return drawn


def _name(one: Rescored) -> str:
    row = one.selected
    kept = data.percent(row.cost.kv_kept) if row.cost else ""
    label = row.label if len(row.label) <= 44 else f"{row.label[:43]}…"
    return f"{label}, trial {row.trial} ({kept})"
