"""The search space as the trials saw it, and how much of each objective one parameter explains alone. Plain data, no drawing; Optuna is not needed.

Importance is eta squared of a one-way analysis of variance: the share of an objective's variance over the trials that lies between the levels of one
parameter. It is blind to interactions, and where the sampler tried levels together it gives one the other's credit. More levels and fewer trials raise it
by chance alone, so each share comes with what chance reaches: the objective is shuffled over the trials, and the threshold is the quantile that a panel of m
shuffled parameters passes anywhere in one of 20 studies (Bonferroni: 1 - 0.05 / m).

Shapes: N trials, L levels, B shuffles.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mitigate import pareto
from mitigate.config import VariantConfig
from mitigate.rows import Row

LEAST_TRIALS = 8  # with fewer no importance is told
SHUFFLES = 2000
CHANCE = 0.05  # of a panel to hold a parameter beyond its threshold though none matters


_FIELDS = [part for field in fields(VariantConfig) for part in ((field.name, "overlap") if field.name == "stride" else (field.name,))]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One axis of the space: its levels in order, and the level of each trial."""

    name: str
    levels: list[str]
    level_N: list[int]


@dataclass(frozen=True, kw_only=True)
class Importance:
    """What a parameter explains of an objective. `share` and `threshold` are fractions of the variance over `trials`; `p_value` is of the permutation test."""

    objective: str
    parameter: str
    levels: int
    trials: int
    share: float
    threshold: float
    p_value: float

    @property
    def beyond_chance(self) -> bool:
        """Whether the share passes what chance reaches."""
        return self.share > self.threshold


def compressed(rows: Sequence[Row]) -> list[Row]:
    """The finished trials within the reach of a space: all but full attention."""
    return [row for row in rows if pareto.objectives(row) is not None and not pareto.is_full(row)]


def parameters(rows: Sequence[Row], space: dict[str, Any] | None = None) -> list[Parameter]:
    """The parameters that vary among the rows, in the order of `VariantConfig`'s fields.

    Args:
        rows: compressed ones.
        space: `SearchConfig.space`, parameter to choices; its keys are taken. Without one, the fields of the variants that differ.
    """
    variants = [pareto.variant_of(row) for row in rows]
    known = space or {name: () for variant in variants for name in variant if name != "compress"}
    names = sorted(known, key=lambda name: (_FIELDS.index(name) if name in _FIELDS else len(_FIELDS), name))
    found = []
    for name in names:
        values = [_value(variant, name, (space or {}).get(name, ())) for variant in variants]
        distinct = sorted(set(values), key=_order)
        if len(distinct) > 1:
            found.append(Parameter(name=name, levels=[str(value) for value in distinct], level_N=[distinct.index(value) for value in values]))
    return found


def _value(variant: dict[str, Any], name: str, choices: Sequence[Any]) -> Any:
    """A parameter's value in a variant; `overlap`, the window in strides, as a fraction."""
    if name != "overlap":
        value = variant.get(name)
        return value if isinstance(value, str | int | float) else json.dumps(value)
    window, stride = variant.get("window", 1), variant.get("stride", 1)
    fits = (choice for choice in choices if math.ceil(stride * Fraction(str(choice))) == window)
    return next(fits, str(Fraction(window, stride)))


def _order(value: Any) -> tuple[int, float, str]:
    """Numbers and fractions by size, then words: what is off first, the others by name."""
    try:
        return 0, float(Fraction(str(value))), ""
    except (ValueError, ZeroDivisionError):
        return 1, 0.0, "" if value == "none" else str(value)


def importances(rows: Sequence[Row], space: dict[str, Any] | None = None, *, shuffles: int = SHUFFLES, seed: int = 0) -> list[Importance]:
    """Every parameter against every objective, in the order of `pareto.OBJECTIVES`; KV bytes on a log scale. Empty below `LEAST_TRIALS` trials."""
    used = compressed(rows)
    axes = parameters(used, space)
    if len(used) < LEAST_TRIALS or not axes:
        return []
    values = np.array([pareto.objectives(row) for row in used])
    values[:, 0] = np.log2(values[:, 0])
    rng = np.random.default_rng(seed)
    order_BN = rng.permuted(np.tile(np.arange(len(used)), (shuffles, 1)), axis=1)
    return [
        _importance(objective.name, axis, values[:, place], order_BN, level=1 - CHANCE / len(axes))
        for (place, objective), axis in itertools.product(enumerate(pareto.OBJECTIVES), axes)
    ]


