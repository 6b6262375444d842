"""The figures. Each function takes rows and gives a finished `Figure`; `style.png` and `style.svg` save it.

Whatever the rows hold (none, one, hundreds, failures, one protocol), a figure comes out, and says what is missing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import matplotlib.ticker as ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from mitigate import pareto
from mitigate.report import data
from mitigate.report.labels import Label, Segment, place
from mitigate.report.style import COLOURS, halo, new_figure, styled
from mitigate.rows import Row

MANY = 40  # beyond this number of trials only the named ones keep their bars
MOST_LABELS = 16

_LOOKS: dict[str, tuple[str, float, str, bool]] = {  # role -> marker, size, colour, filled
    "full": ("D", 6.5, COLOURS["ink"], True),
    "plain": ("s", 7.0, COLOURS["vermillion"], True),
    "front": ("o", 6.5, COLOURS["blue"], True),
    "dominated": ("o", 4.5, COLOURS["faint"], False),
}
_LINES: dict[str, tuple[Any, str, str]] = {"outer": ("-", COLOURS["blue"], "o"), "in_sequence": ((0, (4, 1.6)), COLOURS["orange"], "D")}


def a_min_vs_kv(rows: Sequence[Row]) -> Figure:
    """A_min against KV bytes kept: intervals, the two-objective front as steps, and each trial's mean above its worst phase."""
    with styled():
        figure = new_figure(9.6, 5.8)
        axes = figure.subplots()
        points = data.points(rows)
        if not points:
            return empty(figure, axes)
        xs = data.spread_sideways([p.kept for p in points], [p.axes[3].value + 2 * (p.role != "dominated") for p in points])
        strong = [(x, p) for x, p in zip(xs, points, strict=True) if p.role != "dominated"]
        best = _draw_steps(axes, points)
        needed = _most_telling(points, [points[i] for i in best], fill=False)
        place_of = {id(row): place for place, row in enumerate(rows)}
        for x, point in zip(xs, points, strict=True):
            _draw_lollipop(axes, x, point, place_of[id(point.row)], bars=len(points) <= MANY or any(point is other for other in needed))
        _kv_axis(axes, [p.kept for p in points])
        axes.set_ylim(0, 1.04)
        axes.set_ylabel("accuracy (fraction of queries)")
        axes.set_title("Worst-phase accuracy against KV bytes kept", fontsize=12, pad=40)
        _headline_legend(axes, points)
        _freeze(figure)
        where = {id(point): x for x, point in strong}
        extra = [p for p in _most_telling(points, needed) if not any(p is other for other in needed)]
        chosen = [(p, p in extra) for p in [*needed, *extra] if id(p) in where]
        labels = [_label(where[id(p)], p.axes[3].value, p, data.named(p.row, 30), optional) for p, optional in chosen]
        stems: list[Segment] = [((x, min(p.axes[3].low, p.axes[3].value)), (x, p.axes[2].value)) for x, p in strong]
        marks = [(x, p.axes[i].value) for x, p in strong for i in (2, 3)]
        place(axes, labels, marks, [*stems, *_segments([points[i] for i in best], 0, 3)])
        return figure


def _segments(stair: Sequence[data.Point], a: int, b: int) -> list[Segment]:
    """The level and upright pieces of a step line through points ordered along axis `a`; it rises late on a minimised axis."""
    found: list[Segment] = []
    for left, right in itertools.pairwise(stair):
        x0, y0, x1, y1 = left.axes[a].value, left.axes[b].value, right.axes[a].value, right.axes[b].value
        corner = (x1, y0) if not pareto.MAXIMISE[a] else (x0, y1)
        found += [((x0, y0), corner), (corner, (x1, y1))]
    return found


def _draw_lollipop(axes: Axes, x: float, point: data.Point, number: int, bars: bool) -> None:
    """A_min with its interval, strong; the mean as a short faint dash, joined by a thin stem. The mark is the SVG group `pick-<number>`."""
    marker, size, colour, filled = _LOOKS[point.role]
    worst, mean, strong = point.axes[3], point.axes[2], point.role != "dominated"
    if bars:  # in a crowd only the named ones have room for them
        axes.plot([x, x], [worst.value, mean.value], color=colour, linewidth=0.8, alpha=0.45 if strong else 0.3, zorder=2)
        axes.plot([x], [mean.value], marker="_", markersize=8, markeredgewidth=1.4, color=colour, alpha=0.7 if strong else 0.5, zorder=3)
        axes.plot([x, x], [worst.low, worst.high], color=colour, linewidth=2.2, alpha=0.9 if strong else 0.45, solid_capstyle="butt", zorder=3)
    face = colour if filled else COLOURS["surface"]
    edge, size = 1.4 if strong else 0.9, size if bars else 0.75 * size
    look: dict[str, Any] = {"marker": marker, "markersize": size, "markerfacecolor": face, "markeredgecolor": colour, "markeredgewidth": edge}
    axes.plot([x], [worst.value], **look, zorder=5 if strong else 4, gid=f"pick-{number}")


