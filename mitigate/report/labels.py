"""Put names beside points without covering points, lines or other names.

Boxes are [N, 4] arrays in pixels: left, bottom, right, top.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from mitigate.report.style import COLOURS, halo

Array = NDArray[np.float64]
Segment = tuple[tuple[float, float], tuple[float, float]]

# Directions in which a label may stand, in the order of liking: right, left, above, below, and the corners.
_DIRECTIONS = ((1, 0), (1, 1), (1, -1), (-1, 0), (-1, 1), (-1, -1), (0, 1), (0, -1))
_DISTANCES = (7.0, 14.0, 24.0, 36.0, 52.0, 70.0)  # points


@dataclass(frozen=True, kw_only=True)
class Label:
    """A name for the point (x, y) in data units. An `optional` one is left out where it would have to stand far off or cover something."""

    x: float
    y: float
    text: str
    colour: str = COLOURS["ink"]
    bold: bool = False
    optional: bool = False


def place(axes: Axes, labels: Sequence[Label], marks: Iterable[tuple[float, float]], lines: Iterable[Segment] = (), size: float = 8.0) -> None:
    """Draw the labels, the first ones where they like best; far ones get a thin line to their point.

    Args:
        axes: finished but for the labels; the layout of its figure must be final.
        labels: in order of importance.
        marks: (x, y) of the points that no label may cover.
        lines: upright or level segments ((x0, y0), (x1, y1)) that no label should cover.
        size: font size in points.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    unit = figure.dpi / 72
    boxes = [_padded(axes.transData.transform([mark]), 4.5 * unit) for mark in marks]
    boxes += [_padded(axes.transData.transform(line), 1.5 * unit) for line in lines]
    for label in labels:
        boxes += _place_one(axes, label, np.array(boxes).reshape(-1, 4), unit, size)


def _padded(points: Array, pad: float) -> Array:
    """The box around [N, 2] points, `pad` wider on every side."""
    return np.concatenate([points.min(axis=0) - pad, points.max(axis=0) + pad])


def _place_one(axes: Axes, label: Label, taken: Array, unit: float, size: float) -> list[Array]:
    """Draw one label at the spot that costs least; give back the boxes that it and its line take."""
    weight = "bold" if label.bold else "normal"
    text = axes.annotate(
        label.text, (label.x, label.y), xytext=(0, 0), textcoords="offset points", fontsize=size, color=label.colour, fontweight=weight, zorder=6
    )
    text.set_path_effects(halo())
    drawn, centre = text.get_window_extent(), axes.transData.transform((label.x, label.y))
    inside = np.array([axes.bbox.extents])
    spots = _spots(centre, drawn.width, drawn.height, unit)
    cost, spot = min(((_cost(spot, taken, inside), spot) for spot in spots), key=lambda pair: pair[0])
    if label.optional and cost > 2 * _DISTANCES[1]:
        text.remove()
        return []
    text.set_horizontalalignment(("center", "left", "right")[spot.dx])
    text.set_verticalalignment(("center", "bottom", "top")[spot.dy])
    text.set_position(spot.offset)
    if spot.far:
        arrow = {"arrowstyle": "-", "color": COLOURS["faint"], "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3.5}
        axes.annotate("", (label.x, label.y), xytext=spot.offset, textcoords="offset points", arrowprops=arrow, zorder=2)
    return [spot.box, *(_padded(point[None], unit) for point in spot.way)]


@dataclass(frozen=True)
class _Spot:
    """A place for a label: direction, distance in points, the box, and pixels along the line to the point."""

    dx: int
    dy: int
    distance: float
    box: Array
    way: Array

    @property
    def offset(self) -> tuple[float, float]:
        """From the point to the label's edge, in points."""
        return _offset(self.dx, self.dy, self.distance)

    @property
    def far(self) -> bool:
        """Too far to do without a line."""
        return self.distance > _DISTANCES[0]


def _offset(dx: int, dy: int, distance: float) -> tuple[float, float]:
    """Corners stand a little flatter than 45 degrees."""
    return dx * distance, dy * distance * (0.7 if dx else 1.0)


def _spots(centre: Array, width: float, height: float, unit: float) -> Iterator[_Spot]:
    for distance in _DISTANCES:
        for dx, dy in _DIRECTIONS:
            step = unit * np.array(_offset(dx, dy, distance))
            left, bottom = centre + step - np.array([width * (0.5, 0.0, 1.0)[dx], height * (0.5, 0.0, 1.0)[dy]])
            count = int(distance // 4) if distance > _DISTANCES[0] else 0
            way = centre + step * (np.arange(2, max(count, 2)) / max(count, 1))[:, None]
            yield _Spot(dx, dy, distance, np.array([left, bottom, left + width, bottom + height]), way)


def _cost(spot: _Spot, taken: Array, inside: Array) -> float:
    """Covered area in square pixels, what the line crosses, and distance; outside of the axes nearly forbidden."""
    area = (spot.box[2] - spot.box[0]) * (spot.box[3] - spot.box[1])
    outside = area - _overlaps(spot.box, inside).sum()
    hit = (spot.way[:, None] > taken[None, :, :2]) & (spot.way[:, None] < taken[None, :, 2:])
    crossed = np.any(np.all(hit, axis=2), axis=1).sum()
    return float(4 * _overlaps(spot.box, taken).sum() + 20 * max(outside, 0.0) + 40 * crossed + 2 * spot.distance)


def _overlaps(box: Array, others: Array) -> Array:
    """[N] shared area of a box with each of the others."""
    size = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    return np.asarray(size.clip(0).prod(axis=1))
