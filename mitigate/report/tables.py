"""Plain text for the terminal: the front as a table, a phase curve as bars. No line is wider than 120 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from mitigate import pareto
from mitigate.report import data
from mitigate.rows import ProtocolScore, Row, Transition

WIDTH = 120
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def front_table(rows: Sequence[Row]) -> str:
    """The front by KV bytes, then A_min. Anchors that are dominated stand in it too, without the mark."""
    on_front = {id(row) for row in pareto.front(rows)}
    anchors = {id(row) for row in (pareto.full_row(rows), pareto.plain_row(rows)) if row is not None}
    shown = sorted((row for row in rows if id(row) in on_front | anchors), key=data.by_cost)
    if not shown:
        return data.nothing_finished(rows)
    head = ["", "trial", "label", "KV kept", "KV B/token", "rel. tokens/s", "mean accuracy [95 %]", "A_min [95 %]", "gap"]
    lines = _aligned([head, *[_cells(row, id(row) in on_front) for row in shown]])
    lines[1:1] = ["─" * len(lines[0])]
    mark = "* on the front.  rel. tokens/s: decode throughput relative to full attention."
    notes = [mark, *_wrapped(data.sample_line(rows)), *_wrapped(data.infeasible_line(rows))]
    return "\n".join([*lines, "", *notes])


def _cells(row: Row, on_front: bool) -> list[str]:
    assert row.cost is not None
    trial = "-" if row.trial is None else str(row.trial)
    size = row.cost.kv_bytes_per_token
    kv = [data.percent(row.cost.kv_kept), f"{size:,.4g}" if size < 1e4 else f"{size:,.0f}"]
    accuracy = [data.bracket(data.mean_interval(row)), data.bracket(data.a_min_interval(row))]
    return ["*" if on_front else "", trial, row.label, *kv, f"{row.cost.throughput_ratio.value:.2f}", *accuracy, f"{row.gap or 0.0:.2f}"]


def _aligned(cells: list[list[str]], label: int = 2) -> list[str]:
    """Columns two blanks apart; the label takes what the others leave of `WIDTH`, and is cut there."""
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    widths[label] = min(widths[label], WIDTH - sum(widths) + widths[label] - 2 * (len(widths) - 1))
    cut = [[*line[:label], _cut(line[label], widths[label]), *line[label + 1 :]] for line in cells]
    return ["  ".join(cell.ljust(w) if i == label else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))) for line in cut]


def _cut(text: str, width: int) -> str:
    """One line of at most `width` columns."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else f"{flat[: width - 1]}…"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def phase_curve_text(row: Row, width: int = 22) -> str:
    """One bar per residue and protocol, side by side, with the numbers; the worst residue of each protocol is marked."""
    if not row.scores:
        return f"{data.named(row)}: no phase sweep" + (f" ({row.error.kind}: {row.error.message})" if row.error else "")
    scores = [score for name in data.PROTOCOL_WORDS for score in row.scores if score.protocol == name]
    tall = max(score.period for score in scores)
    lines = [f"{data.named(row, 60)}: mean accuracy {data.bracket(data.mean_interval(row))}, A_min {data.bracket(data.a_min_interval(row))}", ""]
    lines.append("  residue  " + "   ".join(f"{data.PROTOCOL_WORDS[score.protocol]} (P = {score.period})".ljust(width + 28) for score in scores).rstrip())
    lines += [f"  {residue:>7}  " + "   ".join(_bar(score, residue, width) for score in scores).rstrip() for residue in range(tall)]
    lines += ["           " + "   ".join(("0" + "accuracy".center(width - 2) + "1").ljust(width + 30) for _ in scores).rstrip(), ""]
    return "\n".join([*lines, *map(_summary, scores), *_wrapped(data.period_line(row)), *_wrapped(data.sample_line([row]))])


def transition_text(found: Transition, local: int | None) -> str:
    """Mean and worst accuracy at each distance, the end of the local window marked."""
    lines = [f"  distance  mean   worst residue   ({found.prompts} prompts at each of {found.period} residues)"]
    for distance, accuracy in zip(found.distances, found.accuracy, strict=True):
        if local is not None and distance == local:
            lines.append(f"  {'─' * 8}  the fact leaves the local window of {local}: from here on it is exact only in the open tail")
        worst = min(range(found.period), key=accuracy.__getitem__)
        lines.append(f"  {distance:>8}  {sum(accuracy) / found.period:.2f}   {accuracy[worst]:.2f} at {worst:<3}")
    return "\n".join(lines)


def _summary(score: ProtocolScore) -> str:
    """The numbers of one sweep in a line, the cross-fitted A_min beside the plain one."""
    worst = f"A_min {data.bracket(score.a_min)} at residue {score.worst_residue}, cross-fitted {score.a_min_cross_fitted:.3f}"
    return f"{data.PROTOCOL_WORDS[score.protocol]}: mean {score.mean.value:.3f}, {worst}, gap {score.gap.value:.3f}, spread {score.spread.value:.3f}."


def _bar(score: ProtocolScore, residue: int, width: int) -> str:
    """Exactly width + 28 columns: the bar between two rules, the number with its interval, the mark."""
    if residue >= score.period:
        return " " * (width + 28)
    value = min(max(score.accuracy[residue], 0.0), 1.0)
    eighths = math.floor(value * width * 8 + 0.5)
    bar = ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip().ljust(width)
    number = f"{score.accuracy[residue]:.2f} [{score.accuracy_low[residue]:.2f}, {score.accuracy_high[residue]:.2f}]"
    mark = " ◂ worst" if residue == score.worst_residue and min(score.accuracy) < max(score.accuracy) else ""
    return f"▕{bar}▏{number}{mark}".ljust(width + 28)
