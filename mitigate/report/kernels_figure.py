"""The figure of docs/kernels.md: how attention grows with the length, drawn from the bench's JSON.

python -m mitigate.kernels.bench --scaling --json bench.json
python -m mitigate.report.kernels_figure bench.json docs/figures/attend_scaling.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.ticker as ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mitigate.files import write_atomic
from mitigate.report import style

_LOOKS = {"training path": ("blue", "o", "-"), "masked SDPA": ("vermillion", "s", "--")}


def attend_scaling(rows: Sequence[dict[str, Any]]) -> Figure:
    """Time per query and peak memory of forward and backward over the length, one line per way, log-log with a slope to compare.

    Args:
        rows: `scaling` of the bench's JSON: way, length, us_per_query, peak_mib.
    """
    with style.styled():
        figure = style.new_figure(9.2, 3.9)
        left, right = figure.subplots(1, 2)
        _panel(left, rows, "us_per_query", "time per query (µs)", "Time per query: a constant part, then T/S")
        _panel(right, rows, "peak_mib", "peak memory above the inputs (MiB)", "Memory of forward and backward")
        _slope(left, rows, "us_per_query", 1, "grows with T")
        _slope(right, rows, "peak_mib", 1, "grows with T")
        _stop(left, rows, "us_per_query")
        _stop(right, rows, "peak_mib")
        left.legend(loc="upper left")
        return figure


def _panel(axes: Axes, rows: Sequence[dict[str, Any]], key: str, label: str, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for way, (colour, marker, line) in _LOOKS.items():
        points = sorted((row["length"], row[key]) for row in rows if row["way"] == way)
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=style.COLOURS[colour], marker=marker, linestyle=line, linewidth=1.6, markersize=5, label=way)
    lengths = sorted({row["length"] for row in rows})
    axes.xaxis.set_major_locator(ticker.FixedLocator(lengths))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value / 1024:.0f}K"))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("tokens T (log scale)")
    axes.set_ylabel(f"{label}, log scale")
    axes.set_title(title)


def _slope(axes: Axes, rows: Sequence[dict[str, Any]], key: str, power: int, words: str) -> None:
    """A faint line through the last point of the training path with the slope of T to that power."""
    points = sorted((row["length"], row[key]) for row in rows if row["way"] == "training path")
    if len(points) < 2:
        return
    (low, _), (high, top) = points[0], points[-1]
    axes.plot([low, high], [top * (low / high) ** power, top], color=style.COLOURS["faint"], linewidth=1.0, zorder=1)
    axes.annotate(words, (low, top * (low / high) ** power), xytext=(4, -9), textcoords="offset points", color=style.COLOURS["muted"], fontsize=8)


def _stop(axes: Axes, rows: Sequence[dict[str, Any]], key: str) -> None:
    """Beside the last point of masked SDPA, where the training path goes further: why it has no other."""
    points = sorted((row["length"], row[key]) for row in rows if row["way"] == "masked SDPA")
    if not points or points[-1][0] == max(row["length"] for row in rows):
        return
    words = f"not run beyond {points[-1][0] / 1024:.0f}K tokens:\nits mask and its time\ngrow with T²"
    axes.annotate(words, points[-1], xytext=(9, 6), textcoords="offset points", color=style.COLOURS["vermillion"], fontsize=8, va="top")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the figure from a file of the bench."""
    parser = argparse.ArgumentParser(prog="python -m mitigate.report.kernels_figure", description="Draw the scaling figure of docs/kernels.md.")
    parser.add_argument("json", type=Path, help="written by python -m mitigate.kernels.bench --scaling --json FILE")
    parser.add_argument("png", type=Path)
    arguments = parser.parse_args(argv)
    rows = json.loads(arguments.json.read_text(encoding="utf-8"))["scaling"]
    if not rows:
        parser.error(f"{arguments.json} holds no scaling table: run the bench with --scaling")
    write_atomic(arguments.png, style.png(attend_scaling(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
