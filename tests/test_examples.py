"""The examples that stand alone: the text that every Python carries, and the cost of SmolLM2-135M's shape, here on a tiny one."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import pytest
from tiny_models import tiny

from mitigate import config, config_files, cost
from mitigate.config_files import load_fine_tune
from mitigate.config_finetune import TextConfig
from mitigate.tasks import text

ROOT = Path(__file__).resolve().parents[1]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_text_of_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "pydoc.txt"
    made = example("pydoc_text")
    monkeypatch.setattr(sys, "argv", ["pydoc_text.py", str(path)])
    assert made.main() == 0
    said = capsys.readouterr().out
    assert hashlib.sha256(path.read_bytes()).hexdigest() in said
    assert sorted(text.read(TextConfig(path=str(path)))) == sorted(topic.strip() for topic in topics.values())
    monkeypatch.setattr(sys, "argv", ["pydoc_text.py"])
    assert made.main() == 2


def test_the_cost_of_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made, out = example("smollm2_cost"), tmp_path / "cost.json"
    small: dict[str, Any] = {"CONTEXTS": (64, 128), "STEPS": 8, "ROUNDS": 2, "LARGEST_SHARE": 1.0, "model": lambda: tiny("llama", wide=False)}
    for name, value in small.items():
        monkeypatch.setattr(made, name, value)
    monkeypatch.setattr(sys, "argv", ["smollm2_cost.py", str(out)])
    assert made.main() == 0
    shape = cost.shape_of(tiny("llama", wide=False))
    for length, found in zip((64, 128), json.loads(out.read_text())["contexts"], strict=True):
        assert found["kv_bytes_counted"] == cost.bytes_at(made.VARIANT, shape, length)
        assert found["kv_bytes_counted_full"] == cost.bytes_at(config.VariantConfig(compress=False), shape, length)
        assert found["ratio"]["low"] <= found["ratio"]["median"] <= found["ratio"]["high"]
    assert "ratio" in capsys.readouterr().out
    monkeypatch.setattr(made, "LARGEST_SHARE", 0.01)
    assert made.main() == 1
    assert "more than 0.01" in capsys.readouterr().err


def test_the_real_model_config_is_valid() -> None:
    wanted = load_fine_tune(config_files.PRESETS / "real-model.toml", model="somewhere/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert wanted.train.what == "compressor"
    assert wanted.train.minutes is not None and wanted.train.minutes <= 15
    assert (wanted.variant.window, wanted.variant.stride) == (8, 4)
    assert wanted.score.prompts % wanted.score.period**2 == 0
