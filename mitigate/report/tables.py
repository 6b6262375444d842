"""Plain text for the terminal: the front as a table, a phase curve as bars. No line is wider than 120 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from mitigate import pareto
from mitigate.report import data
from mitigate.report.gates import GateProfile
from mitigate.rows import ProtocolScore, Row, Transition

WIDTH = 120
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def front_table(rows: Sequence[Row], key: Callable[[Row], Any] = data.by_cost) -> str:
    """The front by KV bytes, then A_min, or by another `key`. Anchors that are dominated stand in it too, without the mark."""
    on_front = {id(row) for row in pareto.front(rows)}
    anchors = {id(row) for row in (pareto.full_row(rows), pareto.plain_row(rows)) if row is not None}
    shown = sorted((row for row in rows if id(row) in on_front | anchors), key=key)
    if not shown:
        return data.nothing_finished(rows)
    head = ["", "trial", "label", "KV kept", "KV B/token", "rel. tokens/s", "mean accuracy [95 %]", "A_min [95 %]", "gap"]
    lines = aligned([head, *[_cells(row, id(row) in on_front) for row in shown]])
    lines[1:1] = ["─" * len(lines[0])]
    mark = "* on the front.  rel. tokens/s: decode throughput relative to full attention."
    notes = [mark, *wrapped(data.sample_line(rows)), *wrapped(data.left_out_line(rows))]
    return "\n".join([*lines, "", *notes])


def front_text(rows: Sequence[Row], every: Sequence[Row], requirements: Sequence[str], key: Callable[[Row], Any] = data.by_cost) -> str:
    """The front of `rows`, which are those of `every` that meet the requirements, given as text."""
    finished = sum(row.status == "ok" for row in every)
    demands = " and ".join(requirements)
    if not rows and finished:
        return f"No finished trial meets {demands}."
    table = front_table(rows, key)
    return f"{table}\nFront of the {len(rows)} of {finished} finished trials with {demands}." if demands else table


def _cells(row: Row, on_front: bool) -> list[str]:
    assert row.cost is not None
    trial = "-" if row.trial is None else str(row.trial)
    size = row.cost.kv_bytes_per_token
    kv = [data.percent(row.cost.kv_kept), f"{size:,.4g}" if size < 1e4 else f"{size:,.0f}"]
    accuracy = [data.bracket(data.mean_interval(row)), data.bracket(data.a_min_interval(row))]
    return ["*" if on_front else "", trial, row.label, *kv, f"{row.cost.throughput_ratio.value:.2f}", *accuracy, f"{row.gap or 0.0:.2f}"]


def aligned(cells: list[list[str]], label: int = 2) -> list[str]:
    """Columns two blanks apart; the label takes what the others leave of `WIDTH`, and is cut there."""
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    widths[label] = min(widths[label], WIDTH - sum(widths) + widths[label] - 2 * (len(widths) - 1))
    cut = [[*line[:label], _cut(line[label], widths[label]), *line[label + 1 :]] for line in cells]
    return ["  ".join(cell.ljust(w) if i == label else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))) for line in cut]


def _cut(text: str, width: int) -> str:
    """One line of at most `width` columns."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else f"{flat[: width - 1]}…"


def wrapped(text: str) -> list[str]:
    """The text in lines of at most `WIDTH` columns."""
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
    return "\n".join([*lines, *map(_summary, scores), *wrapped(data.period_line(row)), *wrapped(data.sample_line([row]))])


def trial_text(row: Row, rows: Sequence[Row], profiles: list[GateProfile] | str, command: str | None) -> str:
    """Everything about one trial: what it is, where it stands among `rows`, its phase curve, gates, times, and how to export it."""
    four, lines = pareto.intervals(row), [f"{data.named(row, 80)}{', an anchor' if row.anchor else ''}", ""]
    facts = [("variant", data.variant_words(pareto.variant_of(row))), ("front", data.standing(row, rows))]
    if row.cost is not None and four is not None:
        constant = f"{row.cost.kv_constant_bytes:,.0f} B a sequence besides, at {row.cost.context:,} tokens"
        facts.append(("KV", f"{data.percent(row.cost.kv_kept)} of full attention's bytes: {row.cost.kv_bytes_per_token:,.4g} B a token, {constant}"))
        facts.append(("speed", f"{four[1].value:.2f} times full attention's decode throughput (quartiles {four[1].low:.2f} to {four[1].high:.2f})"))
    facts.append(("ran", f"{row.updates:,} updates, {row.wall_s:.0f} s (training {row.train_s:.0f}, sweeps {row.score_s:.0f}); {row.device}, {row.backend}"))
    facts.append(("config", f"sha256 {row.config_sha256}"))
    for name, words in facts:
        first, *rest = textwrap.wrap(words, WIDTH - 10) or [""]
        lines += [f"  {name:8}{first}", *(f"{'':10}{more}" for more in rest)]
    lines += ["", phase_curve_text(row), "", *gates_text(profiles)]
    return "\n".join([*lines, "", f"export: {command}"] if command else lines)


_LEVELS = "▁▂▃▄▅▆▇█"
MOST_STRIPS = 16


def gates_text(profiles: list[GateProfile] | str) -> list[str]:
    """A line per layer, branch and head: a bar per offset, all to one scale, and the largest weight; or why there is none."""
    if isinstance(profiles, str):
        return wrapped(f"Static gates: none. {profiles}")
    top, lines = max(max(profile.weights) for profile in profiles), ["Static gates, softmax(b): the weight of each offset whatever the token"]
    for profile in profiles[:MOST_STRIPS]:
        bars = "".join(_LEVELS[min(7, math.floor(8 * weight / top))] for weight in profile.weights)
        best = max(range(len(profile.weights)), key=profile.weights.__getitem__)
        even = f"(1/W = {1 / len(profile.weights):.2f})"
        lines.append(f"  {f'L{profile.layer} {profile.branch} h{profile.head}':16}{_cut(bars, 60)}  most {profile.weights[best]:.2f} at offset {best} {even}")
    return [*lines, *([f"  {len(profiles) - MOST_STRIPS} more heads"] if len(profiles) > MOST_STRIPS else [])]


def transition_text(found: Transition, local: int | None) -> str:
    """Mean and worst accuracy at each distance, the end of the local window marked."""
    lines = [f"  distance  mean   worst residue   ({found.prompts} prompts at each of {found.period} residues)"]
    for distance, accuracy in zip(found.distances, found.accuracy, strict=True):
        if local is not None and distance == local:
            lines.append(f"  {'─' * 8}  the fact leaves the local window of {local}: from here on it is exact only in the open tail, or where bypassed")
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
