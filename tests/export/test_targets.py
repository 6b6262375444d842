"""Folders for other codebases: transformers loads one without this project, DeepSeek-V4's config says what it can, the vLLM plugin says it is a skeleton."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import presets
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config

from mitigate import cli, cost, registry
from mitigate.config import BaseConfig, VariantConfig
from mitigate.export import bundle, describe, targets
from mitigate.export.targets import transformers as remote
from mitigate.geometry import Grid

ONE_HEAD = BaseConfig(**{**vars(presets.BASE), "kv_heads": 1})
ALONE = """
import json, sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mitigate":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nowhere())
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(info.values()), info
    ids = load_file(folder + "/../prompt.safetensors")["ids"]
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits
        made = model.generate(ids, max_new_tokens=24, do_sample=False)
        again = model.generate(ids, max_new_tokens=24, do_sample=False, use_cache=False)
    for mask in ([[0] + [1] * (ids.shape[1] - 1)],):
        try:
            model(input_ids=ids[:1], attention_mask=torch.tensor(mask))
        except ValueError as error:
            assert "padding" in str(error)
        else:
            raise SystemExit("left padding was accepted")
    save_file({"logits": logits.contiguous(), "made": made.contiguous(), "again": again.contiguous()}, folder + "/../found.safetensors")
assert "mitigate" not in sys.modules
"""


def run_alone(folders: list[Path], cache: Path) -> None:
    """Load the folders in a process that cannot import this project."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-I", "-c", ALONE, *map(str, folders)], cwd=cache, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


