"""Study folders: what is read, what is written, and that every column is documented."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mitigate import pareto, rescored, results
from mitigate.config import ConfigError
from mitigate.files import write_atomic
from mitigate.rows import Row
from tests.fake_rows import fake_rows

DOCUMENTED = Path(__file__).parents[1] / "results" / "README.md"


def make_study(folder: Path, rows: list[Row], config: dict[str, object] | None = None) -> Path:
    """A study as a search leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"name": folder.name}))
    for row in rows:
        place = folder / "trials" / f"{row.trial:04d}"
        place.mkdir(parents=True)
        (place / "result.json").write_text(row.to_json())
    return folder


def test_rows_come_back_in_trial_order_without_the_running_ones(tmp_path: Path) -> None:
    rows = fake_rows(12)
    study = make_study(tmp_path / "quick", rows[::-1])
    (study / "trials" / "0012").mkdir()
    assert results.read_rows(study) == rows
    assert results.read_config(study) == {"name": "quick"}


def test_trial_numbers_beyond_the_padding_sort_as_numbers(tmp_path: Path) -> None:
    rows = [row.model_copy(update={"trial": trial}) for row, trial in zip(fake_rows(3), (9999, 10000, 2), strict=True)]
    assert [row.trial for row in results.read_rows(make_study(tmp_path / "long", rows))] == [2, 9999, 10000]


def test_missing_folder_suggests_a_sibling_study(tmp_path: Path) -> None:
    make_study(tmp_path / "quickstart", [])
    (tmp_path / "quickstat").mkdir()
    with pytest.raises(ConfigError, match=r"quickstrat is no study: there is no such folder; did you mean 'quickstart'\?$"):
        results.read_rows(tmp_path / "quickstrat")
    with pytest.raises(ConfigError, match=r"no config.json; did you mean 'quickstart'\?$"):
        results.read_rows(tmp_path / "quickstat")


def test_no_sibling_at_all_is_still_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no study in") as error:
        results.read_rows(tmp_path / "nothing")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="no such folder"):
        results.read_rows(tmp_path / "not" / "even" / "a" / "parent")