def _draw_steps(axes: Axes, points: list[data.Point]) -> list[int]:
    """The best A_min that at most so many bytes buy; gives the indices of the points on it."""
    kept, worst = [p.kept for p in points], [p.axes[3].value for p in points]
    best = data.stairs(kept, worst, x_min=True)
    x, y = [kept[i] for i in best], [worst[i] for i in best]
    axes.plot([*x, max(1.0, *kept)], [*y, y[-1]], drawstyle="steps-post", color=COLOURS["blue"], linewidth=1.3, alpha=0.55, zorder=1.5)
    return best


_FRACTIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)


def _kv_axis(axes: Axes, kept: Sequence[float], fractions: Sequence[int] = _FRACTIONS) -> None:
    """Log2 axis in percent of full attention, with a tick at 1/n for every n of `fractions`."""
    low, high = min(kept), max(1.0, *kept)
    axes.set_xscale("log", base=2)
    axes.set_xlim(low / 1.28, high * 1.28)
    ticks = [1 / n for n in fractions if low / 1.1 <= 1 / n <= high * 1.01]
    axes.xaxis.set_major_locator(ticker.FixedLocator(ticks))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{100 * value:.3g}"))
    axes.set_xlabel("KV bytes kept, % of full attention (log scale; trials of equal bytes are set side by side)")


def _headline_legend(axes: Axes, points: list[data.Point]) -> None:
    shown = {point.role for point in points}
    entries = [_marker_entry(role, _role_words(role, points)) for role in _LOOKS if role in shown]
    entries += [
        Line2D([], [], color=COLOURS["blue"], linewidth=1.3, alpha=0.55, label="best A_min for the bytes"),
        Line2D([], [], marker="|", linestyle="", markersize=10, markeredgewidth=2.2, color=COLOURS["muted"], label="95 % interval of A_min"),
        Line2D([], [], marker="_", linestyle="", markersize=9, markeredgewidth=1.4, color=COLOURS["muted"], label="mean accuracy"),
    ]
    spacing = {"columnspacing": 1.2, "handletextpad": 0.4, "borderpad": 0}
    legend = axes.legend(handles=entries, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=math.ceil(len(entries) / 2), fontsize=7.6, **spacing)
    legend.set_in_layout(False)


def _marker_entry(role: str, words: str) -> Line2D:
    marker, size, colour, filled = _LOOKS[role]
    face = colour if filled else COLOURS["surface"]
    return Line2D([], [], linestyle="", marker=marker, markersize=size, markerfacecolor=face, markeredgecolor=colour, label=words)


def _role_words(role: str, points: Sequence[data.Point]) -> str:
    if role == "plain":
        return pareto.plain_name(next(point.row for point in points if point.role == "plain"))
    return {"full": "full attention", "front": "on the four-objective front", "dominated": "dominated"}[role]


def front_matrix(rows: Sequence[Row]) -> Figure:
    """The four objectives in pairs: every trial, the four-objective front with intervals, and in each panel that pair's own front as steps."""
    with styled():
        figure = new_figure(11.0, 9.6)
        grid = figure.subplots(3, 3, sharex="col", sharey="row", squeeze=False)
        points = data.points(rows)
        if not points:
            figure.clear()
            return empty(figure, figure.subplots())
        numbered = _most_telling(points, [])
        for i in range(3):
            for j in range(3):
                if j <= i:
                    _draw_pair(grid[i][j], points, numbered, j, i + 1, first_column=j == 0, last_line=i == 2)
                elif (i, j) != (0, 1):
                    grid[i][j].remove()
        _matrix_key(grid[0][1], numbered, points)
        figure.suptitle("Four objectives in pairs", x=0.012, ha="left", fontsize=12, fontweight="bold")
        _freeze(figure)
        for i in range(3):
            for j in range(i + 1):
                _number_pair(grid[i][j], points, numbered, j, i + 1)
        return figure