def test_transformers_loads_and_generates_the_same_tokens(tmp_path: Path) -> None:
    names = ["w8s8", "everything", "per-offset-tied", "w2s2-tied-coarse", "coarse-overlap"]
    expected, folders = {}, []
    for name in names:
        row, attached = presets.made(presets.VARIANTS[name])
        ids = torch.randint(16, (2, 41), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            expected[name] = attached.model(input_ids=ids, use_cache=False).logits, attached.model.generate(ids, max_new_tokens=24, do_sample=False)
        (tmp_path / name).mkdir()
        save_file({"ids": ids}, tmp_path / name / "prompt.safetensors")
        folders.append(tmp_path / name / "model")
        lines = remote.write(row, attached, folders[-1])
        assert "trust_remote_code=True" in lines[1]
        assert {path.name for path in folders[-1].iterdir()} == {
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "modeling_summaries.py",
            "compressor.json",
        }
    run_alone(folders, tmp_path)
    for name in names:
        found, (logits, tokens) = load_file(tmp_path / name / "found.safetensors"), expected[name]
        torch.testing.assert_close(found["logits"], logits, atol=2e-5, rtol=0)
        assert torch.equal(found["made"], tokens)
        assert torch.equal(found["again"], tokens), "decoding through the cache and recomputing agree"


def test_the_remote_code_is_whole() -> None:
    text = remote.code()
    compile(text, "modeling_summaries.py", "exec")
    assert "mitigate" not in text.replace("Exported by mitigate.", "") and "# ---- the compressor" not in text
    assert "class Compressor:" in text and "class State:" in text


# ---------------------------------------------------------------------------------------------------------------------- DeepSeek-V4

CSA = VariantConfig(window=8, stride=4, origin=-4, gate="vector", tie="kv", local_window=16)
HCA = VariantConfig(window=128, stride=128, gate="vector", tie="kv", local_window=128)


def deepseek(variant: VariantConfig, folder: Path, base: BaseConfig = ONE_HEAD) -> dict[str, Any]:
    """The files written, by name."""
    row, attached = presets.made(variant, base)
    targets.deepseek_v4.write(row, attached, folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize(
    ("variant", "ratio", "kind", "rate"),
    [(CSA, 4, "compressed_sparse_attention", 4), (HCA, 128, "heavily_compressed_attention", 128)],
)
def test_deepseek_shapes_are_written_for_every_consumer(variant: VariantConfig, ratio: int, kind: str, rate: int, tmp_path: Path) -> None:
    found = deepseek(variant, tmp_path / "x")
    assert set(found) == {"reference", "transformers", "vllm", "megatron"}
    assert found["reference"]["compress_ratios"] == found["vllm"]["compress_ratios"] == found["megatron"]["csa_compress_ratios"] == [ratio] * 2
    assert found["reference"]["sliding_window"] == found["megatron"]["csa_window_size"] == variant.local_window
    assert found["transformers"]["layer_types"] == [kind] * 2
    assert found["transformers"]["compress_rates"][kind] == rate
    loaded = DeepseekV4Config(**{name: value for name, value in found["transformers"].items() if name not in ("model_type", "architectures")})
    assert loaded.layer_types == [kind] * 2 and loaded.sliding_window == variant.local_window and loaded.qk_rope_head_dim == 8
    assert "What differs from the model that was trained" in (tmp_path / "x" / "README.md").read_text()


def test_another_stride_is_written_for_transformers_alone(tmp_path: Path) -> None:
    row, attached = presets.made(dataclasses.replace(CSA, window=16, stride=8, origin=-8), ONE_HEAD)
    lines = targets.deepseek_v4.write(row, attached, tmp_path / "x")
    assert {path.name for path in (tmp_path / "x").iterdir()} == {"transformers.json", "README.md"}
    assert json.loads((tmp_path / "x" / "transformers.json").read_text())["compress_rates"]["compressed_sparse_attention"] == 8
    assert any("not written: megatron.json, compress_ratios cannot say W=16 S=8 o=-8" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"window": 12, "stride": 8, "origin": -3}, "cannot be written as deepseek_v4: layer 0: W=12 S=8 o=-3 (must be W=S o=0 or W=2S o=-S); layer 1: W=12"),
        ({"gate": "scalar"}, "VariantConfig.gate=scalar"),
        ({"bypass": "last"}, "VariantConfig.bypass=last"),
        ({"tie": "none"}, "VariantConfig.tie=none"),
        ({"stagger": "half"}, "VariantConfig.stagger=half"),
        ({"coarse": "odd", "coarse_factor": 2}, "layer 1: W=16 S=8 o=-4 (must be W=S o=0 or W=2S o=-S); VariantConfig.coarse=odd (must be none). Use the"),
        ({"window": 8, "stride": 8, "origin": 0, "coarse": "odd", "coarse_factor": 2}, "deepseek_v4: VariantConfig.coarse=odd (must be none). Use the"),
        ({"coarse": "odd", "coarse_factor": 2, "stagger": "half"}, "VariantConfig.coarse=odd (must be none); VariantConfig.stagger=half (must be none)"),
        ({"payload": "per_offset"}, "VariantConfig.payload=per_offset"),
        ({"key_norm": "tokens"}, "VariantConfig.key_norm=tokens"),
        ({"rope_position": "window_end"}, "VariantConfig.rope_position=window_end"),
        ({"local_window": 2}, "VariantConfig.local_window=2 (must be at least 3"),
        ({"window": 2, "stride": 2, "origin": 0}, "layer 0: W=2 S=2 o=0"),
    ],
)
def test_what_deepseek_cannot_say_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = presets.study(tmp_path / "study", [dataclasses.replace(CSA, **changes)], ONE_HEAD)
    assert cli.main(["export", str(study), "--trial", "0", "--target", "deepseek-v4", "--to", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1 and not (tmp_path / "x").exists()


def test_more_than_one_kv_head_is_refused(tmp_path: Path) -> None:
    row, attached = presets.made(CSA)
    with pytest.raises(ValueError, match=r"BaseConfig\.kv_heads=2 \(must be 1\)"):
        targets.deepseek_v4.write(row, attached, tmp_path / "x")


# ---------------------------------------------------------------------------------------------------------------------- vLLM


STAGGERED = VariantConfig(window=12, stride=8, origin=-3, stagger="half", bypass="last", local_window=5)


@pytest.mark.parametrize("variant", [STAGGERED, presets.VARIANTS["coarse-overlap"]], ids=["staggered", "coarse"])
def test_the_vllm_skeleton_knows_its_bytes_and_says_what_it_is(variant: VariantConfig, tmp_path: Path) -> None:
    study = presets.study(tmp_path / "study", [variant])
    assert cli.main(["export", str(study), "--trial", "0", "--target", "vllm", "--to", str(tmp_path / "plugin")]) == 0
    folder = tmp_path / "plugin"
    assert all("SKELETON" in path.read_text() for path in folder.rglob("*") if path.suffix in (".py", ".md", ".toml") and "bundle" not in path.parts)
    bundle.load(folder / "bundle")
    found = load(folder / "mitigate_summaries" / "kv_spec.py")
    grids = registry.grids(variant, layers=2)
    assert [Grid(window=layer.window, stride=layer.stride, origin=layer.origin) for layer in found.LAYERS] == grids
    shape = cost.shape_of(presets.made(variant)[1].model)
    for length in (1, 7, 8, 23, 64, 101):
        assert sum(layer.sequence_bytes(length) for layer in found.LAYERS) == cost.bytes_at(variant, shape, length)
    assert sum(layer.bytes_per_token for layer in found.LAYERS) == pytest.approx(cost.bytes_per_token(variant, shape))
    assert all(layer.page_size_bytes(16) == 16 * layer.bytes_per_token for layer in found.LAYERS)
    assert [layer.key_shift for layer in found.LAYERS] == [describe.key_shift(variant, grid) for grid in grids]
    for path in folder.rglob("*.py"):
        compile(path.read_text(), str(path), "exec")


def load(path: Path) -> Any:
    """A module from its file."""
    spec = importlib.util.spec_from_file_location("kv_spec_under_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
