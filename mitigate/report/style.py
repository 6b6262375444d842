"""How figures look, and how they are saved. No global matplotlib state survives a call."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
import matplotlib.patheffects as effects
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DPI = 160

# Okabe-Ito for data, greys for the rest. Each value is used for one meaning, so that an inlined SVG can be recoloured by name.
COLOURS = {
    "ink": "#1c2126",
    "muted": "#69727b",
    "faint": "#a9b1b9",
    "grid": "#e4e8ec",
    "surface": "#ffffff",
    "blue": "#0072b2",
    "orange": "#e69f00",
    "vermillion": "#d55e00",
    "green": "#009e73",
}

_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "text.parse_math": False,
    "text.color": COLOURS["ink"],
    "axes.edgecolor": COLOURS["faint"],
    "axes.labelcolor": COLOURS["ink"],
    "axes.titlecolor": COLOURS["ink"],
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.facecolor": COLOURS["surface"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": COLOURS["faint"],
    "ytick.color": COLOURS["faint"],
    "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["muted"],
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "figure.facecolor": COLOURS["surface"],
    "savefig.facecolor": COLOURS["surface"],
    "svg.fonttype": "path",
    "svg.hashsalt": "mitigate",
}


@contextmanager
def styled() -> Iterator[None]:
    """matplotlib's defaults with this style over them, whatever the user's settings; the settings come back afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)  # type: ignore[arg-type]
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that size in inches, laid out so that nothing overlaps. Call it, and draw, inside `styled`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def halo() -> list[effects.AbstractPathEffect]:
    """A rim in the background's colour, so that text reads on top of lines."""
    return [effects.withStroke(linewidth=2.4, foreground=COLOURS["surface"])]


def png(figure: Figure) -> bytes:
    """The figure as PNG."""
    return _saved(figure, "png")


def svg(figure: Figure) -> bytes:
    """The figure as SVG, text drawn as paths so that it looks alike everywhere; equal figures give equal bytes."""
    return _saved(figure, "svg")


def _saved(figure: Figure, kind: str) -> bytes:
    stream = io.BytesIO()
    nothing = {"Software": None} if kind == "png" else {"Date": None, "Creator": None, "Format": None, "Type": None}
    with styled():
        figure.savefig(stream, format=kind, dpi=DPI, metadata=nothing)
    return stream.getvalue()


def inline(content: bytes, name: str, description: str) -> str:
    """An SVG from `svg` to stand inside a page: own ids, colours from the page's CSS variables (`--ink`, `--blue`, …), no outside names."""
    text = content.decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', lambda found: f"{found.group(1)}{name}-", text)
    for variable, value in COLOURS.items():
        text = re.sub(rf"((?:fill|stroke): ?){value}\b", rf"\1var(--{variable})", text)
    box = re.search(r'viewBox="0 0 ([\d.]+) [\d.]+"', text)
    assert box is not None
    widest = f'style="max-width: {1.75 * float(box.group(1)):.0f}px"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box.group(0)} {widest} role="img" aria-label="{description}">'
    return head + text[text.index(">") + 1 :]
