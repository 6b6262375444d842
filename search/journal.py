"""A study's journal on disk: read without writing, mended where a kill cut its last line, opened for the one process that writes.

Optuna writes one JSON record a line. A damaged line before the last is never mended; it is named.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend
from optuna.trial import FrozenTrial

from mitigate.config import ConfigError

FILE = "study.journal"


def open_journal(folder: Path) -> JournalStorage:
    """The journal of a study folder for the driver that holds its lock, mended first.

    Raises:
        ConfigError: it is damaged before its last line, or holds a record that is none of Optuna's.
    """
    path = folder / FILE
    _drop_stale_locks(path)  # the driver lock is ours, so no driver holds them
    repair_journal(path)
    return _storage(JournalFileBackend(str(path)), path)


def _storage(backend: BaseJournalBackend, path: Path) -> JournalStorage:
    try:
        return JournalStorage(backend)
    except (KeyError, TypeError, ValueError, AssertionError) as error:  # a line that is JSON and no record
        raise ConfigError(f"{path} is damaged: a record of it is none of Optuna's ({type(error).__name__}: {error})") from None


class Journal(NamedTuple):
    """A journal as it was when `read_journal` read it.

    Attributes:
        records: those before the first damaged line.
        damaged: number of that line and of all lines; None where there is none but a last one, which a driver may be writing.
    """

    path: Path
    records: tuple[dict[str, Any], ...]
    damaged: tuple[int, int] | None

    def storage(self) -> JournalStorage:
        """Optuna's view of the records. What is written to it goes nowhere."""
        return _storage(_InMemory(self.records), self.path)


class _InMemory(BaseJournalBackend):
    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        self._records = list(records)

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return self._records[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self._records += logs


def read_journal(folder: Path) -> Journal:
    """The journal of a study folder, without writing; empty where there is none."""
    path = folder / FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    bad = _first_damaged(lines)
    records = tuple(json.loads(line) for line in lines[:bad])
    return Journal(path, records, None if bad is None or bad == len(lines) - 1 else (bad + 1, len(lines)))


def recorded_trials(folder: Path) -> list[FrozenTrial]:
    """The trials in a folder's journal, without writing; none where it holds no study. ConfigError if it is damaged before its last line."""
    journal = read_journal(folder)
    if journal.damaged is not None:
        raise _damage(journal.path, *journal.damaged)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = journal.storage()
    names = optuna.get_all_study_names(storage)
    if len(names) != 1:
        return []
    return optuna.load_study(study_name=names[0], storage=storage, sampler=optuna.samplers.RandomSampler()).get_trials()


def _drop_stale_locks(path: Path) -> None:
    for left in (path.parent / f"{path.name}.lock", *path.parent.glob(f"{path.name}.lock*.rename")):
        with contextlib.suppress(FileNotFoundError):
            left.unlink()


def repair_journal(path: Path) -> Path | None:
    """Cut off a last line that a kill left incomplete, after a copy; a whole record that lacks its newline gets it.

    Returns:
        The copy, None where nothing was cut.

    Raises:
        ConfigError: a line before the last is damaged.
    """
    data = path.read_bytes() if path.exists() else b""
    lines = data.splitlines(keepends=True)
    bad = _first_damaged(lines)
    if bad is None:
        if data and not data.endswith(b"\n"):
            _append_newline(path)
        return None
    if bad != len(lines) - 1:
        raise _damage(path, bad + 1, len(lines))
    copy = unused(path.parent, f"{path.name}.torn")
    copy.write_bytes(data)
    with path.open("r+b") as file:
        file.truncate(len(data) - len(lines[-1]))
        file.flush()
        os.fsync(file.fileno())
    return copy


def _first_damaged(lines: list[bytes]) -> int | None:
    return next((i for i, line in enumerate(lines) if not _is_record(line)), None)


def _damage(path: Path, line: int, lines: int) -> ConfigError:
    return ConfigError(f"{path} is damaged in line {line} of {lines}; restore it from a copy or start under another name")


def _append_newline(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def unused(parent: Path, name: str) -> Path:
    """A path of that name with the first number that nothing has yet."""
    return next(path for i in range(1, 10_000) if not (path := parent / f"{name}.{i}").exists())
