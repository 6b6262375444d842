"""Hold a port's outputs against a bundle's golden vectors, level by level, and name the first tensor that is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from mitigate.config import ConfigError
from mitigate.export.bundle import DamagedBundle
from mitigate.export.describe import Tensors
from mitigate.export.golden import FOLDER, LEVELS, ONESHOT

LIKENESS = 1e-3  # wrong logits this close (relative) to a known wrong answer are called by its name


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The first thing that is wrong: where, and what was expected."""

    level: str
    case: str
    tensor: str
    problem: str

    def __str__(self) -> str:
        return f"{self.level}, case {self.case}, tensor {self.tensor}: {self.problem}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a comparison: the first mismatch, or how far the outputs are from the golden values.

    Args:
        largest: per level, the largest difference relative to max(1, largest golden magnitude of the tensor).
        tensors: how many were compared.
        weak: known wrong answers that fp32 outputs could not be told from, in words; a trained gate hardly ever gives one.
    """

    mismatch: Mismatch | None
    largest: dict[str, float]
    tensors: int
    weak: list[str]

    @property
    def ok(self) -> bool:
        return self.mismatch is None


@dataclass(frozen=True, kw_only=True)
class Fixture:
    """A bundle's cases and their expected outputs."""

    levels: list[str]
    cases: list[dict[str, Any]]
    must_differ: list[dict[str, Any]]
    inputs: Tensors
    expected: Tensors


def read_fixture(folder: Path) -> Fixture:
    """The golden vectors of a bundle; DamagedBundle names a file that is missing or damaged."""
    golden = folder / FOLDER
    for name in ("cases.json", *(f"{name}.safetensors" for name in (*LEVELS, "inputs"))):
        if not (golden / name).is_file():
            raise DamagedBundle(f"{golden / name} is missing")
    try:
        listed = json.loads((golden / "cases.json").read_text(encoding="utf-8"))
        expected: Tensors = {}
        for level in LEVELS:
            expected |= load_file(golden / f"{level}.safetensors")
        inputs = load_file(golden / "inputs.safetensors")
        return Fixture(levels=listed["levels"], cases=listed["cases"], must_differ=listed["must_differ"], inputs=inputs, expected=expected)
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedBundle(f"{golden} is damaged: {' '.join(str(error).split())}") from None


def read_outputs(folder: Path, levels: list[str]) -> Tensors:
    """A port's outputs: ``<level>.safetensors`` of every level. ConfigError where the folder or a file is missing or no safetensors."""
    if not folder.is_dir():
        raise ConfigError(f"--against {folder}: there is no such folder")
    found: Tensors = {}
    for level in levels:
        path = folder / f"{level}.safetensors"
        if not path.is_file():
            raise ConfigError(f"{path} is missing; a port writes one file a level: {', '.join(f'{name}.safetensors' for name in levels)}")
        try:
            found |= load_file(path)
        except SafetensorError as error:
            raise ConfigError(f"{path} is no safetensors file: {' '.join(str(error).split())}") from None
    return found


def compare(fixture: Fixture, outputs: Tensors, tolerances: dict[str, dict[str, float]]) -> Outcome:
    """Hold outputs against the golden values, in the order of the cases; stops at the first mismatch.

    Args:
        outputs: ``<level>.<case>.<output>`` in fp64 or fp32 (integers at L1). The precision of each tensor chooses its tolerance.
        tolerances: by dtype and level, relative to max(1, largest golden magnitude of the tensor). L1 must be equal.
    """
    largest: dict[str, float] = {}
    count = 0
    for case in fixture.cases:
        level = case["level"]
        for output in case["outputs"]:
            name = f"{level}.{case['case']}.{output}"
            expected = fixture.expected[case.get("expected", {}).get(output, name)]
            problem, difference = _problem(name, expected, outputs, tolerances, level)
            if problem and output == "logits" and name in outputs:
                problem += _likeness(fixture, case, outputs[name])
            if problem:
                return Outcome(mismatch=Mismatch(level=level, case=case["case"], tensor=output, problem=problem), largest=largest, tensors=count, weak=[])
            largest[level], count = max(largest.get(level, 0.0), difference), count + 1
    mismatch, weak = _anti(fixture, outputs, tolerances)
    return Outcome(mismatch=mismatch, largest=largest, tensors=count, weak=weak)


