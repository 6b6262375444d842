"""Another codebase's outputs: typical mistakes of a port are found, at the level that is meant to find them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import presets
import pytest
import torch
from safetensors.torch import load_file, save_file

from mitigate import cli
from mitigate.config import VariantConfig
from mitigate.export import against, describe, golden, reference, verify


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with overlap, shifted layers and a bypass; not to be changed."""
    variant = VariantConfig(window=8, stride=4, origin=-1, stagger="half", bypass="last", local_window=3)
    return presets.exported(variant, tmp_path_factory.mktemp("bundle") / "bundle")


@pytest.fixture
def outputs(folder: Path, tmp_path: Path) -> Path:
    """What a right port writes."""
    return run(folder, tmp_path / "outputs")


def run(folder: Path, output: Path, dtype: torch.dtype = torch.float64) -> Path:
    """Outputs of reference.py as it stands, with whatever was planted in it."""
    output.mkdir(exist_ok=True)
    with torch.inference_mode():
        reference.main(folder, output, dtype)
    return output


def failure(folder: Path, outputs: Path) -> str:
    """What `verify --against` says."""
    with pytest.raises(verify.PortFailed) as caught:
        verify.verify_port(folder, outputs)
    return str(caught.value)


def test_a_right_port_passes(folder: Path, outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(folder), "--against", str(outputs)]) == 0
    assert "golden tensors reproduced (L0 to " in capsys.readouterr().out


class _Strict(reference.Compressor):
    """A window is seen only after the token that completes it."""

    def visible(self, query_T: torch.Tensor, token_M: torch.Tensor, summaries: int) -> torch.Tensor:
        seen = super().visible(query_T, token_M, summaries)
        seen[:, :summaries] = torch.arange(summaries) < self.completed(query_T[:, None])
        return seen


class _NoBypass(reference.Compressor):
    def kept(self, token: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(token, dtype=torch.bool)


class _ZeroPadded(reference.Compressor):
    """Tokens before the first one take part in the softmax."""

    def gates(self, h_BNWC: torch.Tensor, exists_NW: torch.Tensor, branch: str) -> tuple[torch.Tensor, torch.Tensor]:
        return super().gates(h_BNWC, torch.ones_like(exists_NW), branch)


class _WrongPosition(reference.Compressor):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shift -= 1


class _FirstShift(reference.Compressor):
    """Takes every layer's keys to be rotated as far from a window's start as layer 0's."""

    def __init__(self, spec: Any, *args: Any) -> None:
        super().__init__(spec, *args)
        self.shift = spec["layers"][0]["key_shift"]


class _FirstStride(reference.Compressor):
    """Takes every layer to have the stride of layer 0."""

    def __init__(self, spec: Any, *args: Any) -> None:
        super().__init__(spec, *args)
        self.stride = spec["layers"][0]["stride"]


class _FirstLayersVisibility(reference.Compressor):
    """Keeps as few exact tokens in every layer as the shortest windows allow."""

    def __init__(self, spec: Any, layer: int, *args: Any) -> None:
        super().__init__(spec, layer, *args)
        self.first = reference.Compressor(spec, 0, *args) if layer else self

    def exact_from(self, t: torch.Tensor) -> torch.Tensor:
        return super().exact_from(t) if self.first is self else self.first.exact_from(t)


class _NormFirst(reference.Compressor):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norm_tokens = not self.norm_tokens


class _BiasRow(reference.Compressor):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tensors["k.gate.bias"] = self.tensors["k.gate.bias"].roll(-1, 0)


class _OnlyExact(reference.Compressor):
    def visible(self, query_T: torch.Tensor, token_M: torch.Tensor, summaries: int) -> torch.Tensor:
        seen = super().visible(query_T, token_M, summaries)
        seen[:, :summaries] = False
        return seen


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (_Strict, "L1, case layer0_T"),
        (_NoBypass, "L1, case layer0_T"),
        (_ZeroPadded, "L0, case layer0, tensor key_gate_logits: minus infinity must stand exactly where the token does not exist"),
        (_WrongPosition, "L0, case layer0, tensor key: "),
        (_NormFirst, "L0, case layer0, tensor pooled_key: "),
        (_BiasRow, "L0, case layer0, tensor key_gate_logits: "),
    ],
)
def test_a_mistake_is_found_at_its_level(mistake: Any, said: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "Compressor", mistake)
    assert said in failure(folder, run(folder, tmp_path / "wrong"))


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (_FirstShift, "L0, case layer1, tensor key: "),
        (_FirstStride, "L0, case layer1, tensor key_gate_logits: the shape must be "),
        (_FirstLayersVisibility, "L1, case layer1_T"),
    ],
)
def test_one_layers_numbers_for_all_are_found(mistake: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = presets.exported(presets.VARIANTS["coarse-overlap"], tmp_path / "bundle")
    monkeypatch.setattr(reference, "Compressor", mistake)
    assert said in failure(folder, run(folder, tmp_path / "wrong"))


@pytest.fixture
def careless_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[reference.State]]:
    """A State that forgets the rows which open windows share with the last call."""

    class Forgetful(reference.State):
        def extend(self, c: Any, rows: Any, key_BTGD: torch.Tensor) -> Any:
            found = super().extend(c, rows, key_BTGD)
            self.rows = tuple(torch.zeros_like(x) for x in self.rows)
            return found

    monkeypatch.setattr(reference, "State", Forgetful)
    yield Forgetful


