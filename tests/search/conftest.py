"""Presets and a registry of the tests' own, so that no test of the search imports torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_trials
import pytest

import mitigate
import mitigate.config_files
from mitigate.config_files import from_dict
from mitigate.config_search import SearchConfig

SPACE: dict[str, Any] = {"stride": (4, 6, 8, 12), "overlap": ("1", "3/2", "2"), "gate": ("scalar", "vector", "uniform"), "tie": ("none", "gates", "kv")}


@pytest.fixture
def presets(tmp_path: Path) -> Path:
    """A folder with the presets full and w8s8."""
    folder = tmp_path / "presets" / "variants"
    folder.mkdir(parents=True)
    (folder / "full.toml").write_text("[variant]\ncompress = false\n")
    (folder / "w8s8.toml").write_text("[variant]\nwindow = 8\nstride = 8\n")
    (folder / "same.toml").write_text('[variant]\nrope_position = "window_start"\n')
    (folder / "w128.toml").write_text("[variant]\nwindow = 128\nstride = 128\n")
    return tmp_path / "presets"


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch, presets: Path) -> None:
    registry = fake_trials.fake_registry()
    monkeypatch.setitem(sys.modules, "mitigate.registry", registry)
    monkeypatch.setattr(mitigate, "registry", registry, raising=False)
    monkeypatch.setattr(mitigate.config_files, "PRESETS", presets)


@pytest.fixture
def make_config() -> Callable[..., SearchConfig]:
    """A SearchConfig over `SPACE`, with changes."""

    def make(**changes: Any) -> SearchConfig:
        return from_dict(SearchConfig, {"name": "study", "trials": 12, "space": SPACE} | changes)

    return make