def _draw_pair(axes: Axes, points: list[data.Point], numbered: list[data.Point], a: int, b: int, first_column: bool, last_line: bool) -> None:
    x, y = [p.axes[a].value for p in points], [p.axes[b].value for p in points]
    best = data.stairs(x, y, x_min=not pareto.MAXIMISE[a], y_min=not pareto.MAXIMISE[b])
    steps = "steps-post" if not pareto.MAXIMISE[a] else "steps-pre"
    axes.plot([x[i] for i in best], [y[i] for i in best], drawstyle=steps, color=COLOURS["blue"], linewidth=1.1, alpha=0.5, zorder=1.5)
    if (a, b) == (2, 3):
        axes.plot([0, 1], [0, 1], linestyle=(0, (2, 3)), color=COLOURS["faint"], linewidth=1.0, zorder=1)
        axes.annotate("no gap", (0.24, 0.24), xytext=(-6, 4), textcoords="offset points", fontsize=7.5, color=COLOURS["muted"], ha="right")
    for spot, point in zip(_places(points, a, b), points, strict=True):
        _draw_cross(axes, spot, point, a, b, bars=len(points) <= MANY or any(point is other for other in numbered))
    if a == 0:
        _kv_axis(axes, x, (1, 2, 4, 8, 16, 32, 64, 128, 256))
    if b >= 2:
        axes.set_ylim(0, 1.06)
    if a >= 2:
        axes.set_xlim(0, 1.06)
    axes.set_xlabel(("KV bytes kept, % of full attention (log)", *_AXES)[a] if last_line else "")
    axes.set_ylabel(("", *_AXES)[b] if first_column else "")
    axes.tick_params(labelbottom=last_line, labelleft=first_column)


_AXES = ("decode throughput relative to full attention", "mean accuracy (fraction)", "A_min, worst phase (fraction)")


def _places(points: list[data.Point], a: int, b: int) -> list[float]:
    """Where the points stand along axis `a`: at their value, but side by side where KV bytes are equal."""
    values = [p.axes[a].value for p in points]
    return values if a else data.spread_sideways(values, [p.axes[b].value for p in points], step=0.14)


def _draw_cross(axes: Axes, spot: float, point: data.Point, a: int, b: int, bars: bool) -> None:
    marker, size, colour, filled = _LOOKS[point.role]
    strong, x, y = point.role != "dominated", point.axes[a], point.axes[b]
    if strong and bars:
        axes.plot([spot, spot], [y.low, y.high], color=colour, linewidth=1.2, alpha=0.55, zorder=3)
        axes.plot([x.low + spot - x.value, x.high + spot - x.value], [y.value, y.value], color=colour, linewidth=1.2, alpha=0.55, zorder=3)
    face, size = colour if filled else COLOURS["surface"], size * (0.8 if bars else 0.6)
    axes.plot([spot], [y.value], marker=marker, markersize=size, markerfacecolor=face, markeredgecolor=colour, zorder=5 if strong else 2)


def _matrix_key(axes: Axes, numbered: list[data.Point], points: list[data.Point]) -> None:
    """The legend, in the empty corner: roles first, then the numbers used in the panels."""
    axes.set_axis_off()
    roles = [_marker_entry(role, _role_words(role, points)) for role in _LOOKS if any(p.role == role for p in points)]
    roles.append(Line2D([], [], color=COLOURS["blue"], linewidth=1.1, alpha=0.5, label="front of this pair alone"))
    whose = "" if len(points) <= MANY else ", of the numbered trials"
    roles.append(Line2D([], [], marker="+", linestyle="", markersize=9, color=COLOURS["muted"], label=f"95 % intervals (throughput: quartiles){whose}"))
    legend = axes.legend(handles=roles, loc="upper left", bbox_to_anchor=(0.0, 1.0), borderpad=0)
    note = axes.text(0.02, 0.02, "Trials of equal KV bytes stand side by side.", transform=axes.transAxes, fontsize=8, color=COLOURS["muted"])
    legend.set_in_layout(False)
    note.set_in_layout(False)
    ordered = sorted(numbered, key=lambda p: p.row.trial or 0)
    rest = sum(p.on_front for p in points) - sum(p.on_front for p in numbered)
    numbers = ["trial", *[_number(p) for p in ordered], *(["+"] if rest > 0 else [])]
    words = ["", *[data.named(p.row, 38).rsplit(" #", 1)[0] for p in ordered], *([f"{rest} more on the front"] if rest > 0 else [])]
    for x, align, lines in ((1.2, "right", numbers), (1.24, "left", words)):
        text = axes.text(x, 1.0, "\n".join(lines), transform=axes.transAxes, va="top", ha=align, multialignment=align, fontsize=8, linespacing=1.5)
        text.set_in_layout(False)


def _number(point: data.Point) -> str:
    return "-" if point.row.trial is None else str(point.row.trial)


