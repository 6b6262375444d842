"""Requirements on a trial ("kv_kept <= 0.15") and the best trial that meets them: the words behind `--require`, `--best` and `--sort`.

A column is a name of the flat table (`results/README.md`): in full (``cost.kv_kept``), or its last part where only one column ends in it
(``kv_kept``), or one of the short names in `SHORT`. A trial whose column is empty meets no requirement on it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mitigate.config import ConfigError
from mitigate.config_files import did_you_mean
from mitigate.rows import Row

SHORT = {
    "kv": "cost.kv_bytes_per_token",
    "kept": "cost.kv_kept",
    "speed": "cost.throughput_ratio.value",
    "throughput_ratio": "cost.throughput_ratio.value",
    "mean": "mean_accuracy",
}
LESS_IS_BETTER = ("kv_bytes_per_token", "kv_kept", "kv_constant_bytes", "kv_bytes_at_context", "kv_bytes_counted", "gap", "gap_low", "gap_high", "final_loss")
_LESS_IS_BETTER_LAST = re.compile(r"(_s|nll|\bspread\.value|\bgap\.value)$")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
}
_FRACTION = re.compile(r"mean_accuracy|a_min(_low|_high)?|gap|curve\.p_value|\w+\.((mean|a_min)\.\w+|a_min_cross_fitted|(gap|spread)\.value)")
_BARELY = 1e-9  # a strict bound that is just met
_FORM = re.compile(r"\s*([\w.]+)\s*(<=|>=|==|!=|<|>|=)\s*(\S+?)\s*(%?)\s*")


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """``column operator value``; fractions are plain numbers (0.15, or 15 % when asked for), bytes and tokens per second as in the table."""

    column: str
    operator: str
    value: float

    def __str__(self) -> str:
        return f"{self.column} {self.operator} {self.value:g}"

    def holds(self, value: float) -> bool:
        """Whether a number meets it."""
        return _OPERATORS[self.operator](value, self.value)


def parse(text: str, *, option: str = "--require") -> Requirement:
    """A requirement from its text, which was given as `option`.

    Raises:
        ConfigError: it is not ``COLUMN OPERATOR NUMBER``.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ConfigError(f'{option} must be "COLUMN OPERATOR NUMBER" such as "kv_kept <= 0.15", got {text!r}')
    column, sign, number, percent = match.groups()
    if sign == "=":
        raise ConfigError(f'{option} must use one of {" ".join(_OPERATORS)}, got "=" in {text!r}')
    try:
        value = float(number)
    except ValueError:
        raise ConfigError(f"{option} must compare with a number, got {number!r} in {text!r}") from None
    if value != value:
        raise ConfigError(f"{option} must compare with a number, got {number!r} in {text!r}")
    return Requirement(column=column, operator=sign, value=value / 100 if percent else value)


def check_possible(wanted: Requirement, *, option: str = "--require") -> None:
    """ConfigError for an unknown column, or where no number that the column can hold meets the requirement: accuracies lie between 0 and 1."""
    column = planned_column(wanted.column, option=option)
    if _FRACTION.fullmatch(column) and not any(wanted.holds(value) for value in (0.0, min(max(wanted.value, 0.0), 1.0), 1.0)):
        raise ConfigError(f"{option}: {wanted.column} lies between 0 and 1, so no trial can meet {wanted}")


def column_of(name: str, rows: Sequence[Row], *, option: str = "--require") -> str:
    """The full name of a numeric column.

    Raises:
        ConfigError: no finished row has it, or several columns end in `name`.
    """
    known = sorted({key for row in rows if row.status == "ok" for key, value in row.to_record().items() if _is_number(value)})
    return _among(name, known, option)


@lru_cache
def planned_column(name: str, *, option: str = "--require") -> str:
    """The full name of a numeric column of the table that a study will have, before it has rows. ConfigError as for `column_of`."""
    from mitigate import results  # imports pyarrow

    known = sorted(key for key, kind in results.columns().items() if str(kind) in ("int64", "double") and not key.startswith("config."))
    return _among(name, known, option)


def violation(row: Row, wanted: Requirement) -> float:
    """By how much a finished row breaks a requirement, in the column's unit: 0 or less if it does not; 1 if the row has no such number."""
    value = value_of(row, planned_column(wanted.column))
    if value is None:
        return 1.0
    signed = {"<=": value - wanted.value, "<": value - wanted.value, ">=": wanted.value - value, ">": wanted.value - value}
    amount = signed.get(wanted.operator, abs(value - wanted.value) if wanted.operator == "==" else 0.0)
    return min(amount, 0.0) if wanted.holds(value) else max(amount, _BARELY)


def _among(name: str, known: list[str], option: str) -> str:
    if name in known:
        return name
    if SHORT.get(name) in known:
        return SHORT[name]
    ends = [key for key in known if key.rsplit(".", 1)[-1] == name or key.removesuffix(".value").rsplit(".", 1)[-1] == name]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise ConfigError(f"{option}: {name!r} may be any of {', '.join(ends)}; write one of these")
    if not known:
        raise ConfigError(f"{option}: no finished trial has metrics, so none has {name!r}")
    lasts = sorted({key.removesuffix(".value").rsplit(".", 1)[-1] for key in known} | set(SHORT))
    hint = did_you_mean(name, lasts)
    raise ConfigError(f"{option}: there is no column {name!r}{hint if 'did you mean' in hint else '; results/README.md lists them'}")


def value_of(row: Row, column: str) -> float | None:
    """A row's number in a column given by its full name; None where it has none."""
    value = row.to_record().get(column)
    return float(value) if isinstance(value, (int, float)) and _is_number(value) else None


def less_is_better(column: str) -> bool:
    """Whether a smaller number is the better one in this column: bytes, gaps, losses and seconds."""
    return column.removesuffix(".value").rsplit(".", 1)[-1] in LESS_IS_BETTER or bool(_LESS_IS_BETTER_LAST.search(column))


def meeting(rows: Sequence[Row], requirements: Sequence[Requirement]) -> list[Row]:
    """The finished rows that meet every requirement, in the order given; ConfigError for an unknown column."""
    checks = [(column_of(wanted.column, rows), _OPERATORS[wanted.operator], wanted.value) for wanted in requirements]
    return [
        row
        for row in rows
        if row.status == "ok" and all((value := value_of(row, column)) is not None and holds(value, bound) for column, holds, bound in checks)
    ]


def best(rows: Sequence[Row], column: str, requirements: Sequence[Requirement] = ()) -> Row:
    """The row with the best value in `column` among those that meet the requirements; of equals the first.

    Raises:
        ConfigError: an unknown column, or no row meets the requirements; the message then says how close the nearest trial comes to each.
    """
    full = column_of(column, rows, option="--best")
    found = [row for row in meeting(rows, requirements) if value_of(row, full) is not None]
    if not found:
        raise ConfigError(f"no finished trial meets {' and '.join(map(str, requirements)) or 'this'}{_nearest(rows, requirements)}")
    sign = 1 if less_is_better(full) else -1
    return min(found, key=lambda row: sign * (value_of(row, full) or 0.0))


def _nearest(rows: Sequence[Row], requirements: Sequence[Requirement]) -> str:
    parts = []
    for wanted in requirements:
        values = [value for row in rows if row.status == "ok" and (value := value_of(row, column_of(wanted.column, rows))) is not None]
        if values:
            parts.append(f"{wanted.column} runs from {min(values):.3g} to {max(values):.3g}")
    return f"; {', '.join(parts)}" if parts else ""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
