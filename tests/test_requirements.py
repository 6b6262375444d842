"""Requirements read as written, columns found by their short names, the best row chosen in the right direction."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_rows import fake_failure, fake_rows

from mitigate import requirements, results
from mitigate.config import ConfigError, VariantConfig

ROWS = fake_rows(12, infeasible=0.0)


@pytest.mark.parametrize(
    ("text", "column", "sign", "value"),
    [("kv_kept <= 0.15", "kv_kept", "<=", 0.15), ("kv_kept<=15%", "kv_kept", "<=", 0.15), (" a_min>.5 ", "a_min", ">", 0.5), ("trial != 3", "trial", "!=", 3)],
)
def test_a_requirement_is_read(text: str, column: str, sign: str, value: float) -> None:
    found = requirements.parse(text)
    assert (found.column, found.operator, found.value) == (column, sign, value)
    assert requirements.parse(str(found)) == found


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("kv_kept", 'must be "COLUMN OPERATOR NUMBER"'),
        ("kv_kept = 0.1", 'got "="'),
        ("kv_kept <= low", "compare with a number, got 'low'"),
        ("a_min >= nan", "compare with a number"),
        ("", "must be"),
    ],
)
def test_a_bad_requirement_is_one_line(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        requirements.parse(text)


@pytest.mark.parametrize("text", ["kv_kept", "kv_kept = 0.1", "kv_kept <= low", "a_min >= nan", "foo <= 1", "a_min >= 2", "a_min_cross_fitted > 0.1"])
def test_every_bad_requirement_names_where_it_was_given(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^SearchConfig\.require") as caught:
        requirements.check_possible(requirements.parse(text, option="SearchConfig.require"), option="SearchConfig.require")
    assert "--require" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "possible"),
    [
        ("a_min >= 2", False),
        ("a_min >= 95", False),  # without its %
        ("a_min > 1", False),
        ("a_min >= 1", True),
        ("mean < 0", False),
        ("mean <= 0", True),
        ("gap == 1.5", False),
        ("gap == 0.3", True),
        ("a_min != 2", True),
        ("outer.a_min.low >= 1.01", False),
        ("in_sequence.mean.value > 100%", False),
        ("curve.p_value < 0", False),
        ("throughput_ratio >= 2", True),
        ("final_loss < 0", True),
        ("kv_bytes_per_token <= 64", True),
    ],
)
def test_an_accuracy_outside_of_0_to_1_is_impossible(text: str, possible: bool) -> None:
    wanted = requirements.parse(text)
    if possible:
        requirements.check_possible(wanted)
        return
    with pytest.raises(ConfigError, match=rf"^--require: {wanted.column} lies between 0 and 1, so no trial can meet {wanted}$"):
        requirements.check_possible(wanted)


def test_every_column_that_is_a_fraction_is_known_as_one() -> None:
    """By the unit that results/README.md gives, but for fractions of bytes, and for ends of intervals that may lie outside."""
    text = (Path(__file__).parents[1] / "results" / "README.md").read_text(encoding="utf-8")
    fractions = set(re.findall(r"^\| `([^`]+)` \| fraction \|", text, re.M)) & {key for key, kind in results.columns().items() if str(kind) == "double"}
    known = {name for name in results.columns() if requirements._FRACTION.fullmatch(name)}
    free = {"cost.kv_kept"} | {f"{name}_{end}" for name in ("gap",) for end in ("low", "high")}
    free |= {f"{protocol}.{name}.{end}" for protocol in ("outer", "in_sequence") for name in ("gap", "spread") for end in ("low", "high")}
    assert {name for name in fractions - free if not name.startswith("config.")} == known - {"curve.p_value"}


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("a_min", "a_min"),
        ("kv_kept", "cost.kv_kept"),
        ("kept", "cost.kv_kept"),
        ("cost.kv_kept", "cost.kv_kept"),
        ("mean", "mean_accuracy"),
        ("throughput_ratio", "cost.throughput_ratio.value"),
        ("kv_constant_bytes", "cost.kv_constant_bytes"),
    ],
)
def test_columns_are_found_by_short_names(name: str, column: str) -> None:
    assert requirements.column_of(name, ROWS) == column


def test_unknown_and_ambiguous_columns_say_so() -> None:
    with pytest.raises(ConfigError, match=r"no column 'kv_kpt'; did you mean 'kv_kept'"):
        requirements.column_of("kv_kpt", ROWS)
    with pytest.raises(ConfigError, match="no column 'zzz'; results/README"):
        requirements.column_of("zzz", ROWS)
    with pytest.raises(ConfigError, match=r"'a_min_cross_fitted' may be any of in_sequence\.a_min_cross_fitted, outer"):
        requirements.column_of("a_min_cross_fitted", ROWS)
    with pytest.raises(ConfigError, match="no finished trial has metrics"):
        requirements.column_of("a_min", [fake_failure(0, "x", VariantConfig())])


def test_the_best_row_is_the_best_that_meets_them() -> None:
    wanted = [requirements.parse("kv_kept <= 0.15")]
    allowed = [row for row in ROWS if row.cost is not None and row.cost.kv_kept <= 0.15]
    assert requirements.meeting(ROWS, wanted) == allowed
    assert requirements.best(ROWS, "a_min", wanted).a_min == max(row.a_min or 0 for row in allowed)
    assert requirements.best(ROWS, "gap").gap == min(row.gap or 0 for row in ROWS)
    assert requirements.best(ROWS, "kept").cost.kv_kept == min(row.cost.kv_kept for row in ROWS if row.cost)  # type: ignore[union-attr]


def test_none_found_says_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"no finished trial meets kv_kept <= 0\.001; kv_kept runs from 0\.\d+ to 1$"):
        requirements.best(ROWS, "a_min", [requirements.parse("kv_kept <= 0.001")])