@pytest.mark.parametrize("text", ["", "{", '{"status": "ok"}', "[]", "\ufeff?"])
def test_damaged_result_names_its_file_in_one_line(tmp_path: Path, text: str) -> None:
    study = make_study(tmp_path / "quick", fake_rows(2))
    (study / "trials" / "0001" / "result.json").write_text(text)
    with pytest.raises(ConfigError, match=r"0001/result.json is not a Row") as error:
        results.read_rows(study)
    assert "\n" not in str(error.value)


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    study = make_study(tmp_path / "quick", [fake_rows(1)[0].model_copy(update={"schema_version": 99})])
    with pytest.raises(ConfigError, match="schema_version 99"):
        results.read_rows(study)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_damaged_config_is_one_line(tmp_path: Path, text: str) -> None:
    study = make_study(tmp_path / "quick", [])
    (study / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config.json"):
        results.read_config(study)


def test_tables_hold_every_value(tmp_path: Path) -> None:
    rows = fake_rows(20, seed=3)
    assert any(row.status == "infeasible" for row in rows)
    paths = results.write_tables(tmp_path, rows)
    assert [path.name for path in paths] == ["trials.parquet", "trials.csv", "front.csv", "front.json"]
    lines = pq.read_table(tmp_path / "trials.parquet").to_pylist()
    with (tmp_path / "trials.csv").open(newline="", encoding="utf-8") as stream:
        cells = list(csv.DictReader(stream))
    for row, line, cell in zip(rows, lines, cells, strict=True):
        for key, value in row.to_record().items():
            if key in line:
                assert line[key] == value
                expected = "" if value is None else json.dumps(value) if isinstance(value, (list, bool)) else str(value)
                assert cell[key] == expected
            else:
                assert value is None and key in ("cost", "error", "curve")


def test_parquet_keeps_lists_and_csv_writes_json(tmp_path: Path) -> None:
    rows = fake_rows(1)
    results.write_tables(tmp_path, rows)
    accuracy = pq.read_table(tmp_path / "trials.parquet").column("outer.accuracy")[0].as_py()
    assert accuracy == rows[0].score("outer").accuracy
    with (tmp_path / "trials.csv").open(newline="", encoding="utf-8") as stream:
        assert json.loads(next(csv.DictReader(stream))["outer.accuracy"]) == accuracy


def test_front_files_hold_the_front(tmp_path: Path) -> None:
    rows = fake_rows(20, seed=3)
    results.write_tables(tmp_path, rows)
    content = json.loads((tmp_path / "front.json").read_text())
    assert [Row.from_json(json.dumps(row)) for row in content["rows"]] == pareto.front(rows)
    assert content["hypervolume"] == pareto.hypervolume(rows)
    assert [objective["sense"] for objective in content["objectives"]] == ["min", "max", "max", "max"]
    with (tmp_path / "front.csv").open(newline="", encoding="utf-8") as stream:
        assert [int(line["trial"]) for line in csv.DictReader(stream)] == [row.trial for row in pareto.front(rows)]


@pytest.mark.parametrize("count", [0, 1])
def test_columns_do_not_depend_on_the_rows(tmp_path: Path, count: int) -> None:
    results.write_tables(tmp_path, fake_rows(count))
    schema = pq.read_schema(tmp_path / "trials.parquet")
    assert [name for name in schema.names if not name.startswith("versions.")] == list(results.columns())
    assert {name: schema.field(name).type for name in results.columns()} == results.columns()


def test_one_protocol_leaves_the_other_empty(tmp_path: Path) -> None:
    line = results.table(fake_rows(2, protocols=["outer"])).to_pylist()[1]
    assert line["outer.mean.value"] is not None and line["in_sequence.mean.value"] is None and line["in_sequence.accuracy"] is None


def test_unknown_config_keys_are_kept_even_when_types_mix() -> None:
    rows = fake_rows(2)
    rows = [row.model_copy(update={"config": row.config | {"later": value}}) for row, value in zip(rows, (1, "two"), strict=True)]
    assert results.table(rows).column("config.later").to_pylist() == ["1", '"two"']


def published(folder: Path, rows: list[Row]) -> Path:
    """What a study leaves in a repository: config and tables, no trials."""
    study = make_study(folder, rows)
    results.write_tables(study, rows)
    shutil.rmtree(study / "trials")
    return study


@pytest.mark.parametrize("only", [None, *results.TABLES])
@pytest.mark.parametrize("read", [results.read_config, results.read_rows, results.require_study, rescored.read, lambda study: results.trial_row(study, 1)])
def test_a_published_extract_says_what_it_is(tmp_path: Path, read: Callable[[Path], object], only: str | None) -> None:
    rows = fake_rows(3, infeasible=0.0)
    study = published(tmp_path / "extract", rows)
    for name in results.TABLES:
        if only not in (None, name):
            (study / name).unlink()
    held = len(pareto.front(rows)) if only in ("front.csv", "front.json") else 3
    counted = "1 trial" if held == 1 else f"{held} trials"
    with pytest.raises(ConfigError, match=rf"extract holds published tables of {counted} but not the trials themselves, so nothing can be derived from it$"):
        read(study)


def test_the_committed_extracts_are_known_as_such() -> None:
    for folder, trials in ((DOCUMENTED.parent / "reference", 16), (DOCUMENTED.parent / "reference" / "strides", 44)):
        with pytest.raises(ConfigError, match=rf"published tables of {trials} trials"):
            results.require_study(folder)


def test_a_study_without_rows_in_its_tables_is_a_new_one(tmp_path: Path) -> None:
    study = make_study(tmp_path / "new", [])
    results.write_tables(study, [])
    assert results.read_rows(study) == []
    results.write_tables(study, fake_rows(2))
    (study / "trials" / "0000").mkdir(parents=True)  # it runs
    assert results.read_rows(study) == []


@pytest.mark.parametrize("damage", [None, b"\xff,\n", b"{"])
@pytest.mark.parametrize("only", results.TABLES)
def test_tables_with_rows_are_never_replaced_by_tables_without(tmp_path: Path, only: str, damage: bytes | None) -> None:
    results.write_tables(tmp_path, fake_rows(3))
    for name in results.TABLES:
        if name != only:
            (tmp_path / name).unlink()
    if damage is not None:
        (tmp_path / only).write_bytes(damage)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    if damage == b"{" and only.endswith(".csv"):
        results.write_tables(tmp_path, [])  # a header and no row
        return
    with pytest.raises(ConfigError, match=rf"{only} holds \d rows? and would be written again with none"):
        results.write_tables(tmp_path, [])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_atomic(tmp_path / "a.txt", b"old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_every_column_is_documented_and_nothing_else() -> None:
    text = DOCUMENTED.read_text(encoding="utf-8")
    tables = [part.split("\n\n")[0] for part in text.split("| column | unit | meaning |\n|---|---|---|\n")[1:]]
    lines = [line for table in tables for line in table.splitlines() if line.startswith("|")]
    found = [re.fullmatch(r"\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|", line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    documented = [match.group(1) for match in found if match]
    expected = {"versions.<package>" if name.startswith("versions.") else name for name in results.table(fake_rows(3)).column_names}
    assert len(documented) == len(set(documented))
    assert set(documented) == expected


def test_every_column_of_rescored_trials_is_documented() -> None:
    section = DOCUMENTED.read_text(encoding="utf-8").split("## Re-scored trials")[1].split("\n## ")[0]
    named = {name for line in section.splitlines() if line.startswith("| `") for name in re.findall(r"`([^`]+)`", line.split("|")[1])}
    assert named == set(rescored.COLUMNS)
