"""Figures of the search itself: hypervolume over trials, the space as parallel coordinates, importance of its parameters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import matplotlib.ticker as ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as MplPath
from numpy.typing import NDArray

from mitigate import pareto
from mitigate.report import space
from mitigate.report.figures import empty
from mitigate.report.progress import Progress, baseline_note
from mitigate.report.style import COLOURS, halo, new_figure, styled
from mitigate.rows import Row


def hypervolume(this: Progress, baselines: Sequence[Progress] = ()) -> Figure:
    """Hypervolume after each trial, over trials and over time spent in them, against the random baselines."""
    with styled():
        figure = new_figure(9.6, 3.9)
        if not any(this.volume):
            return empty(figure, figure.subplots())
        over_trials, over_time = figure.subplots(1, 2, sharey=True)
        in_hours = max(line.hours[-1] for line in (this, *baselines) if line.hours) >= 2
        ranked = sorted((this, *baselines), key=lambda line: -line.volume[-1] if line.volume else 0.0)
        for axes, name in ((over_trials, "trials"), (over_time, "hours")):
            for one in (*baselines, this):
                _draw_progress(axes, one, name, in_hours, own=one is this, label={len(ranked) - 1: "top", 0: "bottom"}.get(ranked.index(one), ""))
            axes.set_xlim(left=0)
        top = max(volume for line in (this, *baselines) for volume in line.volume)
        over_trials.set_ylim(0, 1.08 * top)
        if this.anchors and this.anchors < len(this.volume):
            over_trials.axvline(this.anchors, color=COLOURS["faint"], linewidth=1.0, linestyle=(0, (2, 3)), zorder=1)
            text = over_trials.annotate(
                f"anchors end: {this.anchors}", (this.anchors, 0), xytext=(4, 6), textcoords="offset points", fontsize=7.5, color=COLOURS["muted"]
            )
            text.set_path_effects(halo())
        over_trials.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=8))
        over_trials.set_xlabel("trials, infeasible ones counted")
        over_trials.set_ylabel("hypervolume of the front")
        over_time.set_xlabel(f"time spent in trials, summed over workers ({'h' if in_hours else 'min'})")
        lines = [Line2D([], [], color=COLOURS["blue"], linewidth=1.8, label=f"{this.name}{f' ({this.sampler})' if this.sampler else ''}")]
        if baselines:
            lines.append(Line2D([], [], color=COLOURS["orange"], linewidth=1.6, linestyle=(0, (4, 1.6)), label="random search"))
        figure.legend(handles=lines, loc="outside upper right", ncols=2)
        figure.suptitle("How fast the front was found", x=0.012, ha="left", fontsize=12, fontweight="bold")
        note = baseline_note(this, baselines)
        figure.supxlabel(note, x=0.012, ha="left", fontsize=8, color=COLOURS["muted"])
        return figure


def _draw_progress(axes: Axes, line: Progress, over: str, in_hours: bool, own: bool, label: str) -> None:
    """Steps that rise when a trial ends, with a dot at the last one; `label` is the alignment of the last value, empty for none."""
    if not line.volume:
        return
    x = list(range(1, len(line.volume) + 1)) if over == "trials" else [hours if in_hours else 60 * hours for hours in line.hours]
    colour = COLOURS["blue"] if own else COLOURS["orange"]
    dashes: Any = "-" if own else (0, (4, 1.6))
    axes.plot([0, *x], [0, *line.volume], drawstyle="steps-post", color=colour, linestyle=dashes, linewidth=1.8 if own else 1.5, zorder=3 + own)
    axes.plot([x[-1]], [line.volume[-1]], marker="o", markersize=5, color=colour, zorder=5)
    if label:
        offset = (0, 5 if label == "bottom" else -5)
        text = axes.annotate(f"{line.volume[-1]:.3f}", (x[-1], line.volume[-1]), xytext=offset, textcoords="offset points", fontsize=8, ha="right", va=label)
        text.set_path_effects(halo())


def parallel_coordinates(rows: Sequence[Row], choices: dict[str, Any] | None = None) -> Figure:
    """Each finished compressed trial as a line across the parameters, the front over the rest; the last two axes are what came of it."""
    with styled():
        found = space.parallel(rows, choices)
        if not found.names:
            figure = new_figure(7.0, 2.0)
            words = "No compressed trial has finished yet" if not found.rows else "No parameter varies among the finished trials"
            return empty(figure, figure.subplots(), words)
        ends = [_kept_axis(found.rows), _a_min_axis(found.rows)]
        height_NA = np.column_stack([found.height_NA, *[scaled for _, scaled, _ in ends]])
        tall = max(len(levels) for levels in found.levels)
        figure = new_figure(max(6.5, 1.12 * (len(found.names) + 2) + 0.8), min(6.2, 3.2 + 0.3 * tall))
        axes = figure.subplots()
        axes.set_axis_off()
        axes.set_xlim(-0.25, height_NA.shape[1] - 1 + 0.8)
        axes.set_ylim(-0.16, 1.28)
        many = len(found.rows) > 60
        for line, good in sorted(zip(height_NA, found.on_front, strict=True), key=lambda pair: pair[1]):
            strong, faint = (0.45, 0.35) if many else (0.75, 0.8)
            look = (COLOURS["blue"], strong, 1.1 if many else 1.5, 3) if good else (COLOURS["faint"], faint, 0.9, 2)
            colour, alpha, width, order = look
            axes.add_patch(PathPatch(_smooth(line), fill=False, edgecolor=colour, alpha=alpha, linewidth=width, zorder=order))
        for place, (name, levels) in enumerate(zip(found.names, found.levels, strict=True)):
            _draw_axis(axes, place, name.replace("_", "\n"))
            for level in levels:
                _tick(axes, place, level.height, level.name, f"{level.on_front} / {level.trials}")
        for place, (name, _, marks) in enumerate(ends, start=len(found.names)):
            _draw_axis(axes, place, name)
            for height, words in marks:
                _tick(axes, place, height, words)
        count = sum(found.on_front)
        lines = [
            Line2D([], [], color=COLOURS["blue"], linewidth=1.5, label=f"on the four-objective front ({count})"),
            Line2D([], [], color=COLOURS["faint"], linewidth=1.0, label=f"the rest ({len(found.rows) - count})"),
        ]
        axes.set_title("The search space: the front against the rest", fontsize=12, pad=24)
        axes.text(0.0, 1.0, "at each level: trials on the front / all trials there", transform=axes.transAxes, fontsize=8, color=COLOURS["muted"], va="bottom")
        axes.legend(handles=lines, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderpad=0)
        return figure


def _kept_axis(rows: Sequence[Row]) -> tuple[str, list[float], list[tuple[float, str]]]:
    """KV bytes kept on a log axis, fewest on top: name, heights, and marks at round values. What does not vary stands in the middle."""
    kept = np.array([100 * row.cost.kv_kept if row.cost else 100.0 for row in rows])
    low, high = float(kept.min()), float(kept.max())
    if high < (1 + 1e-4) * low:
        low, high = 0.8 * low, 1.25 * high

    def height(values: list[float]) -> list[float]:
        return [math.log(high / value) / math.log(high / low) for value in values]

    values = _round_within(low, high)
    return "KV kept", height(kept.tolist()), _apart([(at, f"{value:.10g} %") for at, value in zip(height(values), values, strict=True)])


def _a_min_axis(rows: Sequence[Row]) -> tuple[str, list[float], list[tuple[float, str]]]:
    """A_min from 0 to the first round value that nothing exceeds."""
    worst = np.array([row.a_min or 0.0 for row in rows])
    values = _round_around(0.0, float(worst.max()) or 1.0)
    return "A_min", (worst / values[-1]).tolist(), [(value / values[-1], f"{value:.10g}") for value in values]


def _round_around(low: float, high: float) -> list[float]:
    """Evenly spaced round values, at most six steps, the first not above `low` and the last not below `high`."""
    return [float(value) for value in ticker.MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)]


def _round_within(low: float, high: float) -> list[float]:
    """Round values from `low` to `high`, both above 0: 1, 2 and 5 of each decade where there are three of them, else evenly spaced ones."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for values in ([times * 10.0**decade for decade in decades for times in (1, 2, 5)], _round_around(low, high)):
        within = [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(within) >= 3:
            break
    return within


def _apart(marks: list[tuple[float, str]], least: float = 0.07) -> list[tuple[float, str]]:
    """The marks less those too close to one before."""
    kept: list[tuple[float, str]] = []
    for mark in sorted(marks):
        if not kept or mark[0] - kept[-1][0] >= least:
            kept.append(mark)
    return kept


def _smooth(heights: NDArray[np.float64]) -> MplPath:
    """The line through the heights, level at each axis, so that it can be followed across."""
    points, codes = [(0.0, float(heights[0]))], [MplPath.MOVETO]
    for place, (a, b) in enumerate(itertools.pairwise(heights.tolist())):
        points += [(place + 0.45, a), (place + 0.55, b), (place + 1.0, b)]
        codes += [MplPath.CURVE4] * 3
    return MplPath(points, codes)


def _draw_axis(axes: Axes, place: int, name: str) -> None:
    axes.plot([place, place], [-0.14, 1.14], color=COLOURS["ink"], linewidth=0.9, zorder=4)
    axes.text(place, 1.17, name, ha="center", va="bottom", fontsize=8.5, fontweight="bold", linespacing=1.0)


def _tick(axes: Axes, place: int, height: float, words: str, below: str = "") -> None:
    axes.plot([place], [height], marker="_", markersize=7, color=COLOURS["ink"], markeredgewidth=1.1, zorder=5)
    label = axes.annotate(words, (place, height), xytext=(6, 0.5 if below else -3), textcoords="offset points", fontsize=8, zorder=6)
    label.set_path_effects(halo())
    if below:
        small = axes.annotate(below, (place, height), xytext=(6, -8), textcoords="offset points", fontsize=7, color=COLOURS["muted"], zorder=6)
        small.set_path_effects(halo())


_TITLES = ("KV bytes (log)", "throughput", "mean accuracy", "A_min")


def importance(rows: Sequence[Row], choices: dict[str, Any] | None = None) -> Figure:
    """Share of each objective's variance that each parameter explains alone, a panel an objective, with what chance reaches."""
    with styled():
        found = space.importances(rows, choices)
        if not found:
            figure = new_figure(7.0, 2.0)
            return empty(figure, figure.subplots(), space.importance_note(rows, found))
        by_name: dict[str, list[space.Importance]] = {}
        for one in found:
            by_name.setdefault(one.parameter, []).append(one)
        names = sorted(by_name, key=lambda name: by_name[name][3].share)
        figure = new_figure(10.4, 1.75 + 0.3 * len(names))
        panels = figure.subplots(1, len(pareto.OBJECTIVES), sharey=True, sharex=True)
        for place, axes in enumerate(panels):
            shown = [by_name[name][place] for name in names]
            colours = [COLOURS["blue"] if one.beyond_chance else COLOURS["faint"] for one in shown]
            axes.barh(range(len(names)), [one.share for one in shown], height=0.62, color=colours, zorder=2)
            for line, one in enumerate(shown):
                axes.plot([one.threshold] * 2, [line - 0.42, line + 0.42], color=COLOURS["ink"], linewidth=1.3, zorder=3)
            axes.set_title(_TITLES[place])
            axes.set_xlim(0, 1)
            axes.xaxis.set_major_locator(ticker.FixedLocator([0, 0.5, 1]))
            axes.grid(axis="y", visible=False)
        panels[0].set_yticks(range(len(names)), [f"{name.replace('_', ' ')} ({by_name[name][0].levels} levels)" for name in names])
        panels[0].tick_params(axis="y", labelcolor=COLOURS["ink"], labelsize=8.5)
        figure.supxlabel("share of the objective's variance between the parameter's levels (eta squared)", fontsize=9)
        figure.suptitle("What each parameter explains alone", x=0.012, ha="left", fontsize=12, fontweight="bold")
        entries: list[Line2D | Patch] = [
            Patch(color=COLOURS["blue"], linewidth=0, label="beyond chance"),
            Patch(color=COLOURS["faint"], linewidth=0, label="chance does as much"),
            Line2D([], [], marker="|", linestyle="", markersize=10, markeredgewidth=1.4, color=COLOURS["ink"], label="what chance reaches in 1 study of 20"),
        ]
        figure.legend(handles=entries, loc="outside upper right", ncols=3, columnspacing=1.0, handletextpad=0.5)
        return figure
