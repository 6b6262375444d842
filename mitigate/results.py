"""A study folder on disk: read its trials, write its tables.

`results/<study>/` holds `config.json` and one `trials/NNNN/result.json` for each finished trial. `write_tables` adds `trials.parquet`, `trials.csv`,
`front.csv` and `front.json`; `results/README.md` gives the meaning and unit of every column. A folder with tables and no `trials/` is a published extract:
it is read by people, and no command derives anything from it.
"""

from __future__ import annotations

import csv
import io
import json
import types
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ValidationError

from mitigate import pareto
from mitigate.config import ConfigError, TrialConfig
from mitigate.config_files import did_you_mean
from mitigate.files import write_atomic
from mitigate.rows import PROTOCOLS, SCHEMA_VERSION, ProtocolScore, Row

TABLES = ("trials.parquet", "trials.csv", "front.csv", "front.json")
_SCALARS = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


def is_study(path: Path) -> bool:
    """A folder with a `config.json`."""
    return (path / "config.json").is_file()


def require_study(study_dir: Path) -> None:
    """ConfigError with one line unless `study_dir` is a study: the nearest one beside it, or how much a published extract holds."""
    if is_study(study_dir):
        require_trials(study_dir)
        return
    parent = study_dir.absolute().parent
    siblings = sorted(path.name for path in parent.iterdir() if is_study(path)) if parent.is_dir() else []
    wrong = "is no study: it has no config.json" if study_dir.is_dir() else "is no study: there is no such folder"
    hint = did_you_mean(study_dir.absolute().name, siblings) if siblings else f"; there is no study in {study_dir.parent} yet"
    raise ConfigError(f"{study_dir} {wrong}{hint}")


def require_trials(study_dir: Path) -> None:
    """ConfigError where a folder has tables with rows and no trial at all: what a study published."""
    if any((study_dir / "trials").glob("*")):
        return
    held = max(rows_held(study_dir / name) for name in TABLES)
    if held:
        counted = "1 trial" if held == 1 else f"{held} trials"
        raise ConfigError(f"{study_dir} holds published tables of {counted} but not the trials themselves, so nothing can be derived from it")


def rows_held(table: Path) -> int:
    """Rows of a table that `write_tables` wrote, or of another CSV file; 0 where there is none. One that cannot be read holds at least one."""
    if not table.is_file():
        return 0
    try:
        if table.suffix == ".parquet":
            return int(pq.read_metadata(table).num_rows)
        if table.suffix == ".json":
            return len(json.loads(table.read_bytes())["rows"])
        with table.open(newline="", encoding="utf-8") as stream:
            return max(0, sum(1 for _ in csv.reader(stream)) - 1)
    except (csv.Error, ValueError, KeyError, TypeError, pa.ArrowException):
        return 1


def require_rows(path: Path, rows: int) -> None:
    """ConfigError where a table without rows would replace one that holds some."""
    if rows == 0 and (held := rows_held(path)):
        counted = "1 row" if held == 1 else f"{held} rows"
        raise ConfigError(f"{path} holds {counted} and would be written again with none, since no result is there; move it away first")


def read_config(study_dir: Path) -> dict[str, Any]:
    """The study's `config.json` as plain data; empty when the study has none.

    Raises:
        ConfigError: `study_dir` is no study, or a published extract, or the file is not a JSON object.
    """
    require_study(study_dir)
    path = study_dir / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def read_rows(study_dir: Path) -> list[Row]:
    """Rows of all finished trials, by trial number. A trial without `result.json` is still running and left out.

    Raises:
        ConfigError: `study_dir` is no study, or a published extract, or a result is not a Row of this schema.
    """
    require_study(study_dir)
    rows = [read_row(path) for path in sorted(study_dir.glob("trials/*/result.json"))]
    return sorted(rows, key=lambda row: (row.trial is None, row.trial or 0))


def read_row(path: Path) -> Row:
    try:
        row = Row.from_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path} is not a Row: {where + ': ' if where else ''}{first['msg']}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a Row: {error}") from None
    if row.schema_version != SCHEMA_VERSION:
        raise ConfigError(f"{path} has schema_version {row.schema_version}; this version of mitigate reads {SCHEMA_VERSION}")
    return row


def trial_row(study_dir: Path, trial: int) -> Row:
    """The Row of one finished trial of a study.

    Raises:
        ConfigError: `study_dir` is no study, or a published extract, or the trial has no result; names those that have.
    """
    require_study(study_dir)
    path = study_dir / "trials" / f"{trial:04d}" / "result.json"
    if trial >= 0 and path.is_file():
        return read_row(path)
    there = sorted(int(found.parent.name) for found in study_dir.glob("trials/*/result.json") if found.parent.name.isdigit())
    has = f"it has {there[0]} to {there[-1]}" if there and there == list(range(there[0], there[-1] + 1)) else f"it has {', '.join(map(str, there)) or 'none'}"
    raise ConfigError(f"{study_dir} has no trial {trial} with a result; {has}")


