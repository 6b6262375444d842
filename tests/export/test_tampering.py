"""Whatever is changed in a bundle, `verify` says what: with the old manifest by the file's hash, with a new one by what no longer fits."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import presets
import pytest
import torch
from safetensors.torch import load_file, save_file

from mitigate import cli
from mitigate.config import VariantConfig
from mitigate.export import bundle, verify


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A W8/S8 bundle; not to be changed."""
    return presets.exported(VariantConfig(stagger="half"), tmp_path_factory.mktemp("whole") / "bundle")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(whole, tmp_path / "bundle"))


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    """Change a JSON file in place."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change a safetensors file in place."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def flip_a_bit(path: Path, place: int) -> None:
    """Flip the lowest bit of one byte."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def complaint(folder: Path, *, new_manifest: bool = True, **options: Any) -> str:
    """What verify raises."""
    if new_manifest:
        bundle.write_manifest(folder)
    with pytest.raises((bundle.DamagedBundle, verify.PortFailed)) as caught:
        verify.verify(folder, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


# ---------------------------------------------------------------------------------------------------------------------- the manifest


@pytest.mark.parametrize("name", ["compressor.safetensors", "compressor.json", "golden/L2.safetensors", "reference.py", "SPEC.md", "row.json"])
def test_a_flipped_bit_is_named(name: str, folder: Path) -> None:
    flip_a_bit(folder / name, -1)
    assert f"{name} is not what the manifest says" in complaint(folder, new_manifest=False)
    with pytest.raises(bundle.DamagedBundle, match="is not what the manifest says"):
        bundle.load(folder)


def test_missing_and_extra_files_are_named(folder: Path) -> None:
    (folder / "golden" / "extra.bin").write_text("?")
    assert "golden/extra.bin is not in the manifest" in complaint(folder, new_manifest=False)
    (folder / "golden" / "extra.bin").unlink()
    (folder / "golden" / "L1.safetensors").unlink()
    assert "golden/L1.safetensors is missing" in complaint(folder, new_manifest=False)
    assert "L1.safetensors" in complaint(folder)
    (folder / "MANIFEST.json").write_text("{")
    assert "is damaged" in complaint(folder, new_manifest=False)
    (folder / "MANIFEST.json").unlink()
    assert "is no bundle: it has no MANIFEST.json" in complaint(folder, new_manifest=False)


@pytest.mark.parametrize("name", ["compressor.json", "compressor.safetensors", "model.safetensors", "row.json", "golden/cases.json", "golden/anti.safetensors"])
def test_a_file_that_the_manifest_forgets_too_is_named(name: str, folder: Path) -> None:
    (folder / name).unlink()
    assert Path(name).name in complaint(folder)


# ---------------------------------------------------------------------------------------------------------------------- a new manifest


def test_one_bit_of_a_gate_weight_shows_in_fp64(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors["layers.1.v.gate.weight"]
        weight.view(torch.int32)[3, 5, 1] ^= 1  # the lowest bit of one number

    edit_tensors(folder / "compressor.safetensors", change)
    text = complaint(folder)
    assert "our own code: L0, case layer1, tensor value_gate_logits: " in text
    assert "worst at [" in text and ", 3, 1, 0]: expected" in text, "offset 3, head 1"


def test_swapped_gate_rows_are_named_by_their_offset(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        bias = tensors["layers.0.k.gate.bias"]
        tensors["layers.0.k.gate.bias"] = bias[[0, 1, 5, 3, 4, 2, 6, 7]].contiguous()

    edit_tensors(folder / "compressor.safetensors", change)
    text = complaint(folder)
    assert "L0, case layer0, tensor key_gate_logits" in text
    assert ", 2, " in text or ", 5, " in text


def test_a_shuffled_gate_is_found(folder: Path) -> None:
    shutil.copyfile(folder / "golden" / "shuffled.safetensors", folder / "compressor.safetensors")
    assert "L0, case layer0, tensor key_gate_logits" in complaint(folder)


@pytest.mark.parametrize(("field", "value"), [("window", 9), ("window", 7), ("stride", 7), ("origin", -1), ("key_shift", 1)])
def test_a_grid_off_by_one_is_named(field: str, value: int, folder: Path) -> None:
    before = json.loads((folder / "compressor.json").read_text())["layers"][0][field]
    edit_json(folder / "compressor.json", lambda data: data["layers"][0].update({field: value}))
    assert f"compressor.json: layers[0].{field} is {value}, must be {before} by the trial's config" in complaint(folder)


def test_a_coarse_layers_key_shift_is_its_own(tmp_path: Path) -> None:
    variant = presets.VARIANTS["coarse-overlap"]
    right = presets.exported(variant, tmp_path / "right")
    changed = Path(shutil.copytree(right, tmp_path / "changed"))
    edit_json(changed / "compressor.json", lambda data: data["layers"][1].update(key_shift=data["layers"][0]["key_shift"]))
    assert "compressor.json: layers[1].key_shift is 5, must be 11 by the trial's config" in complaint(changed)
    wrong = presets.exported(dataclasses.replace(variant, rope_position="last_stride"), tmp_path / "wrong")  # and so wherever it is written
    for name in ("L0", "L1", "L2", "anti", "inputs"):
        shutil.copyfile(right / "golden" / f"{name}.safetensors", wrong / "golden" / f"{name}.safetensors")
    assert "our own code: L0, case layer0, tensor key: " in complaint(wrong)


@pytest.mark.parametrize("field", ["window", "origin"])
def test_a_grid_off_by_one_wherever_it_is_written_misses_the_golden_vectors(field: str, tmp_path: Path) -> None:
    """A gate blind to the offset has the same shape at any window, so nothing but the golden vectors can tell."""
    right = presets.exported(VariantConfig(gate="content", origin=-2), tmp_path / "right")
    wrong = presets.exported(VariantConfig(gate="content", **{"window": 9, "origin": -2} if field == "window" else {"origin": -1}), tmp_path / "wrong")
    for name in ("L0", "L1", "L2", "anti", "inputs"):
        shutil.copyfile(right / "golden" / f"{name}.safetensors", wrong / "golden" / f"{name}.safetensors")
    text = complaint(wrong)
    assert ("L0, case layer0, tensor " in text) or ("golden tensor L1.layer0_T" in text and "is missing" in text), text


@pytest.mark.parametrize("field", ["sha256", "trained_from_sha256"])
def test_a_wrong_base_hash_is_named(field: str, folder: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        (data["base"]["weights"] if field == "sha256" else data["base"])[field] = "0" * 64

    edit_json(folder / "compressor.json", change)
    where = "base.weights.sha256" if field == "sha256" else "base.trained_from_sha256"
    assert f'compressor.json: {where} is "{"0" * 64}", must be "' in complaint(folder)


def test_another_base_under_a_right_hash_misses_the_golden_vectors(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.v_proj.weight"][0, 0] += 1e-3

    edit_tensors(folder / "model.safetensors", change)
    assert "base.weights.sha256 is" in complaint(folder)
    edit_json(folder / "compressor.json", lambda data: data["base"]["weights"].update(sha256=bundle.sha256(folder / "model.safetensors")))
    text = complaint(folder)
    assert "our own code: L0, case layer1, tensor pooled_value" in text


def test_a_tensor_that_does_not_fit_is_named(folder: Path) -> None:
    edit_tensors(folder / "compressor.safetensors", lambda tensors: tensors.update({"layers.0.k.gate.bias": torch.zeros(7, 2)}))
    assert "compressor.safetensors: tensor layers.0.k.gate.bias must be [8, 2], got [7, 2]" in complaint(folder)
    edit_tensors(folder / "compressor.safetensors", lambda tensors: tensors.update(x=tensors.pop("layers.0.k.gate.bias")))
    assert "tensor layers.0.k.gate.bias is missing" in complaint(folder)


def test_a_fixture_with_fewer_cases_is_refused(folder: Path) -> None:
    edit_json(folder / "golden" / "cases.json", lambda data: data.update(cases=data["cases"][:2]))
    assert "cases.json: cases is " in complaint(folder)


def test_changed_golden_values_are_found(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["L2.phase3.logits"][0, 4] += 1e-6

    edit_tensors(folder / "golden" / "L2.safetensors", change)
    assert "L2, case phase3, tensor logits: 1e-06 off, allowed" in complaint(folder)


def test_changed_weights_of_the_anti_test_are_found(folder: Path) -> None:
    shutil.copyfile(folder / "compressor.safetensors", folder / "golden" / "shuffled.safetensors")
    assert "our own code: anti, case shuffled, tensor logits" in complaint(folder)


def test_a_row_of_another_trial_is_named(folder: Path) -> None:
    edit_json(folder / "row.json", lambda data: data["config"].update(seed=77))
    assert "row.json: its config differs from that in compressor.json at seed is 77, must be 0" in complaint(folder)


def test_code_that_this_version_does_not_write_is_not_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "reference.py"
    path.write_text(path.read_text().replace("i <= t", "i < t + 1").replace("* q_BTHD.shape[-1] ** -0.5", "* 0.3"))
    assert "reference.py is not the text that this version of mitigate writes; read it, then --trust-code runs it" in complaint(folder)
    assert "its reference.py: L2, case oneshot, tensor logits" in complaint(folder, trust_code=True)
    assert cli.main(["verify", str(folder)]) == 2
    assert cli.main(["verify", str(folder), "--trust-code"]) == 1
    assert capsys.readouterr().err.count("\n") == 2
