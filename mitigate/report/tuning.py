"""A fine-tuned model beside itself before, and beside its own full attention: the phase curves in one picture, and a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from matplotlib import ticker
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mitigate.report import data, style, tables
from mitigate.rows import Row

STAGES = {"full": "full attention", "before": "before training", "after": "after training"}
_COLOURS = style.COLOURS
_LOOKS: dict[str, tuple[Any, str, str]] = {  # stage -> line, colour, marker
    "full": (":", _COLOURS["muted"], "s"),
    "before": ((0, (4, 1.6)), _COLOURS["orange"], "D"),
    "after": ("-", _COLOURS["blue"], "o"),
}


def figure(rows: Mapping[str, Row], *, title: str) -> Figure:
    """Accuracy against residue with 95 % bands, a panel for each protocol.

    Args:
        rows: by the keys of `STAGES`; what is missing is left out.
    """
    curves = {stage: {curve.protocol: curve for curve in data.curves(rows[stage])} for stage in STAGES if stage in rows}
    protocols = [name for name in data.PROTOCOL_WORDS if any(name in found for found in curves.values())]
    with style.styled():
        sheet = style.new_figure(max(4.4 * len(protocols), 6.4), 4.0)
        panels = sheet.subplots(1, max(len(protocols), 1), sharey=True, squeeze=False)[0]
        for axes, protocol in zip(panels, protocols, strict=True):
            for stage, found in curves.items():
                line, colour, marker = _LOOKS[stage]
                curve = found[protocol]
                axes.fill_between(curve.residues, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)
                label = STAGES[stage]
                axes.plot(curve.residues, curve.accuracy, linestyle=line, color=colour, marker=marker, markersize=3.5, linewidth=1.7, label=label)
            axes.set_title(data.PROTOCOL_WORDS[protocol])
            axes.set_ylim(-0.02, 1.03)
            axes.yaxis.set_major_locator(ticker.MultipleLocator(0.25))
            axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=9, min_n_ticks=1))
            axes.set_xlabel("residue of the queried record's position, t mod P (tokens)")
        panels[0].set_ylabel("accuracy (fraction of queries)")
        sheet.suptitle(title, x=0.012, ha="left", fontsize=11, fontweight="bold")
        handles, labels = panels[0].get_legend_handles_labels()
        if handles:
            sheet.legend(
                handles, labels, loc="outside lower right", ncols=len(handles), handlelength=3.2, title="bands: 95 % interval by prompt", title_fontsize=8
            )
        return sheet


def table(rows: Mapping[str, Row], summary: Mapping[str, Any]) -> str:
    """Retrieval, perplexity and KV bytes of each stage, and what each made of the prompt."""
    lines = [["", "mean accuracy [95 %]", "A_min [95 %]", "gap", "perplexity", "nats/token", "KV bytes counted", "kept"]]
    for stage, words in STAGES.items():
        if stage in rows:
            row, found = rows[stage], summary["perplexity"][stage]
            cost = row.cost
            counted, kept = (f"{cost.kv_bytes_counted:,}", data.percent(cost.kv_bytes_counted / summary["kv_bytes_full"])) if cost else ("-", "-")
            scores = [data.bracket(data.mean_interval(row)), data.bracket(data.a_min_interval(row)), "-" if row.gap is None else f"{row.gap:.2f}"]
            lines.append([words, *scores, f"{found['perplexity']:.2f}", f"{found['nats_per_token']:.3f}", counted, kept])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    aligned = ["  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]) for line in lines]
    aligned[1:1] = ["─" * len(aligned[0])]
    some = next(iter(summary["perplexity"].values()))
    notes = [data.sample_line(list(rows.values())), f"Perplexity: {some['tokens']:,} held-out tokens in {some['windows']} windows of {some['window_length']}."]
    notes += [f"KV bytes: one sequence of {row.cost.context:,} tokens." for row in list(rows.values())[:1] if row.cost]
    said = [f"{STAGES[stage]}: {' '.join(summary['sentences'][stage]['text'].split())!r}" for stage in STAGES if stage in summary["sentences"]]
    return "\n".join([*aligned, "", *tables.wrapped(" ".join(notes)), "", f"prompt: {summary['prompt']!r}", *said])


@contextmanager
def progress_bar(updates: int) -> Iterator[Callable[[Any], None]]:
    """Shows training's progress: a bar on a terminal, else a line every half minute. The block's value takes each `finetune.Progress`.

    Args:
        updates: of the schedule.
    """
    console = Console(stderr=True)
    losses = {True: 0.0, False: 0.0}  # running means of retrieval and of text updates
    last = time.monotonic()
    columns = (TextColumn("fine-tune"), BarColumn(), TextColumn("{task.percentage:.0f} %"), TextColumn("{task.fields[words]}"), TimeElapsedColumn())
    shown = Progress(*columns, console=console, disable=not console.is_terminal)
    task = shown.add_task("fine-tune", total=1.0, words="")

    def update(progress: Any) -> None:
        nonlocal last
        shown.start()  # not before there is something to show
        step = progress.step
        losses[step.answers] = step.loss if not losses[step.answers] else 0.9 * losses[step.answers] + 0.1 * step.loss
        means = ", ".join(f"{'retrieval' if answers else 'text'} {loss:.3f}" for answers, loss in losses.items() if loss)
        seen = progress.watched
        words = f"update {progress.update} of at most {updates}, loss: {means}" + (f", A_min {seen.a_min:.2f}, mean {seen.mean:.2f}" if seen else "")
        shown.update(task, completed=progress.share, words=words)
        if progress.share >= 1:
            shown.stop()
        if not console.is_terminal and (time.monotonic() - last > 30 or progress.share >= 1):
            last = time.monotonic()
            print(f"fine-tune: {100 * progress.share:.0f} %, {words}", file=sys.stderr, flush=True)

    try:
        yield update
    finally:
        shown.stop()