def random_siblings(study_dir: Path, config: dict[str, Any]) -> list[Path]:
    """Studies beside this one of the same config but for name, seed of the sampler and length, whose sampler is random: its baselines."""

    def fixed(settings: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in settings.items() if key not in _NOT_OF_A_TRIAL}

    found = []
    for path in sorted(study_dir.absolute().parent.iterdir()) if study_dir.is_dir() else []:
        if path == study_dir.absolute() or not is_study(path):
            continue
        try:
            other = read_config(path)
        except ConfigError:
            continue
        if other.get("sampler") == "random" and fixed(other) == fixed(config):
            found.append(path)
    return found


_NOT_OF_A_TRIAL = (
    "name",
    "sampler",
    "seed",
    "trials",
    "workers",
    "max_hours",
    "max_updates",
    "trial_timeout_s",
    "max_consecutive_failures",
    "resources",
    "reproducible",
    "lag",
)


def write_tables(study_dir: Path, rows: Sequence[Row]) -> list[Path]:
    """Write `trials.parquet`, `trials.csv`, `front.csv` and `front.json`; each file appears complete or not at all.

    Raises:
        ConfigError: there are no rows, and one of the tables holds some. Nothing is written then.
    """
    for name in TABLES:
        require_rows(study_dir / name, len(rows))
    best = pareto.front(rows)
    contents = (_parquet(table(rows)), csv_of(rows), csv_of(best), front_json(rows, best))
    return [write_atomic(study_dir / name, content) for name, content in zip(TABLES, contents, strict=True)]


def csv_of(rows: Sequence[Row]) -> bytes:
    """The rows in the order given, as `trials.csv` and `front.csv` have them."""
    return _csv(table(rows))


def table(rows: Sequence[Row]) -> pa.Table:
    """One line per row and one typed column per flat field, the same columns whatever the rows hold; `versions.*` as they come."""
    known = columns()
    records = [{key: value for key, value in row.to_record().items() if key in known or value is not None} for row in rows]
    extra = sorted({key for record in records for key in record} - set(known))
    arrays = {name: pa.array([record.get(name) for record in records], kind) for name, kind in known.items()}
    arrays |= {name: _infer([record.get(name) for record in records]) for name in extra}
    return pa.table(arrays)


def _infer(values: list[Any]) -> pa.Array:
    """A column that the schema does not know; mixed types become JSON strings."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([None if value is None else json.dumps(value) for value in values], pa.string())


def columns() -> dict[str, pa.DataType]:
    """Every column of the flat table but `versions.*`, with its type, in order."""
    found: dict[str, pa.DataType] = {}
    hints = get_type_hints(Row)
    for name, hint in hints.items():
        if name in Row.model_fields and name not in ("scores", "versions"):
            _walk(name, TrialConfig if name == "config" else hint, found)
    for protocol in PROTOCOLS:
        _walk(protocol, ProtocolScore, found)
    return found


def _walk(name: str, hint: Any, into: dict[str, pa.DataType]) -> None:
    hint = _strip_none(hint)
    if isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, BaseModel)):
        names = hint.model_fields if issubclass(hint, BaseModel) else hint.__dataclass_fields__
        hints = get_type_hints(hint)
        for field in names:
            _walk(f"{name}.{field}", hints[field], into)
    else:
        into[name] = _arrow(hint)


def _strip_none(hint: Any) -> Any:
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    options = [option for option in get_args(hint) if option is not type(None)]
    return options[0] if len(options) == 1 else hint


def _arrow(hint: Any) -> pa.DataType:
    if get_origin(hint) is Literal:
        return pa.string()
    if get_origin(hint) in (list, tuple):
        return pa.list_(_arrow(get_args(hint)[0]))
    return _SCALARS[hint]


def _parquet(data: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(data, sink)
    return bytes(sink.getvalue().to_pybytes())


def _csv(data: pa.Table) -> bytes:
    """UTF-8, RFC 4180 quoting; a missing value is an empty cell, lists and booleans are JSON."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(data.column_names)
    for record in data.to_pylist():
        writer.writerow([_cell(value) for value in record.values()])
    return stream.getvalue().encode()


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, bool)) else value


def front_json(rows: Sequence[Row], best: Sequence[Row], requirements: Sequence[str] = ()) -> bytes:
    """`front.json`: the rows `best` in the order given, with the hypervolume and the candidates of all `rows`; `requirements` only where there are any."""
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "objectives": [{"name": objective.name, "sense": "max" if objective.maximise else "min"} for objective in pareto.OBJECTIVES],
        "hypervolume": pareto.hypervolume(rows),
        "hypervolume_reference": list(pareto.REFERENCE),
        "candidates": [{"trial": knee.row.trial, "reason": knee.reason} for knee in pareto.knees(rows)],
        "rows": [json.loads(row.to_json()) for row in best],
    }
    if requirements:
        content["requirements"] = list(requirements)
    return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
