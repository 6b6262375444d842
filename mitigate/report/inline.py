"""Small pictures for one trial inside the page, as SVG text in the page's colours: a phase curve and the static gates. Numbers only, so nothing to escape."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from mitigate.report import data
from mitigate.report.gates import GateProfile, ends_scale, offset_words
from mitigate.rows import Row

LEFT, TOP, WIDTH, HEIGHT = 40, 8, 372, 150  # of the curve's plot, px
MOST_STRIPS = 16


def sparkline(row: Row, width: int = 96, height: int = 24) -> Markup:
    """The phase curves of a row as a tiny SVG; the ring marks the worst residue of all."""
    drawn, worst = [], min(row.scores, key=lambda score: score.a_min.value, default=None)
    for score in row.scores:
        step = (width - 8) / max(score.period - 1, 1)
        at = [(4 + step * i, height - 3 - (height - 6) * value) for i, value in enumerate(score.accuracy)]
        drawn.append(f'<polyline class="{score.protocol}" points="{_points(at)}"/>')
        if score is worst and max(score.accuracy) > min(score.accuracy):
            x, y = at[score.worst_residue]
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>')
    body = "".join(drawn)
    return (
        Markup(f'<svg class="spark" viewBox="0 0 {width} {height}" width="{width}" height="{height}" aria-hidden="true">{body}</svg>') if drawn else Markup("")
    )


def curve(row: Row) -> Markup:
    """Accuracy against residue with its 95 % band, a line per protocol, the worst residue of each ringed and numbered; empty without a sweep."""
    curves = data.curves(row)
    if not curves:
        return Markup("")
    period = max(len(one.accuracy) for one in curves)
    step = WIDTH / max(period, 1)

    def at(residue: float, accuracy: float) -> tuple[float, float]:
        return LEFT + step * (residue + 0.5), TOP + HEIGHT * (1 - accuracy)

    parts = [f'<path class="rule" d="M{LEFT} {at(0, tick)[1]:.1f}h{WIDTH}"/>' for tick in (0, 0.5, 1)]
    parts += [f'<text class="end" x="{LEFT - 6}" y="{at(0, tick)[1] + 4:.1f}">{tick:g}</text>' for tick in (0, 0.5, 1)]
    every = next(size for size in (1, 2, 3, 4, 6, 8, 12, 24, 48, period) if period / size <= 12)
    parts += [f'<text class="mid" x="{at(i, 0)[0]:.1f}" y="{TOP + HEIGHT + 15}">{i}</text>' for i in range(0, period, every)]
    for one in curves:
        band = [at(i, value) for i, value in enumerate(one.high)] + [at(i, value) for i, value in reversed(list(enumerate(one.low)))]
        line = [at(i, value) for i, value in enumerate(one.accuracy)]
        parts.append(f'<polygon class="band {one.protocol}" points="{_points(band)}"/><polyline class="{one.protocol}" points="{_points(line)}"/>')
        if not one.flat:
            (x, y), below = line[one.worst], one.accuracy[one.worst] > 0.15
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"/><text class="mid ink" x="{x:.1f}" y="{y + (17 if below else -9):.1f}">{one.worst}</text>')
    parts.append(f'<text class="mid" x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 30}">residue of the queried record, t mod {period} (tokens)</text>')
    return _svg("curve", LEFT + WIDTH + 6, TOP + HEIGHT + 36, "accuracy against residue", parts)


def gates(profiles: Sequence[GateProfile]) -> Markup:
    """A strip per layer, branch and head with a bar per offset; the dashed line is 1/W. Empty without profiles."""
    if not profiles:
        return Markup("")
    shown, tall, width, left = profiles[:MOST_STRIPS], 28, 300, 66
    top = max(max(profile.weights) for profile in shown)
    parts: list[str] = []
    bottom = 14
    for place, profile in enumerate(shown):
        window = len(profile.weights)
        base, step = bottom + tall, width / window
        parts.append(f'<text class="end ink" x="{left - 6}" y="{base - 8}">L{profile.layer} {profile.branch} h{profile.head}</text>')
        for i, weight in enumerate(profile.weights):
            high = tall * weight / top
            parts.append(f'<rect class="bar" x="{left + step * (i + 0.1):.1f}" y="{base - high:.1f}" width="{0.8 * step:.1f}" height="{high:.1f}"/>')
        best = max(range(window), key=profile.weights.__getitem__)
        parts.append(f'<path class="even" d="M{left} {base - tall / top / window:.1f}h{width}"/><path class="rule" d="M{left} {base}h{width}"/>')
        most, middle = profile.weights[best], left + step * (best + 0.5)
        parts.append(f'<text class="mid ink" x="{middle:.1f}" y="{base - tall * most / top - 2:.1f}">{most:.2f}</text>')
        bottom = base + 14
        if ends_scale(shown, place):
            parts += [f'<text class="mid" x="{left + step * (i + 0.5):.1f}" y="{bottom + 4}">{i}</text>' for i in range(0, window, -(-window // 16))]
            bottom += 0 if place + 1 == len(shown) else 18
    more = f"; {len(profiles) - len(shown)} more heads" if len(profiles) > len(shown) else ""
    parts.append(f'<text class="mid" x="{left + width / 2}" y="{bottom + 19}">{offset_words(shown)}{more}</text>')
    return _svg("gates", left + width + 6, bottom + 26, "static gate weight of each offset", parts)


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)


def _svg(kind: str, width: float, height: float, words: str, parts: Sequence[str]) -> Markup:
    return Markup(f'<svg class="small {kind}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{words}">{"".join(parts)}</svg>')
