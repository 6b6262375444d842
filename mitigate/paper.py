"""The published phase curves of arXiv:2609.36322, scored again: mean, worst, gap, Wilson intervals and the period, beside what the paper prints.

Source of the numbers: the `source` block of each file in `paper_data/`. 23 compressed runs (two padding protocols), 3 full-attention runs (outer padding
alone) and the needle test of 5 released models. Everything here is in percent and percentage points, as published; everywhere else in this package
accuracies are fractions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mitigate.spectrum import PeriodResult, find_period
from mitigate.stats import wilson

DATA = Path(__file__).parent / "paper_data"
CONTROLLED_N = 1000  # examples per residue of the controlled runs; not printed, but every full-attention Wilson limit follows from it
ALPHA = 0.01  # level of the period test, the same for every run
_HALF_UNIT = 0.005 + 1e-6  # published to two decimals
_PROTOCOLS = (("outer", "prefix_padding"), ("in_sequence", "in_sequence_padding"))


@dataclass(frozen=True, kw_only=True)
class PaperSweep:
    """One published phase curve and what follows from it; percent.

    Attributes:
        protocol: "outer", "in_sequence", or "needle" (released models, 128K-token prompts).
        n: examples per residue.
        accuracy: per residue, from the published counts where there are counts, else as published.
        wilson_low, wilson_high: 95 % Wilson limits per residue, computed.
        mean, worst, gap: computed; worst_residue is the first of equals.
        published_mean, published_worst, published_gap: as printed; None where the source prints none.
        published_low, published_high: printed limits per residue: Wilson for full attention and the needle test, clustered bootstrap for compressed runs.
        wilson_published: whether the printed limits are Wilson limits, and so count towards `agrees`.
    """

    protocol: str
    n: int
    accuracy: tuple[float, ...]
    wilson_low: tuple[float, ...]
    wilson_high: tuple[float, ...]
    mean: float
    worst: float
    worst_residue: int
    gap: float
    published_mean: float
    published_worst: float | None
    published_gap: float
    published_low: tuple[float, ...]
    published_high: tuple[float, ...]
    wilson_published: bool

    @property
    def interval_difference(self) -> float:
        """Largest distance between a Wilson limit and the printed limit of the same residue."""
        ours, theirs = (*self.wilson_low, *self.wilson_high), (*self.published_low, *self.published_high)
        return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))

    @property
    def agrees(self) -> bool:
        """Mean, worst, gap and, where they are printed, Wilson limits equal the printed ones to their rounding."""
        pairs = [(self.mean, self.published_mean), (self.gap, self.published_gap)]
        if self.published_worst is not None:
            pairs.append((self.worst, self.published_worst))
        close = all(abs(one - other) <= _HALF_UNIT for one, other in pairs)
        return close and (not self.wilson_published or self.interval_difference <= _HALF_UNIT)


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """One published run: its sweeps, and the period found in them taken together."""

    id: str
    name: str
    kind: str  # "compressed", "full_attention" or "released"
    window: int | None
    stride: int | None
    sweeps: tuple[PaperSweep, ...]
    detection: PeriodResult

    @property
    def period(self) -> int | None:
        """Detected period; None where there is none or it is undecided."""
        return self.detection.period

    @property
    def p_value(self) -> float:
        """Permutation p-value of the best candidate, corrected for the search."""
        return self.detection.p_value

    @property
    def agrees(self) -> bool:
        """Every sweep agrees with the printed numbers, and no period was detected other than the stride."""
        return all(sweep.agrees for sweep in self.sweeps) and self.period in (None, self.stride)


def paper_table() -> list[PaperRow]:
    """All 31 published runs, scored again, in the order of the source.

    Raises:
        FileNotFoundError: the package was installed without `paper_data/`.
    """
    return [_controlled(run) for run in _read("controlled_runs.json")["runs"]] + [_needle(model) for model in _read("niah_deepseek.json")["models"]]


def format_paper_table(rows: list[PaperRow]) -> str:
    """Plain text, one line per sweep, computed numbers with the printed ones in parentheses; percent."""
    name_width = max([len("run"), *(len(row.name) for row in rows)])
    head = (
        f"{'run':{name_width}}  {'S':>2}  {'padding':11}  {'n':>4}  {'mean (printed)':>15}  {'worst, 95 % Wilson':>20}  {'at':>2}  {'gap (printed)':>15}"
        f"  {'period':>9}  {'p':>7}  agrees"
    )
    lines = [head, "-" * len(head)]
    for row in rows:
        for index, sweep in enumerate(row.sweeps):
            first = index == 0
            r = sweep.worst_residue
            worst = f"{sweep.worst:.2f} [{sweep.wilson_low[r]:5.2f}, {sweep.wilson_high[r]:5.2f}]"
            period = str(row.period) if row.period is not None else row.detection.status
            lines.append(
                f"{row.name if first else '':{name_width}}  {row.stride or '-' if first else '':>2}  {sweep.protocol:11}  {sweep.n:>4}"
                f"  {f'{sweep.mean:.2f} ({sweep.published_mean:.2f})':>15}  {worst:>20}  {r:>2}  {f'{sweep.gap:.2f} ({sweep.published_gap:.2f})':>15}"
                f"  {period if first else '':>9}  {f'{row.p_value:.4f}' if first else '':>7}  {'yes' if sweep.agrees else 'NO'}"
            )
    compressed = [row for row in rows if row.stride is not None]
    found = sum(row.period == row.stride for row in compressed)
    wrong = sum(row.period not in (None, row.stride) for row in rows)
    open_ = [row.name for row in compressed if row.period is None]
    lines += [
        "-" * len(head),
        f"{len(rows)} runs; printed numbers recomputed to rounding in {sum(all(sweep.agrees for sweep in row.sweeps) for row in rows)}.",
        f"Stride detected at p < {ALPHA:g} in {found} of {len(compressed)} compressed runs; wrong periods: {wrong}.",
        f"Undecided: {', '.join(open_) if open_ else 'none'}.",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((DATA / name).read_text(encoding="utf-8"))
    return data


def _controlled(run: dict[str, Any]) -> PaperRow:
    compressed = run["kind"] == "compressed"
    sweeps = []
    for protocol, key in _PROTOCOLS:
        curve = run[key]
        if curve is not None:
            hits = np.round(np.array(curve["accuracy_pct"]) * CONTROLLED_N / 100)
            printed = (curve["mean_pct"][0], None, curve["gap_pp"][0], curve["ci_lo"], curve["ci_hi"])
            sweeps.append(_sweep(protocol, hits, CONTROLLED_N, printed, wilson_published=not compressed))
    return _row(run["id"], run["name"], run["kind"], run["window"], run["stride"], sweeps)


def _needle(model: dict[str, Any]) -> PaperRow:
    printed = (model["mean_pct"], model["worst_pct"], model["gap_pp"], model["wilson_lo"], model["wilson_hi"])
    sweep = _sweep("needle", np.array(model["correct"], float), model["samples_per_residue"], printed, wilson_published=True)
    return _row(model["id"], model["name"], "released", None, model["stride"], [sweep])


def _sweep(protocol: str, hits: Any, n: int, printed: tuple[float, float | None, float, list[float], list[float]], *, wilson_published: bool) -> PaperSweep:
    accuracy = 100 * hits / n
    low, high = wilson(hits, n)
    published_mean, published_worst, published_gap, published_low, published_high = printed
    return PaperSweep(
        protocol=protocol,
        n=n,
        accuracy=_plain(accuracy),
        wilson_low=_plain(100 * low),
        wilson_high=_plain(100 * high),
        mean=float(accuracy.mean()),
        worst=float(accuracy.min()),
        worst_residue=int(accuracy.argmin()),
        gap=float(np.ptp(accuracy)),
        published_mean=published_mean,
        published_worst=published_worst,
        published_gap=published_gap,
        published_low=tuple(published_low),
        published_high=tuple(published_high),
        wilson_published=wilson_published,
    )


def _plain(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _row(id_: str, name: str, kind: str, window: int | None, stride: int | None, sweeps: list[PaperSweep]) -> PaperRow:
    residues = len(sweeps[0].accuracy)
    detection = find_period(range(residues), [sweep.accuracy for sweep in sweeps], cycle=residues, alpha=ALPHA)
    return PaperRow(id=id_, name=name, kind=kind, window=window, stride=stride, sweeps=tuple(sweeps), detection=detection)
