"""How fast a search found its front: the hypervolume after each trial, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mitigate import pareto
from mitigate.rows import Row


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One search. Entry n of each list is the state after n + 1 trials, in the order of their numbers; infeasible ones count.

    Attributes:
        name: of the study.
        sampler: "tpe" or "random"; None where the config does not say.
        volume: hypervolume of the trials so far.
        hours: time spent in them, summed over workers: `Row.wall_s`, the base's training in the first one included. Pauses and the driver are not in it.
        anchors: how many of the first trials were given, not searched.
    """

    name: str
    sampler: str | None
    volume: list[float]
    hours: list[float]
    anchors: int


def progress(rows: Sequence[Row], config: dict[str, Any], name: str = "") -> Progress:
    """The search that the rows come from."""
    ordered = sorted(rows, key=lambda row: (row.trial is None, row.trial or 0))
    volume, hours, spent = list[float](), list[float](), 0.0
    best: list[Row] = []
    for row in ordered:
        before = len(best)
        best = pareto.front([*best, row])
        unchanged = len(best) == before and not any(row is other for other in best)
        volume.append(volume[-1] if unchanged and volume else pareto.hypervolume(best))
        spent += row.wall_s / 3600
        hours.append(spent)
    anchors = next((i for i, row in enumerate(ordered) if not row.anchor), len(ordered))
    return Progress(name=name or str(config.get("name") or "this study"), sampler=config.get("sampler"), volume=volume, hours=hours, anchors=anchors)


def baseline_note(this: Progress, baselines: Sequence[Progress]) -> str:
    """What the search is held against, or why it is held against nothing, in a sentence."""
    if baselines:
        names = ", ".join(f"{other.name} ({len(other.volume)} trials)" for other in baselines)
        return f"Random baseline: {names}."
    if this.sampler == "random":
        return "This study's sampler is random: it is a baseline itself."
    return 'No random baseline: run the same config under another name with sampler = "random", and it is drawn here.'
