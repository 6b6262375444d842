"""The transition figure: accuracy against the distance from fact to query, over phases."""

from __future__ import annotations

import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from mitigate.report import style
from mitigate.rows import Transition

BLUE, VERMILLION, MUTED = (style.COLOURS[name] for name in ("blue", "vermillion", "muted"))


def figure(found: Transition, local: int | None, *, title: str) -> Figure:
    """Mean and worst residue above, every residue below; a rule where the fact leaves the local window of `local` tokens (None: no window)."""
    accuracy_DR = np.array(found.accuracy)
    distances = np.array(found.distances)
    with style.styled():
        sheet = style.new_figure(8.0, 5.0)
        lines, cells = sheet.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        lines.plot(distances, accuracy_DR.mean(1), color=BLUE, linewidth=1.8, marker="o", markersize=3, label="mean over residues")
        lines.plot(distances, accuracy_DR.min(1), color=VERMILLION, linewidth=1.8, marker="v", markersize=3.5, label="worst residue")
        lines.set_ylim(-0.02, 1.05)
        lines.yaxis.set_major_locator(ticker.MultipleLocator(0.25))
        lines.set_ylabel("accuracy")
        lines.set_title(f"{title}: where exact tokens stop hiding the fault", pad=22)
        lines.legend(loc="lower right", bbox_to_anchor=(1, 1.0), ncols=2, borderaxespad=0.2)
        extent = (distances[0] - 0.5, distances[-1] + 0.5, found.period - 0.5, -0.5)
        shown = cells.imshow(accuracy_DR.T, aspect="auto", cmap="cividis", vmin=0, vmax=1, extent=extent, interpolation="nearest")
        cells.set_ylabel(f"residue of the fact (mod {found.period})")
        cells.set_xlabel("distance from the fact's last token to the answer (tokens)")
        cells.yaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
        cells.grid(False)
        bar = sheet.colorbar(shown, ax=[lines, cells], fraction=0.03, pad=0.02)
        bar.set_label(f"accuracy over {found.prompts} prompts")
        if local is not None and distances[0] <= local <= distances[-1]:
            for axes in (lines, cells):
                axes.axvline(local - 0.5, color=style.COLOURS["ink"], linewidth=1.2, linestyle="--")
            right = 2 * local <= distances[0] + distances[-1]  # the note stands where there is more room, a little way off the curves' drop
            note, place = f"the fact leaves\nthe local window\n(L = {local})", {"xytext": (16 if right else -6, 0), "ha": "left" if right else "right"}
            lines.annotate(note, (local - 0.5, 0.62), textcoords="offset points", fontsize=8, color=MUTED, va="center", **place).set_in_layout(False)
        return sheet
