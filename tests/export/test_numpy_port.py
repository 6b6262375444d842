"""The NumPy port in examples/ passes `verify --against` at every level, in fp64 and in fp32, and imports neither torch nor this project."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import presets
import pytest
import tiny_models

from mitigate import cli
from mitigate.config import VariantConfig

PORT = Path(__file__).resolve().parents[2] / "examples" / "numpy_port" / "port.py"
NAMES = ["w8s8-stagger-content", "w16s8", "w8s6", "deepseek-csa", "w8s8-bypass-both", "w8s8-uniform", "w8s8-tied-gates", "w8s8-tail", "last-stride", "two"]
NAMES += presets.COARSE

ALONE = """
import runpy, sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "mitigate"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nowhere())
"""


@pytest.fixture(scope="module")
def port() -> Any:
    """The port as a module."""
    spec = importlib.util.spec_from_file_location("numpy_port_under_test", PORT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_the_port_passes_every_level(name: str, port: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = presets.exported(presets.VARIANTS[name], tmp_path / "bundle")
    port.main(folder, tmp_path / "out")
    assert cli.main(["verify", str(folder), "--against", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    assert "L0 to " in capsys.readouterr().out


def test_the_port_passes_in_fp32(port: Any, tmp_path: Path) -> None:
    folder = presets.exported(tiny_models.COMPRESSED["w8s8-stagger-content"], tmp_path / "bundle")
    port.main(folder, tmp_path / "out", "float32")
    assert cli.main(["verify", str(folder), "--against", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("arguments", [[], ["bundle"], ["bundle", "out", "float16"], ["bundle", "out", "float32", "more"]])
def test_other_arguments_show_the_usage(port: Any, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert port.command(arguments) == 2
    assert capsys.readouterr().err == "usage: python port.py BUNDLE OUTPUT [float64|float32]\n"


@pytest.mark.parametrize("name", ["", "compressor.json", "compressor.safetensors", "model.safetensors", "golden/cases.json", "golden/inputs.safetensors"])
@pytest.mark.parametrize("how", ["absent", "cut"])
def test_what_is_no_bundle_is_one_line_and_leaves_nothing(port: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, how: str) -> None:
    folder = presets.exported(presets.VARIANTS["two"], tmp_path / "bundle")
    if not name:
        shutil.rmtree(folder)
        folder.mkdir() if how == "cut" else None
    elif how == "absent":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes((folder / name).read_bytes()[:100])
    assert port.command([str(folder), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("port.py: ") and error.count("\n") == 1 and str(folder) in error
    assert not (tmp_path / "out").exists()


def test_a_mistake_in_the_stream_alone_is_found_in_chunks(
    port: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stream that drops the token which completes a window: one-shot is right, decoding is not."""
    folder = presets.exported(VariantConfig(window=8, stride=4, local_window=2), tmp_path / "bundle")
    right = port.Stream.feed

    def wrong(self: Any, h: Any, k: Any, v: Any) -> None:
        right(self, h, k, 0 * v if (self.length - self.layer.o - self.layer.W + 1) % self.layer.S == 0 else v)

    monkeypatch.setattr(port.Stream, "feed", wrong)
    port.main(folder, tmp_path / "out")
    assert cli.main(["verify", str(folder), "--against", str(tmp_path / "out")]) == 1
    assert "L2, case chunks1, tensor logits" in capsys.readouterr().err


def test_what_is_not_ported_is_said(port: Any, tmp_path: Path) -> None:
    folder = presets.exported(tiny_models.COMPRESSED["w8s8-per-offset"], tmp_path / "bundle")
    with pytest.raises(SystemExit, match="a payload map per offset"):
        port.main(folder, tmp_path / "out")
    path = folder / "compressor.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 2}))
    with pytest.raises(SystemExit, match="must have schema_version 3, got 2"):
        port.main(folder, tmp_path / "out")


def test_the_port_runs_without_torch_and_without_this_project(tmp_path: Path) -> None:
    folder = presets.exported(tiny_models.COMPRESSED["w4s4"], tmp_path / "bundle")
    argv = ["port.py", str(folder), str(tmp_path / "out")]
    code = ALONE + f"sys.argv = {argv!r}\nrunpy.run_path({str(PORT)!r}, run_name='__main__')\n"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert cli.main(["verify", str(folder), "--against", str(tmp_path / "out")]) == 0