def _problem(name: str, expected: torch.Tensor, outputs: Tensors, tolerances: dict[str, dict[str, float]], level: str) -> tuple[str, float]:
    """What is wrong with one output, empty if nothing; and its relative difference."""
    if name not in outputs:
        return f"{name} is missing from {level}.safetensors", 0.0
    got = outputs[name]
    if got.shape != expected.shape:
        return f"the shape must be {list(expected.shape)}, got {list(got.shape)}", 0.0
    if not expected.is_floating_point():
        wrong = got.long() != expected.long()
        return _worst(wrong.double(), expected, got, f"{int(wrong.sum())} of {wrong.numel()} entries differ") if bool(wrong.any()) else "", 0.0
    kind = str(got.dtype).removeprefix("torch.")
    if kind not in tolerances:
        return f"must be {' or '.join(tolerances)}, got {kind}", 0.0
    finite = expected.isfinite()
    wide = got.double()
    if bool((wide.isneginf() != expected.isneginf()).any()):
        wrong = wide.isneginf() != expected.isneginf()
        return _worst(wrong.double(), expected, got, "minus infinity must stand exactly where the token does not exist"), 0.0
    if not bool(wide[finite].isfinite().all()):
        return _worst((~wide.isfinite() & finite).double(), expected, got, "a value is not finite"), 0.0
    difference = torch.where(finite, (wide - expected).abs(), 0.0)
    scale = max(1.0, float(expected[finite].abs().max())) if bool(finite.any()) else 1.0
    relative, allowed = float(difference.max()) / scale if difference.numel() else 0.0, tolerances[kind][level]
    if relative <= allowed:
        return "", relative
    return _worst(difference, expected, got, f"{float(difference.max()):.3g} off, allowed {allowed * scale:.3g} in {kind}"), relative


def _worst(difference: torch.Tensor, expected: torch.Tensor, got: torch.Tensor, problem: str) -> str:
    index = [int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)]
    where = tuple(index)
    return f"{problem}; worst at {index}: expected {expected[where].item():.9g}, got {got[where].item():.9g}"


def _likeness(fixture: Fixture, case: dict[str, Any], got: torch.Tensor) -> str:
    """' (these are the logits of X)' where a wrong answer is one that is known."""
    if case["level"] != "L2" or case["last"] == 1:
        return ""
    for wrong in fixture.must_differ:
        known = fixture.expected[wrong["tensor"]]
        if known.shape == got.shape and float((got.double() - known).abs().max()) <= LIKENESS * max(1.0, float(known.abs().max())):
            return f"; these are the logits of {wrong['what']}"
    return ""


def _anti(fixture: Fixture, outputs: Tensors, tolerances: dict[str, dict[str, float]]) -> tuple[Mismatch | None, list[str]]:
    """The one-shot logits must keep away from every known wrong answer by its stated minimum."""
    weak: list[str] = []
    got = outputs.get(ONESHOT)
    for wrong in fixture.must_differ:
        known, plain = fixture.expected[wrong["tensor"]], fixture.expected[wrong["from"]]
        name = wrong["tensor"].split(".")[1]
        if got is None:
            return Mismatch(level="anti", case=name, tensor="logits", problem=f"{ONESHOT} is missing"), weak
        away, own = float((got.double() - known).abs().max()), float((plain - known).abs().max())
        slack = tolerances[str(got.dtype).removeprefix("torch.")]["L2"] * max(1.0, float(plain.abs().max()))
        if own < wrong["minimum"]:
            problem = f"the golden logits are those of {wrong['what']}: they differ by {own:.3g}, at least {wrong['minimum']:.3g} is stated"
            return Mismatch(level="anti", case=name, tensor="logits", problem=problem), weak
        if wrong["minimum"] <= 2 * slack:
            weak.append(f"{wrong['what']} (differs by {own:.2g})")
        elif away < wrong["minimum"]:
            problem = f"{ONESHOT} is only {away:.3g} from the logits of {wrong['what']}, at least {wrong['minimum']:.3g} is needed"
            return Mismatch(level="anti", case=name, tensor="logits", problem=problem), weak
    return None, weak