def test_lost_overlap_shows_in_chunks_only(careless_state: Any, folder: Path, tmp_path: Path) -> None:
    text = failure(folder, run(folder, tmp_path / "wrong"))
    assert "L2, case chunks1, tensor logits" in text


def test_a_port_that_falls_back_is_called_by_its_name(folder: Path, outputs: Path) -> None:
    wrong = load_file(folder / "golden" / "anti.safetensors")
    for kind, words in (("full_attention", "full attention: the compressor does nothing"), ("exact_only", "local attention: no summary is seen")):
        tensors = load_file(outputs / "L2.safetensors")
        save_file(tensors | {golden.ONESHOT: wrong[f"anti.{kind}.logits"].clone()}, outputs / "L2.safetensors")
        text = failure(folder, outputs)
        assert "L2, case oneshot, tensor logits" in text and f"these are the logits of {words}" in text


def test_a_port_that_ignores_the_weights_it_is_given_fails_the_anti_test(folder: Path, outputs: Path) -> None:
    plain = load_file(outputs / "L2.safetensors")[golden.ONESHOT].clone()
    save_file({"anti.shuffled.logits": plain}, outputs / "anti.safetensors")
    assert "anti, case shuffled, tensor logits" in failure(folder, outputs)


def test_a_fixture_that_cannot_tell_is_refused(folder: Path, outputs: Path) -> None:
    fixture = against.read_fixture(folder)
    same = fixture.expected | {"anti.exact_only.logits": fixture.expected[golden.ONESHOT]}
    blind = against.Fixture(levels=fixture.levels, cases=fixture.cases, must_differ=fixture.must_differ, inputs=fixture.inputs, expected=same)
    outcome = against.compare(blind, against.read_outputs(outputs, fixture.levels), describe.TOLERANCES)
    assert "the golden logits are those of local attention" in str(outcome.mismatch)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x.pop("L0.layer1.value"), "L0, case layer1, tensor value: L0.layer1.value is missing from L0.safetensors"),
        (lambda x: x.update({"L0.layer1.key": x["L0.layer1.key"][1:].clone()}), "the shape must be ["),
        (lambda x: x.update({"L0.layer1.key": x["L0.layer1.key"].half()}), "must be float32 or float64, got float16"),
        (lambda x: x["L0.layer1.key"].view(-1)[5].fill_(float("nan")), "a value is not finite; worst at [0, 0, 5]"),
    ],
)
def test_a_bad_tensor_is_named(change: Any, said: str, folder: Path, outputs: Path) -> None:
    tensors = load_file(outputs / "L0.safetensors")
    change(tensors)
    save_file(tensors, outputs / "L0.safetensors")
    assert said in failure(folder, outputs)


def test_missing_outputs_are_bad_input(folder: Path, outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(folder), "--against", str(outputs / "none")]) == 2
    (outputs / "L1.safetensors").unlink()
    assert cli.main(["verify", str(folder), "--against", str(outputs)]) == 2
    (outputs / "L1.safetensors").write_text("?")
    assert cli.main(["verify", str(folder), "--against", str(outputs)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "there is no such folder" in errors[0] and "L1.safetensors is missing" in errors[1] and "is no safetensors file" in errors[2]