def _number_pair(axes: Axes, points: list[data.Point], numbered: list[data.Point], a: int, b: int) -> None:
    x, y = [p.axes[a].value for p in points], [p.axes[b].value for p in points]
    best = data.stairs(x, y, x_min=not pareto.MAXIMISE[a], y_min=not pareto.MAXIMISE[b])
    where = dict(zip(map(id, points), _places(points, a, b), strict=True))
    labels = [_label(where[id(p)], p.axes[b].value, p, _number(p)) for p in numbered]
    marks = [(where[id(p)], p.axes[b].value) for p in points if p.role != "dominated"]
    place(axes, labels, marks, _segments([points[i] for i in best], a, b), size=7.5)


_RESIDUE_AXIS = "residue of the queried record's position, t mod P (tokens; labelled once per stride where that fits)"


def phase_curves(rows: Sequence[Row], limit: int = 12) -> Figure:
    """Accuracy against residue, a panel each for full attention, plain, the candidates and the best of the front; at most `limit` panels."""
    with styled():
        shown = data.shown_rows(rows, limit)
        across = min(3, max(1, len(shown)))
        down = max(1, math.ceil(len(shown) / across))
        figure = new_figure(max(3.7 * across, 6.4), 2.55 * down + 0.9)
        grid = figure.subplots(down, across, sharey=True, squeeze=False)
        if not shown:
            return empty(figure, grid[0][0])
        references = [row for row in (pareto.full_row(rows), pareto.plain_row(rows)) if row is not None]
        for spot, axes in enumerate(grid.flat):
            if spot >= len(shown):
                axes.remove()
                continue
            _draw_curves(axes, shown[spot], references)
            _panel_title(axes, shown[spot])
        for line in grid:
            line[0].set_ylabel("accuracy")
        total = sum(1 for row in rows if row.scores)
        words = "Accuracy by phase" + (f" ({len(shown)} of {total} trials)" if total > len(shown) else "")
        figure.suptitle(words, x=0.012, ha="left", fontsize=12, fontweight="bold")
        figure.supxlabel(_RESIDUE_AXIS, fontsize=9)
        _curves_legend(figure, shown, references)
        _freeze(figure)
        return figure


def phase_curve(row: Row, references: Sequence[Row] = ()) -> Figure:
    """One row's accuracy against residue, with the curves of `references` in grey."""
    with styled():
        figure = new_figure(8.0, 4.4)
        axes = figure.subplots()
        if not row.scores:
            return empty(figure, axes, f"{data.named(row)}: no phase sweep")
        _draw_curves(axes, row, references)
        _panel_title(axes, row, size=11)
        axes.set_xlabel(_RESIDUE_AXIS)
        axes.set_ylabel("accuracy")
        _curves_legend(figure, [row], [other for other in references if other is not row])
        _freeze(figure)
        return figure


def _draw_curves(axes: Axes, row: Row, references: Sequence[Row]) -> None:
    for other in references:
        if other is not row:
            for curve in data.curves(other):
                style = ":" if pareto.is_full(other) else _LINES[curve.protocol][0]
                axes.plot(curve.residues, curve.accuracy, linestyle=style, color=COLOURS["faint"], linewidth=1.1, zorder=1.5)
    found = data.curves(row)
    for curve in found:
        style, colour, marker = _LINES[curve.protocol]
        axes.fill_between(curve.residues, curve.low, curve.high, color=colour, alpha=0.2, linewidth=0, zorder=2)
        axes.plot(curve.residues, curve.accuracy, linestyle=style, color=colour, linewidth=1.6, marker=marker, markersize=2.2, zorder=3)
        if not curve.flat:
            lower = [other.accuracy[other.worst] for other in found if other.worst == curve.worst and not other.flat]
            _mark_worst(axes, curve, numbered=curve.accuracy[curve.worst] == min(lower))
    period = max(len(curve.accuracy) for curve in found)
    axes.set_xlim(-0.6, period - 0.4)
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_locator(ticker.MultipleLocator(0.25))
    axes.xaxis.set_major_locator(ticker.FixedLocator(_residue_ticks(period, row)))
    axes.xaxis.set_minor_locator(ticker.FixedLocator(range(period)))


