"""A study's trials as bundles: they load back to identical logits, state what they are, and a refused export leaves nothing."""

from __future__ import annotations

import fnmatch
import json
import shutil
import tomllib
from pathlib import Path

import presets
import pytest
import torch
from safetensors.torch import load_file

from mitigate import cli, results
from mitigate.config import ConfigError, TrialConfig, VariantConfig
from mitigate.config_files import from_dict
from mitigate.export import bundle
from mitigate.rows import Row
from mitigate.trial import restore

FILES = {
    "MANIFEST.json",
    "SPEC.md",
    "compressor.json",
    "compressor.safetensors",
    "compressor.schema.json",
    "golden/L0.safetensors",
    "golden/L1.safetensors",
    "golden/L2.safetensors",
    "golden/anti.safetensors",
    "golden/cases.json",
    "golden/inputs.safetensors",
    "golden/shuffled.safetensors",
    "model.safetensors",
    "reference.py",
    "row.json",
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of full attention, W4/S4, W8/S4 and a staggered one."""
    variants = [VariantConfig(compress=False), VariantConfig(window=4, stride=4), VariantConfig(window=8, stride=4), VariantConfig(stagger="half")]
    return presets.study(tmp_path_factory.mktemp("study") / "tiny", variants)


@pytest.fixture(scope="module")
def exported(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the first compressed trial; not to be changed."""
    return bundle.write(study, 1, tmp_path_factory.mktemp("exported") / "bundle")


def test_compressed_trials_load_back_to_identical_logits(study: Path, tmp_path: Path) -> None:
    found = [row for row in results.read_rows(study) if row.config["variant"]["compress"]]
    assert len(found) == 3
    for row in found:
        assert row.trial is not None
        attached = bundle.load(bundle.write(study, row.trial, tmp_path / str(row.trial)))
        trained = restore(from_dict(TrialConfig, row.config), study / "trials" / f"{row.trial:04d}")
        tokens = torch.randint(16, (2, 40), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            assert torch.equal(attached.model(input_ids=tokens).logits, trained.model(input_ids=tokens).logits)


def test_full_attention_has_no_compressor_to_export(study: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trial 0 of .* is full attention: it has no compressor to export"):
        bundle.write(study, 0, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_bundle_holds_every_file_and_no_pickle(exported: Path) -> None:
    assert {path.relative_to(exported).as_posix() for path in exported.rglob("*") if path.is_file()} == FILES
    assert {path.suffix for path in exported.rglob("*") if path.is_file()} == {".json", ".safetensors", ".md", ".py"}
    manifest = json.loads((exported / "MANIFEST.json").read_text())
    assert set(manifest["files"]) == FILES - {"MANIFEST.json"}


def test_the_bundle_states_its_config_and_row(exported: Path) -> None:
    stated = json.loads((exported / "compressor.json").read_text())
    row = Row.from_json((exported / "row.json").read_text())
    assert from_dict(TrialConfig, stated["trial"]) == from_dict(TrialConfig, row.config)
    assert stated["variant"] == row.config["variant"]
    assert stated["layers"] == [{"window": 4, "stride": 4, "origin": 0, "bypass_phases": [], "key_shift": 0}] * 2
    assert stated["base"]["trained_from_sha256"] == row.base_sha256
    assert stated["cost"]["kv_bytes_per_token"] == row.cost.kv_bytes_per_token  # type: ignore[union-attr]
    tensors = load_file(exported / "compressor.safetensors")
    assert {name: list(x.shape) for name, x in tensors.items()} == {name: entry["shape"] for name, entry in stated["tensors"].items()}
    assert {x.dtype for x in tensors.values()} == {torch.float32}


def test_the_reference_is_short_and_imports_nothing_of_this_project(exported: Path) -> None:
    text = (exported / "reference.py").read_text()
    assert len(text.splitlines()) < 200
    assert "mitigate" not in text and "pickle" not in text and "torch.load" not in text


def test_the_spec_has_this_variants_numbers(exported: Path) -> None:
    text = (exported / "SPEC.md").read_text()
    assert "| 1 | 4 | 4 | 0 | 3 | none |" in text
    assert "i ≥ min(t − 16 + 1, covered(t))" in text
    assert "{" not in text.replace("{i}", "").replace("{j}", ""), "a field was left unfilled"


def test_what_is_not_python_is_package_data() -> None:
    root = Path(__file__).resolve().parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("mitigate.export", "mitigate.export.targets"):
        others = {path.name for path in (root / package.replace(".", "/")).iterdir() if path.is_file() and path.suffix != ".py"}
        assert others and all(any(fnmatch.fnmatch(name, pattern) for pattern in data[package]) for name in others)


def test_a_refused_export_leaves_nothing(study: Path, tmp_path: Path) -> None:
    copy = tmp_path / "study"
    shutil.copytree(study, copy)
    (copy / "trials" / "0001" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        bundle.write(copy, 1, tmp_path / "bundle")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["study"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--knee"], "trial "),
        (["--best", "a_min", "--require", "kv_kept <= 60%"], "a_min is "),
        (["--best", "kept"], "cost.kv_kept is "),
    ],
)
def test_a_trial_may_be_chosen_by_what_it_scores(options: list[str], said: str, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(study), *options, "--to", str(tmp_path / "b")]) == 0
    printed = capsys.readouterr().out
    assert said in printed and f"bundle: {tmp_path / 'b'}" in printed
    trial = int(printed.split("trial ")[1].split(",")[0])
    assert json.loads((tmp_path / "b" / "row.json").read_text())["trial"] == trial != 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--knee", "9"], "--knee must be between 1 and"),
        (["--best", "a_mn"], "--best: there is no column 'a_mn'; did you mean 'a_min'?"),
        (["--best", "a_min", "--require", "kv_kept <= 0.01"], "no finished trial meets kv_kept <= 0.01; kv_kept runs from"),
        (["--trial", "1", "--require", "kv_kept <= 1"], "--require goes with --best"),
        (["--trial", "1", "--target", "deepseek-v4"], "cannot be written as deepseek_v4: VariantConfig.gate=scalar (must be one gate per channel: vector)"),
    ],
)
def test_a_bad_choice_is_one_line(options: list[str], complaint: str, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(study), *options, "--to", str(tmp_path / "b")]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
