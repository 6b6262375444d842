"""Two trials of a study on the same prompts: paired differences with intervals, as plain data and as text.

Both trials answered the same queries, so their errors go together and a difference is known better than either number: the bootstrap draws the same prompts
for both. Without the stored outcomes only the rows' numbers can be subtracted, and no interval is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mitigate import pareto, stats
from mitigate.config import ConfigError
from mitigate.outcomes import OUTCOMES_FILE, Answers, read
from mitigate.report import data
from mitigate.report.tables import WIDTH, wrapped
from mitigate.rows import PROTOCOLS, Row

REPLICATES = 2000


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A number of both trials and A minus B. `low` and `high` are the ends of a paired 95 % interval, None where there is none."""

    name: str
    a: float
    b: float
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`sections` are (heading, differences): cost, both protocols together, each protocol, and the residues of each. `note` says what they rest on."""

    a: Row
    b: Row
    paired: bool
    note: str
    sections: list[tuple[str, list[Difference]]]


def compare(study_dir: Path, a: Row, b: Row) -> Comparison:
    """A minus B.

    Raises:
        ConfigError: a trial has no sweep, they share no protocol, their prompts differ, or an outcomes file is damaged or of other prompts.
    """
    protocols = _shared_protocols(a, b)
    stored = [study_dir / "trials" / f"{row.trial if row.trial is not None else -1:04d}" / OUTCOMES_FILE for row in (a, b)]
    missing = [path for path in stored if not path.is_file()]
    if missing:
        which = " and ".join(str(path.relative_to(study_dir)) for path in missing)
        lack = f"No {which}: these are differences of the rows' numbers, without paired intervals. Trials that run from now on store what it takes."
        return Comparison(a=a, b=b, paired=False, note=lack, sections=[_cost(a, b), *[_unpaired(a, b, name) for name in protocols]])
    found_a, found_b = (_checked(path, row, protocols) for path, row in zip(stored, (a, b), strict=True))
    sections = [_cost(a, b)]
    examples = [found_a[name] for name in protocols]  # the protocols place the same prompts
    alike = len({one.correct_ER.shape for one in examples}) == 1 and all((one.cluster_E == examples[0].cluster_E).all() for one in examples)
    if len(protocols) > 1 and alike:
        all_a, all_b = (np.concatenate([found[name].correct_ER for name in protocols], axis=1) for found in (found_a, found_b))
        both = stats.paired_difference(all_a, all_b, cluster_E=found_a[protocols[0]].cluster_E, replicates=REPLICATES)
        heading = "Both protocols: average mean, lower A_min"
        sections.append((heading, _scores(both, all_a, all_b, ("mean", "a_min", "a_min_cross_fitted"))))
    residues = []
    for name in protocols:
        a_ER, b_ER = found_a[name].correct_ER, found_b[name].correct_ER
        paired = stats.paired_difference(a_ER, b_ER, cluster_E=found_a[name].cluster_E, replicates=REPLICATES)
        words = data.PROTOCOL_WORDS[name]
        sections.append((words.capitalize(), _scores(paired, a_ER, b_ER, ("mean", "a_min", "a_min_cross_fitted", "gap"))))
        residues.append((f"{words.capitalize()}, by residue", _residues(paired, a_ER, b_ER)))
    prompts = len(np.unique(found_a[protocols[0]].cluster_E))
    note = (
        f"A minus B on the same {prompts} prompts, drawn together in {REPLICATES} bootstrap replicates. "
        "A star: the interval leaves out 0, each one taken alone. The minimum of noisy numbers is biased low, alike in both only where their curves are "
        "alike: hold A_min against the cross-fitted one."
    )
    return Comparison(a=a, b=b, paired=True, note=note, sections=[*sections, *residues])


def _shared_protocols(a: Row, b: Row) -> list[str]:
    """Protocols that both were swept under on the same prompts."""
    for row in (a, b):
        if not row.scores:
            why = f" ({row.error.kind}: {row.error.message.splitlines()[0] if row.error.message else ''})" if row.error else ""
            raise ConfigError(f"compare: trial {row.trial} is {row.status}{why} and has no sweep to compare")
    shared = [name for name in PROTOCOLS if all(any(score.protocol == name for score in row.scores) for row in (a, b))]
    if not shared:
        raise ConfigError(f"compare: trials {a.trial} and {b.trial} were swept under different protocols")
    for name in shared:
        first, second = (row.score(name).prompts_sha256 for row in (a, b))
        if first != second:
            words = data.PROTOCOL_WORDS[name]
            raise ConfigError(f"compare: trials {a.trial} and {b.trial} were scored on different prompts under {words} ({first[:8]} and {second[:8]})")
    return shared


def _checked(path: Path, row: Row, protocols: Sequence[str]) -> Mapping[str, Answers]:
    found = read(path)
    for name in protocols:
        if name not in found or found[name].prompts_sha256 != row.score(name).prompts_sha256:
            has = found[name].prompts_sha256[:8] if name in found else "none"
            words = data.PROTOCOL_WORDS[name]
            raise ConfigError(f"{path} does not belong to the result beside it: prompts under {words} are {row.score(name).prompts_sha256[:8]}, it has {has}")
    return found


def _cost(a: Row, b: Row) -> tuple[str, list[Difference]]:
    found = []
    if a.cost is not None and b.cost is not None:
        pairs = [
            ("KV bytes per token", a.cost.kv_bytes_per_token, b.cost.kv_bytes_per_token),
            ("KV kept, fraction", a.cost.kv_kept, b.cost.kv_kept),
            ("tokens/s, relative to full", a.cost.throughput_ratio.value, b.cost.throughput_ratio.value),
        ]
        found = [Difference(name=name, a=one, b=other, value=one - other) for name, one, other in pairs]
    return "Cost (KV in closed form; throughput was measured apart, differences of some 10 % mean nothing)", found


_WORDS = {"mean": "mean accuracy", "a_min": "A_min", "a_min_cross_fitted": "A_min, cross-fitted", "gap": "gap"}


def _scores(paired: stats.PairedDifference, a_ER: np.ndarray, b_ER: np.ndarray, names: Sequence[str]) -> list[Difference]:
    found = []
    for name in names:
        estimate: stats.Estimate = getattr(paired, name)
        a, b = (_plain(side.mean(axis=0), name) for side in (a_ER, b_ER))
        found.append(Difference(name=_WORDS[name], a=a, b=b, value=estimate.value, low=estimate.low, high=estimate.high))
    return found


def _plain(accuracy_R: np.ndarray, name: str) -> float:
    """A score of one trial; the cross-fitted A_min needs halves of the prompts and is only known as a difference."""
    values = {"mean": accuracy_R.mean(), "a_min": accuracy_R.min(), "gap": np.ptp(accuracy_R), "a_min_cross_fitted": np.nan}
    return float(values[name])


def _residues(paired: stats.PairedDifference, a_ER: np.ndarray, b_ER: np.ndarray) -> list[Difference]:
    lines = zip(a_ER.mean(axis=0), b_ER.mean(axis=0), paired.accuracy_R, paired.accuracy_low_R, paired.accuracy_high_R, strict=True)
    return [
        Difference(name=f"residue {place}", a=float(a), b=float(b), value=float(value), low=float(low), high=float(high))
        for place, (a, b, value, low, high) in enumerate(lines)
    ]


def _unpaired(a: Row, b: Row, protocol: str) -> tuple[str, list[Difference]]:
    one, other = a.score(protocol), b.score(protocol)
    pairs = [
        ("mean accuracy", one.mean.value, other.mean.value),
        ("A_min", one.a_min.value, other.a_min.value),
        ("A_min, cross-fitted", one.a_min_cross_fitted, other.a_min_cross_fitted),
        ("gap", one.gap.value, other.gap.value),
    ]
    return data.PROTOCOL_WORDS[protocol].capitalize(), [Difference(name=name, a=x, b=y, value=x - y) for name, x, y in pairs]


def text(found: Comparison) -> str:
    """The comparison for the terminal, at most `WIDTH` columns."""
    lines = [f"{letter}  {data.named(row, 60)}: {_variant(row)}" for letter, row in (("A", found.a), ("B", found.b))]
    lines = [line for long in lines for line in wrapped(long)]
    lines += ["", f"{'':30}{'A':>10}{'B':>10}{'A - B':>11}" + ("   95 %" if found.paired else ""), "─" * min(WIDTH, 84)]
    for heading, differences in found.sections:
        lines.append(heading)
        lines += [f"  {_one(one)}" for one in differences]
    return "\n".join([*lines, "", *wrapped(found.note)])


def _one(one: Difference) -> str:
    a, b = (f"{'-':>10}" if value != value else f"{value:>10.3f}" if abs(value) < 10 else f"{value:>10,.5g}" for value in (one.a, one.b))
    interval = f"   [{one.low:+.3f}, {one.high:+.3f}]{' *' if one.clear else ''}" if one.low is not None and one.high is not None else ""
    change = f"{one.value:+11.3f}" if abs(one.value) < 10 else f"{one.value:+11,.5g}"
    return f"{one.name:28}{a}{b}{change}{interval}"


def _variant(row: Row) -> str:
    """What is not at its default, in words."""
    return data.variant_words(pareto.variant_of(row))


def plain(found: Comparison) -> dict[str, Any]:
    """The comparison for `--json`."""
    sections = [{"heading": heading, "differences": [_clean(asdict(one)) for one in differences]} for heading, differences in found.sections]
    return {"a": found.a.trial, "b": found.b.trial, "paired": found.paired, "note": found.note, "sections": sections}


def _clean(one: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and value != value else value for key, value in one.items()}