def _mark_worst(axes: Axes, curve: data.Curve, numbered: bool) -> None:
    """A ring at the worst residue, and its number below (above where there is no room), but for one that the other protocol's ring has."""
    value = curve.accuracy[curve.worst]
    axes.plot([curve.worst], [value], marker="o", markersize=8, markerfacecolor="none", markeredgecolor=COLOURS["ink"], markeredgewidth=1.3, zorder=5)
    if not numbered:
        return
    below = value > 0.2
    anchor, offset, align = (curve.low[curve.worst], -6, "top") if below else (curve.high[curve.worst], 6, "bottom")
    where = (curve.worst, anchor)
    text = axes.annotate(str(curve.worst), where, xytext=(0, offset), textcoords="offset points", ha="center", va=align, fontsize=7.5, zorder=6)
    text.set_path_effects(halo())


def _residue_ticks(period: int, row: Row) -> list[int]:
    """Every stride tokens where that reads well, else a divisor of the period."""
    stride = pareto.variant_of(row).get("stride")
    steps = [stride] if isinstance(stride, int) and not pareto.is_full(row) and 2 <= period / stride <= 12 else []
    steps += [step for step in range(1, period + 1) if period % step == 0 and period / step <= 6]
    return list(range(0, period, steps[0]))


def _panel_title(axes: Axes, row: Row, size: float = 9.5) -> None:
    axes.set_title(data.named(row, 36), fontsize=size, pad=17)
    worst, mean = data.a_min_interval(row), data.mean_interval(row)
    kept = f", KV {data.percent(row.cost.kv_kept)}" if row.cost else ""
    axes.text(
        0, 1.03, f"A_min {data.bracket(worst)}, mean {mean.value:.3f}{kept}" if mean else "", transform=axes.transAxes, fontsize=7.8, color=COLOURS["muted"]
    )


def _curves_legend(figure: Figure, shown: Sequence[Row], references: Sequence[Row]) -> None:
    protocols = [name for name in _LINES if any(score.protocol == name for row in shown for score in row.scores)]
    entries: list[Line2D | Patch] = [
        Line2D([], [], linestyle=_LINES[p][0], color=_LINES[p][1], linewidth=1.6, marker=_LINES[p][2], markersize=2.6, label=data.PROTOCOL_WORDS[p])
        for p in protocols
    ]
    entries.append(Patch(facecolor=COLOURS["muted"], alpha=0.25, linewidth=0, label="95 % interval"))
    entries.append(
        Line2D(
            [], [], linestyle="", marker="o", markersize=7, markerfacecolor="none", markeredgecolor=COLOURS["ink"], markeredgewidth=1.2, label="worst residue"
        )
    )
    for row in references:
        words = "full attention" if pareto.is_full(row) else pareto.plain_name(row) if pareto.is_plain(row) else data.named(row)
        entries.append(Line2D([], [], linestyle=":" if pareto.is_full(row) else "-", color=COLOURS["faint"], linewidth=1.1, label=words))
    spacing = {"columnspacing": 1.0, "handletextpad": 0.5}  # the title stands on the same line
    figure.legend(handles=entries, loc="outside upper right", ncols=3 if figure.get_figwidth() < 10 else len(entries), **spacing)


def _most_telling(points: list[data.Point], first: Sequence[data.Point], fill: bool = True) -> list[data.Point]:
    """Which points get a name: the anchors, `first`, the candidates, and to `fill` up the front by A_min; `MOST_LABELS` at most."""
    chosen = [p for p in points if p.role in ("full", "plain")]
    candidates = [knee.row for knee in pareto.knees([p.row for p in points])]
    rest = [*first, *[p for p in points if any(p.row is row for row in candidates)]]
    rest += sorted((p for p in points if p.on_front), key=lambda p: -p.axes[3].value) if fill else []
    for point in rest:
        if len(chosen) < MOST_LABELS and not any(point is other for other in chosen):
            chosen.append(point)
    return chosen


def _label(x: float, y: float, point: data.Point, text: str, optional: bool = False) -> Label:
    colour = COLOURS["vermillion"] if point.role == "plain" else COLOURS["ink"]
    return Label(x=x, y=y, text=text, colour=colour, bold=point.role in ("full", "plain"), optional=optional)


def _freeze(figure: Figure) -> None:
    """Lay out once, then keep: labels are placed in pixels of this layout."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def empty(figure: Figure, axes: Axes, words: str = "No finished trial yet") -> Figure:
    """A figure that says why it shows nothing; `why_empty` finds the words again."""
    figure.set_size_inches(7.0, 2.0)
    axes.set_axis_off()
    axes.text(0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes, fontsize=12, color=COLOURS["muted"], gid="nothing")
    return figure


def why_empty(figure: Figure) -> str:
    """What a figure without data says; empty for one that shows something."""
    return next((text.get_text() for axes in figure.axes for text in axes.texts if text.get_gid() == "nothing"), "")
