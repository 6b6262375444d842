"""Static gate profiles of a few trials as bars."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.ticker as ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mitigate.report import data
from mitigate.report.figures import empty
from mitigate.report.gates import GateProfile, ends_scale, offset_words
from mitigate.report.style import COLOURS, new_figure, styled
from mitigate.rows import Row

MOST_PANELS, MOST_STRIPS = 6, 12
LEAST_WIDTH = 5.8  # inches: the title's


def gate_profiles(found: Sequence[tuple[Row, list[GateProfile]]], why_none: str = "No trial here has weights with a static gate") -> Figure:
    """A panel a trial, a strip a layer, branch and head, a bar an offset; the dashed line is 1/W, a gate without preference. At most six trials."""
    shown = [(row, profiles) for row, profiles in found if profiles][:MOST_PANELS]
    with styled():
        if not shown:
            figure = new_figure(7.0, 2.0)
            return empty(figure, figure.subplots(), why_none)
        across = min(3, len(shown))
        down = -(-len(shown) // across)
        strips = max(min(len(profiles), MOST_STRIPS) for _, profiles in shown)
        figure = new_figure(max(3.5 * across + 0.4, LEAST_WIDTH), down * (0.85 + 0.42 * strips) + 0.75)
        outer = figure.add_gridspec(down, across)
        for place, (row, profiles) in enumerate(shown):
            cell = outer[place // across, place % across].subgridspec(min(len(profiles), MOST_STRIPS), 1, hspace=0.12)
            panels = [figure.add_subplot(cell[line, 0]) for line in range(min(len(profiles), MOST_STRIPS))]
            _draw_trial(panels, row, profiles)
        title = "Static gates: the weight of each offset, whatever the token"
        line = Line2D([], [], color=COLOURS["vermillion"], linewidth=1.0, linestyle=(0, (3, 2)), label="1/W: no preference")
        figure.legend(handles=[line], loc="outside lower right")
        figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")
        return figure


def _draw_trial(panels: Sequence[Axes], row: Row, profiles: Sequence[GateProfile]) -> None:
    top = max(max(profile.weights) for profile in profiles)
    for place, (axes, profile) in enumerate(zip(panels, profiles, strict=False)):
        weights = profile.weights
        axes.bar(range(len(weights)), weights, width=0.8, color=COLOURS["blue"], zorder=2)
        axes.axhline(1 / len(weights), color=COLOURS["vermillion"], linewidth=1.0, linestyle=(0, (3, 2)), zorder=3)
        best = max(range(len(weights)), key=weights.__getitem__)
        axes.annotate(f"{weights[best]:.2f}", (best, weights[best]), xytext=(0, 1), textcoords="offset points", fontsize=7, ha="center", zorder=4)
        axes.set_xlim(-0.7, len(weights) - 0.3)
        axes.set_ylim(0, 1.35 * max(top, 1.2 / len(weights)))
        axes.set_yticks([])
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_ylabel(f"L{profile.layer} {profile.branch} h{profile.head}", rotation=0, ha="right", va="center", fontsize=8)
        scale = ends_scale(profiles[: len(panels)], place)
        axes.tick_params(labelbottom=scale, length=2 if scale else 0)
        axes.xaxis.set_major_locator(ticker.FixedLocator(list(range(0, len(weights), -(-len(weights) // 16)))))
    left_out = len(profiles) - len(panels)
    more = f"; {left_out} more heads not drawn" if left_out > 0 else ""
    panels[-1].set_xlabel(f"{offset_words(profiles[: len(panels)])}{more}", fontsize=8)
    panels[0].set_title(data.named(row, 30), fontsize=9.5)
