"""A bundle loads back to identical logits, and says what is wrong with it when something is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_study import write_config

from mitigate import cli, results
from mitigate.config import TrialConfig, from_dict
from mitigate.export import bundle
from mitigate.rows import Row


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny study, run."""
    folder = tmp_path_factory.mktemp("study")
    path = write_config(folder)
    assert cli.main(["search", str(path), "--inline", "--results", str(folder / "results"), "--cache", str(folder / "cache")]) == 0
    return folder / "results" / "tiny"


@pytest.fixture
def exported(study: Path, tmp_path: Path) -> Path:
    """A bundle of the first compressed trial."""
    return bundle.write(study, 1, tmp_path / "bundle")


def test_every_trial_loads_back_to_identical_logits(study: Path, tmp_path: Path) -> None:
    for row in results.read_rows(study):
        assert row.trial is not None
        folder = bundle.write(study, row.trial, tmp_path / str(row.trial))
        attached = bundle.load(folder)
        golden = load_file(folder / "golden.safetensors")
        with torch.inference_mode():
            logits = attached.model(input_ids=golden["tokens"], use_cache=False).logits
        assert torch.equal(logits, golden["logits"])
        assert bundle.largest_difference(folder, attached) == 0


def test_the_golden_logits_need_the_compressor(exported: Path) -> None:
    attached = bundle.load(exported)
    attached.detach()
    golden = load_file(exported / "golden.safetensors")
    with torch.inference_mode():
        plain = attached.model(input_ids=golden["tokens"], use_cache=False).logits
    assert float((plain - golden["logits"]).abs().max()) > 1e-3


def test_the_bundle_states_its_config_and_row(exported: Path, study: Path) -> None:
    stated = json.loads((exported / "compressor.json").read_text())
    row = Row.from_json((exported / "row.json").read_text())
    assert from_dict(TrialConfig, stated["trial"]) == from_dict(TrialConfig, row.config)
    assert stated["variant"] == row.config["variant"]
    assert stated["layers"] == [{"window": 4, "stride": 4, "origin": 0, "bypass_phases": []}] * 2
    assert stated["base"]["weights_sha256"] == row.base_sha256
    assert {path.suffix for path in exported.iterdir()} == {".json", ".safetensors"}


def test_a_flipped_bit_is_named(exported: Path) -> None:
    path = exported / "compressor.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(bundle.DamagedBundle, match=r"compressor\.safetensors is not what the manifest says"):
        bundle.load(exported)


def test_a_missing_and_an_extra_file_are_named(exported: Path) -> None:
    (exported / "extra.txt").write_text("?")
    with pytest.raises(bundle.DamagedBundle, match=r"extra\.txt is not in the manifest"):
        bundle.load(exported)
    (exported / "extra.txt").unlink()
    (exported / "row.json").unlink()
    with pytest.raises(bundle.DamagedBundle, match=r"row\.json is missing"):
        bundle.load(exported)
    (exported / "MANIFEST.json").write_text("{")
    with pytest.raises(bundle.DamagedBundle, match="is damaged"):
        bundle.load(exported)


def test_swapped_gate_rows_do_not_reproduce(exported: Path) -> None:
    attached = bundle.load(exported)
    path = exported / "compressor.safetensors"
    weights = load_file(path)
    name = next(key for key in weights if key.endswith("gate_bias"))
    weights[name] = weights[name].flip(0).contiguous() + 1.0 * torch.arange(len(weights[name]))[:, None]
    save_file(weights, path)
    attached.compressors.load_state_dict(load_file(path))
    assert bundle.largest_difference(exported, attached) > bundle.TOLERANCE


def test_a_refused_export_leaves_nothing(study: Path, tmp_path: Path) -> None:
    copy = tmp_path / "study"
    shutil.copytree(study, copy)
    (copy / "trials" / "0001" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        bundle.write(copy, 1, tmp_path / "bundle")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["study"]
