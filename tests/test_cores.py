"""How many threads work may take: the environment's number, else the cores that this process may use."""

from __future__ import annotations

import os

import pytest

from mitigate import cores


@pytest.mark.parametrize(("given", "wanted"), [("3", 3), (" 5 ", 5), ("4,2", 4)])
def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch, given: str, wanted: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert cores.wanted_threads() == wanted


@pytest.mark.parametrize("given", [None, "", "0", "-2", "many", "1.5", ",2"])
def test_without_a_number_there_it_is_every_usable_core(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert cores.wanted_threads() == 7


def test_cores_of_others_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert cores.usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores.usable_cores() == 64
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores.usable_cores() == 1
