"""What re-scoring on fresh seeds says of the trials that a search chose: how far luck carried them, and which of them are on the front for good."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mitigate import pareto, results
from mitigate.pareto import Array
from mitigate.rows import Interval, Row

FILE = "rescored.csv"
# 97.5 % quantile of Student's t by degrees of freedom from 1, to three digits; beyond the table 1.96 + 2.5 / degrees is right to two.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)


@dataclass(frozen=True, kw_only=True)
class Rescored:
    """A trial as the search saw it, and its Rows under fresh seeds.

    Attributes:
        mean, a_min: means over the fresh seeds, fractions, with 95 % t-intervals over seeds clipped to [0, 1]; of one seed, that seed's own interval.
        probability: that the trial is on the front of the re-scored trials, over seeds and their intervals.
    """

    selected: Row
    fresh: tuple[Row, ...]
    mean: Interval
    a_min: Interval
    probability: float

    @property
    def luck(self) -> float:
        """A_min that the search saw less the mean of the fresh ones: above 0 where the choice was flattered."""
        return (self.selected.a_min or 0.0) - self.a_min.value


def read(study_dir: Path, draws: int = 2000, seed: int = 0) -> list[Rescored]:
    """The re-scored trials of a study, by number; empty where there are none. ConfigError for a damaged result."""
    selected = {row.trial: row for row in results.read_rows(study_dir)}
    fresh: dict[int, list[Row]] = {}
    for path in sorted((study_dir / "rescored").glob("*-s*/result.json")):
        row = results.read_row(path)
        if row.status == "ok" and row.trial is not None and row.trial in selected and selected[row.trial].status == "ok":
            fresh.setdefault(row.trial, []).append(row)
    trials = sorted(fresh)
    chances = _front_probability([selected[n] for n in trials], [fresh[n] for n in trials], draws, seed)
    return [
        Rescored(
            selected=selected[n],
            fresh=tuple(fresh[n]),
            mean=_over_seeds([pareto.accuracy_intervals(row)[0] for row in fresh[n]]),
            a_min=_over_seeds([pareto.accuracy_intervals(row)[1] for row in fresh[n]]),
            probability=float(chance),
        )
        for n, chance in zip(trials, chances, strict=True)
    ]


def luck(rescored: Sequence[Rescored]) -> Interval | None:
    """The winner's curse: mean of `Rescored.luck` with its 95 % t-interval over trials; None below two trials."""
    if len(rescored) < 2:
        return None
    return t_interval([one.luck for one in rescored])


def t_interval(numbers: Sequence[float]) -> Interval:
    """Mean of two numbers or more with its 95 % t-interval."""
    values = np.array(numbers)
    degrees = len(values) - 1
    quantile = STUDENT_T[degrees - 1] if degrees <= len(STUDENT_T) else 1.96 + 2.5 / degrees
    half, middle = float(quantile * values.std(ddof=1) / np.sqrt(len(values))), float(values.mean())
    return Interval(value=middle, low=middle - half, high=middle + half)


def _over_seeds(intervals: list[Interval]) -> Interval:
    if len(intervals) == 1:
        return intervals[0]
    found = t_interval([interval.value for interval in intervals])
    return Interval(value=found.value, low=max(0.0, found.low), high=min(1.0, found.high))


def _front_probability(selected: list[Row], fresh: list[list[Row]], draws: int, seed: int) -> Array:
    """[N]: each draw takes one fresh seed of every trial at random, and its accuracies from normal distributions fitted to their intervals."""
    if not selected:
        return np.zeros(0)
    rng = np.random.default_rng(seed)
    hits = np.zeros(len(selected))
    fixed = np.array([[row.cost.kv_bytes_per_token, row.cost.throughput_ratio.value] for row in selected if row.cost is not None])
    spans = [[_normal(row) for row in rows] for rows in fresh]
    for _ in range(draws):
        drawn = [seeds[rng.integers(len(seeds))] for seeds in spans]
        accuracies = np.array([rng.normal(middle, scale) for middle, scale in drawn]).clip(0, 1)
        hits += np.asarray(pareto.weakly_non_dominated(np.concatenate([fixed, accuracies], axis=1)))
    return hits / draws


def _normal(row: Row) -> tuple[Array, Array]:
    """Centre and standard deviation of mean accuracy and A_min."""
    both = pareto.accuracy_intervals(row)
    return np.array([one.value for one in both]), np.array([(one.high - one.low) / (2 * 1.959964) for one in both])


COLUMNS = (
    "trial", "label", "kv_kept", "throughput_ratio", "seeds",
    "mean_selected", "mean_fresh", "mean_fresh_low", "mean_fresh_high",
    "a_min_selected", "a_min_fresh", "a_min_fresh_low", "a_min_fresh_high", "a_min_each", "luck", "front_probability",
)  # fmt: skip


def record(one: Rescored) -> dict[str, Any]:
    """One line of `rescored.csv`."""
    row = one.selected
    assert row.cost is not None
    values = (
        row.trial, row.label, row.cost.kv_kept, row.cost.throughput_ratio.value, len(one.fresh),
        row.mean_accuracy, one.mean.value, one.mean.low, one.mean.high,
        row.a_min, one.a_min.value, one.a_min.low, one.a_min.high, [fresh.a_min for fresh in one.fresh], one.luck, one.probability,
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def csv_of(rescored: Sequence[Rescored]) -> bytes:
    """`rescored.csv`: a line per trial; the A_min of each seed as a JSON list."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in rescored:
        writer.writerow([json.dumps(value) if isinstance(value, list) else value for value in record(one).values()])
    return stream.getvalue().encode()