def _importance(objective: str, axis: Parameter, value_N: NDArray[np.float64], order_BN: NDArray[np.int64], level: float) -> Importance:
    share = float(eta_squared(value_N[None], axis.level_N)[0])
    null_B = eta_squared(value_N[order_BN], axis.level_N)
    p_value = (1 + int((null_B >= share - 1e-12).sum())) / (1 + len(null_B))
    threshold = float(np.quantile(null_B, level))
    return Importance(objective=objective, parameter=axis.name, levels=len(axis.levels), trials=len(value_N), share=share, threshold=threshold, p_value=p_value)


def eta_squared(value_BN: NDArray[np.float64], level_N: Sequence[int]) -> NDArray[np.float64]:
    """[B] share of the variance of each line of `value_BN` between the levels; 0 where nothing varies."""
    levels = np.asarray(level_N)
    member_NL = np.eye(levels.max() + 1)[levels]
    centred_BN = value_BN - value_BN.mean(axis=1, keepdims=True)
    count_L = member_NL.sum(axis=0)
    between_B = ((centred_BN @ member_NL) ** 2 / np.where(count_L > 0, count_L, 1)).sum(axis=1)
    total_B = (centred_BN**2).sum(axis=1)
    tiny = 1e-12 * np.maximum(1.0, (value_BN**2).sum(axis=1))
    return np.asarray(np.where(total_B > tiny, between_B / np.where(total_B > tiny, total_B, 1.0), 0.0))


def importance_note(rows: Sequence[Row], found: Sequence[Importance]) -> str:
    """What stands behind the shares, or why there are none, in a sentence."""
    count = len(compressed(rows))
    if not found:
        few = count < LEAST_TRIALS
        return f"{count} compressed trials: too few to tell (at least {LEAST_TRIALS})." if few else f"No parameter varies over {count} compressed trials."
    beyond = sum(one.beyond_chance for one in found)
    told = f"{beyond} of {len(found)} shares {'is' if beyond == 1 else 'are'} beyond chance"
    return f"{told} over {count} compressed trials; each parameter alone, interactions not seen."


@dataclass(frozen=True, kw_only=True)
class Level:
    """A level of a parameter: where it stands on its axis, in [0, 1], and how many trials took it."""

    name: str
    height: float
    on_front: int
    trials: int


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The trials as lines across the parameters. `height_NA` are levels in [0, 1] by trial and axis, trials of a level fanned out around it."""

    names: list[str]
    levels: list[list[Level]]
    height_NA: NDArray[np.float64]
    on_front: list[bool]
    rows: list[Row]


def parallel(rows: Sequence[Row], space: dict[str, Any] | None = None) -> Parallel:
    """Every finished compressed trial as a line across the parameters that vary."""
    used = compressed(rows)
    axes, best = parameters(used, space), {id(row) for row in pareto.front(rows)}
    on_front = [id(row) in best for row in used]
    columns, levels = list[NDArray[np.float64]](), list[list[Level]]()
    for place, axis in enumerate(axes):
        heights = np.linspace(0, 1, len(axis.levels))
        count = [sum(level == i for level in axis.level_N) for i in range(len(axis.levels))]
        good = [sum(level == i and ok for level, ok in zip(axis.level_N, on_front, strict=True)) for i in range(len(axis.levels))]
        levels.append([Level(name=name, height=h, on_front=g, trials=n) for name, h, g, n in zip(axis.levels, heights.tolist(), good, count, strict=True)])
        columns.append(np.asarray(heights[axis.level_N]) + _fan(axis.level_N, columns[place - 1] if place else None, 0.5 / max(len(axis.levels), 4)))
    height = np.stack(columns, axis=1) if columns else np.zeros((len(used), 0))
    return Parallel(names=[axis.name for axis in axes], levels=levels, height_NA=height, on_front=on_front, rows=used)


def _fan(level_N: Sequence[int], before_N: NDArray[np.float64] | None, reach: float) -> NDArray[np.float64]:
    """[N] small moves that set the lines of a level side by side, in the order in which they come from the axis before."""
    moved = np.zeros(len(level_N))
    for level in set(level_N):
        members = [i for i, own in enumerate(level_N) if own == level]
        if before_N is not None:
            members.sort(key=lambda i: before_N[i])
        spread = reach * min(1.0, len(members) / 12)
        moved[members] = np.linspace(-spread, spread, len(members)) if len(members) > 1 else 0.0
    return moved
