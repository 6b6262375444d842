"""Golden vectors: every preset is reproduced by the bundle's reference.py, and the anti-tests tell wrong models apart."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import presets
import pytest
import tiny_models
import torch
from safetensors.torch import load_file

from mitigate.config import BaseConfig, ConfigError, TrialConfig, VariantConfig
from mitigate.config_files import from_dict
from mitigate.export import against, bundle, describe, golden, reference, verify

QUICK = [name for name in presets.VARIANTS if name != "deepseek-hca"]
ONE_LAYER = BaseConfig(**{**vars(presets.BASE), "layers": 1, "kv_heads": 1})


def by_reference(folder: Path, output: Path, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """What reference.py of a bundle computes, in this process: its text is that of the module."""
    assert (folder / "reference.py").read_text() == bundle.resource("reference.py")
    output.mkdir(exist_ok=True)
    with torch.inference_mode():
        reference.main(folder, output, dtype)
    return against.read_outputs(output, against.read_fixture(folder).levels)


@pytest.mark.parametrize("name", QUICK)
def test_every_preset_is_reproduced_by_its_reference(name: str, tmp_path: Path) -> None:
    folder = presets.exported(presets.VARIANTS[name], tmp_path / "bundle")
    fixture, tolerances = against.read_fixture(folder), bundle.read_description(folder)["tolerances"]
    outcome = against.compare(fixture, by_reference(folder, tmp_path / "out"), tolerances)
    assert outcome.ok, outcome.mismatch
    assert max(outcome.largest.values()) < 1e-13
    assert outcome.weak == []
    variant = presets.VARIANTS[name]
    assert len(fixture.must_differ) == (2 if variant.gate == "uniform" or variant.window * variant.coarse_factor == 1 else 4)


def test_windows_longer_than_most_prompts_too(tmp_path: Path) -> None:
    folder = presets.exported(tiny_models.COMPRESSED["deepseek-hca"], tmp_path / "bundle", ONE_LAYER)
    outcome = against.compare(against.read_fixture(folder), by_reference(folder, tmp_path / "out"), describe.TOLERANCES)
    assert outcome.ok, outcome.mismatch


@pytest.mark.parametrize("name", ["w8s8", "w16s8-stagger-content", "everything", "coarse-overlap"])
def test_fp32_outputs_pass_within_their_tolerance(name: str, tmp_path: Path) -> None:
    folder = presets.exported(presets.VARIANTS[name], tmp_path / "bundle")
    outcome = against.compare(against.read_fixture(folder), by_reference(folder, tmp_path / "out", torch.float32), describe.TOLERANCES)
    assert outcome.ok, outcome.mismatch
    assert 0 < outcome.largest["L0"] < describe.TOLERANCES["float32"]["L0"] / 4
    assert 0 < outcome.largest["L2"] < describe.TOLERANCES["float32"]["L2"] / 4


def described(variant: VariantConfig) -> dict[str, Any]:
    """compressor.json of a variant."""
    row, attached = presets.made(variant)
    return describe.describe(from_dict(TrialConfig, row.config), row, attached, weights_sha256="0" * 64)


def test_cases_cover_what_ports_get_wrong() -> None:
    variant = tiny_models.COMPRESSED["everything"]  # W12 S8, staggered
    spec = described(variant)
    cases = golden.cases(spec)
    lengths = {case["length"] for case in cases if case["level"] == "L1"}
    assert {7, 8, 9, 11, 12, 13, 24} <= lengths
    assert max(lengths) > variant.local_window + variant.window, "some length must be past the local window"
    assert {case["layer"] for case in cases if case["level"] == "L1"} == {0, 1}, "each origin has its matrices"
    assert {case["case"] for case in cases if case["level"] == "L2"} >= {"oneshot", "chunks1", "chunks7", "chunks8", "chunks9", "chunks11", "decode", "phase7"}
    decode = next(case for case in cases if case["case"] == "decode")
    assert decode["chunks"][1:] == [1] * (2 * 8 + 3)
    assert sum(decode["chunks"]) == golden.logits_length(spec)


def test_cases_cover_layers_of_different_windows() -> None:
    spec = described(presets.VARIANTS["coarse-overlap"])  # W6 S4 and W12 S8, of one origin
    cases = golden.cases(spec)
    lengths = {layer: {case["length"] for case in cases if case["level"] == "L1" and case["layer"] == layer} for layer in (0, 1)}
    assert {3, 4, 5, 6, 12} <= lengths[0] and {7, 8, 9, 12, 24} <= lengths[1], "each grid has its matrices"
    chunks = {f"chunks{size}" for size in (1, 3, 4, 5, 6, 7, 8, 9, 11, 12)}
    assert {case["case"] for case in cases if case["level"] == "L2"} == {"oneshot", "decode", *chunks, *(f"phase{shift}" for shift in range(8))}
    decode = next(case for case in cases if case["case"] == "decode")
    assert len(decode["chunks"]) > 2 * 8, "decoding completes windows of the coarse layer"
    sampled = golden.cases(described(VariantConfig(coarse="odd", coarse_factor=12)))  # S8 and S96: too many shifts to run them all
    shifts = {int(case["case"].removeprefix("phase")) for case in sampled if case["case"].startswith("phase")}
    assert len(shifts) < 60 and {shift % 8 for shift in shifts} == set(range(8))


@pytest.mark.parametrize("name", presets.COARSE)
def test_what_goes_wrong_in_one_layer_shows_in_the_logits(name: str, tmp_path: Path) -> None:
    folder = presets.exported(presets.VARIANTS[name], tmp_path / "bundle")
    spec, fixture = bundle.read_description(folder), against.read_fixture(folder)
    tensors, weights = ({key: x.double() for key, x in load_file(folder / file).items()} for file in (golden.PLAIN, "model.safetensors"))
    oneshot = next(case for case in fixture.cases if case["case"] == "oneshot")
    for what, (kind, _) in golden.WRONG.items():
        for layer, grid in enumerate(spec["layers"]):
            model = reference.Model(spec, weights, tensors)
            model.compressors[layer] = kind(spec, layer, tensors, model.compressors[layer].norm)
            with torch.inference_mode():
                away = (reference.answer(oneshot, model, fixture.inputs)["logits"] - fixture.expected[golden.ONESHOT]).abs().max()
            same = what == "payload_reversed" and grid["window"] == 1
            assert away < 1e-12 if same else away > 1e-2, f"{what} in layer {layer}: {away}"


def test_every_bundle_follows_the_published_schema(tmp_path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(describe.schema())
    spec = bundle.read_description(presets.exported(tiny_models.COMPRESSED["w8s8"], tmp_path / "bundle"))
    describe.check_schema(spec)
    for path, value, complaint in [
        (("layers", 0, "window"), 0, r"layers\[0\]\.window: 0 is less than the minimum of 1"),
        (("gate", "kind"), "hard", r"gate\.kind: 'hard' is not one of"),
        (("visibility", "strict"), True, r"visibility\.strict: False was expected"),
        (("exact", "lokal"), 3, r"exact: Additional properties are not allowed \('lokal' was unexpected\)"),
        (("layers", 1, "key_shift"), -1, r"layers\[1\]\.key_shift: -1 is less than the minimum of 0"),
        (("rope", "shift"), 0, r"rope: Additional properties are not allowed \('shift' was unexpected\)"),
        (("schema_version",), 2, "schema_version must be 3, got 2; export the trial again"),
    ]:
        changed = copy.deepcopy(spec)
        inner = changed
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = value
        with pytest.raises(ConfigError, match=complaint):
            describe.check_schema(changed)


def test_an_untrained_gate_can_be_exported_though_its_shuffle_proves_nothing(tmp_path: Path) -> None:
    row, attached = presets.made(VariantConfig(gate="content"))
    with torch.no_grad():
        for parameter in attached.compressors.parameters():
            parameter.zero_()
    folder = bundle.into_folder(tmp_path / "b", lambda partial: bundle.write_parts(partial, row, attached))
    assert {wrong["tensor"] for wrong in against.read_fixture(folder).must_differ} == {"anti.exact_only.logits", "anti.full_attention.logits"}
    assert against.compare(against.read_fixture(folder), by_reference(folder, tmp_path / "out"), describe.TOLERANCES).ok


def test_plain_keys_there_and_back() -> None:
    for name in ("everything", "per-offset-tied", "w8s8-tied-gates", "w8s8-uniform", "w8s8-per-offset", "coarse-overlap"):
        _, attached = presets.made(presets.VARIANTS[name])
        plain = describe.to_plain(attached)
        before = {key: x.clone() for key, x in attached.compressors.state_dict().items()}
        with torch.no_grad():
            for parameter in attached.compressors.parameters():
                parameter.zero_()
        describe.from_plain(attached, plain)
        after = attached.compressors.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_the_reference_runs_where_this_project_is_not(tmp_path: Path) -> None:
    folder = presets.exported(presets.VARIANTS["coarse-overlap"], tmp_path / "bundle")
    lines: list[str] = []
    verify.verify(folder, log=lines.append)
    assert [line.split(":")[0] for line in lines] == [
        "manifest",
        "compressor.json",
        "mitigate's own code, fp64",
        "reference.py without this project, fp64",
    ]
    (folder / "reference.py").write_text("import mitigate\n")
    with pytest.raises(verify.PortFailed, match=r"mitigate is not there for reference\.py"):
        verify.run_reference(folder, ["L0"])
    assert load_file(folder / "golden" / "L1.safetensors")["L1.layer0_T7.visible"].shape == (7, 9)
