"""Check a bundle: its files, its description, its golden vectors with our own code, and then with its `reference.py` in a process without this project."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mitigate.config import WorkFailed
from mitigate.export import bundle, describe, golden
from mitigate.export.against import Fixture, Outcome, compare, read_fixture, read_outputs
from mitigate.surgery import Attachment

TIMEOUT_S = 1800
# `-I` drops the working directory, PYTHONPATH and the user's folder; the finder drops what an (editable) installation would still offer.
_ALONE = """
import runpy, sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {forbidden!r}:
            raise ModuleNotFoundError(f"{{name}} is not there for reference.py", name=name)
sys.meta_path.insert(0, Nowhere())
sys.dont_write_bytecode = True
import torch
torch.set_num_threads(1)
sys.argv = {argv!r}
runpy.run_path({script!r}, run_name="__main__")
"""
FORBIDDEN = ("mitigate", "transformers")


class PortFailed(WorkFailed):
    """Outputs differ from the golden vectors, or a bundle's reference cannot be run; the message names the first thing that is wrong."""


def verify(folder: Path, *, trust_code: bool = False, log: Callable[[str], None] = lambda line: None) -> None:
    """Check everything that a bundle says about itself.

    Args:
        trust_code: run a `reference.py` that is not the text that this version writes. It is a program from the bundle.
        log: called with one line for each check that passed.

    Raises:
        bundle.DamagedBundle: a file is missing, changed, or does not fit the others.
        PortFailed: golden vectors are missed; the message names the code, level, case and tensor.
    """
    bundle.check_manifest(folder)
    log("manifest: every file is there and as it was written")
    described = bundle.read_description(folder)
    attached = bundle.rebuild(folder, described)
    bundle.check_consistency(folder, described, attached)
    fixture = read_fixture(folder)
    _check_cases(folder, described, fixture)
    log(f"compressor.json: follows its schema and agrees with row.json and the weights ({len(described['tensors'])} tensors)")
    tolerances = described["tolerances"]
    with _one_thread():
        as_loaded = _as_loaded(fixture, attached)
        weights = {name: bundle.read_tensors(folder / name) for name in {case["weights"] for case in fixture.cases}}
        found = golden.answers(golden.widen(attached), fixture.cases, fixture.inputs, weights)
    _require(compare(fixture, found, tolerances), f"{folder}: our own code", log, "mitigate's own code, fp64")
    _require(compare(*as_loaded, tolerances), f"{folder}: our own code in fp32", lambda line: None, "")
    if not trust_code and (folder / bundle.REFERENCE).read_text(encoding="utf-8") != bundle.resource(bundle.REFERENCE):
        raise bundle.DamagedBundle(f"{folder / bundle.REFERENCE} is not the text that this version of mitigate writes; read it, then --trust-code runs it")
    _require(compare(fixture, run_reference(folder, fixture.levels), tolerances), f"{folder}: its reference.py", log, "reference.py without this project, fp64")


def verify_port(folder: Path, outputs: Path, *, log: Callable[[str], None] = lambda line: None) -> None:
    """Hold another codebase's outputs against a bundle's golden vectors.

    Args:
        outputs: folder with ``L0.safetensors``, ``L1.safetensors``, … as `golden` describes.

    Raises:
        bundle.DamagedBundle, ConfigError: the bundle is damaged, or a file of outputs is missing.
        PortFailed: names the first level, case and tensor that is wrong.
    """
    bundle.check_manifest(folder)
    described, fixture = bundle.read_description(folder), read_fixture(folder)
    outcome = compare(fixture, read_outputs(outputs, fixture.levels), described["tolerances"])
    _require(outcome, str(outputs), log, str(outputs))
    for what in outcome.weak:
        log(f"note: in fp32 these outputs cannot be told from {what}; send fp64 to be sure")


def run_reference(folder: Path, levels: list[str], dtype: str = "float64") -> dict[str, torch.Tensor]:
    """Outputs of a bundle's `reference.py`, run in a new process that can import neither this project nor transformers.

    Raises:
        PortFailed: it failed; the message is its last line.
    """
    script = (folder / bundle.REFERENCE).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        argv = [str(script), str(folder.resolve()), scratch, dtype]
        code = _ALONE.format(forbidden=FORBIDDEN, argv=argv, script=str(script))
        try:
            done = subprocess.run([sys.executable, "-I", "-c", code], cwd=scratch, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise PortFailed(f"{script} did not end within {TIMEOUT_S} s") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Found)\b", line)] or lines or [f"exit code {done.returncode}"]
            raise PortFailed(f"{script} failed: {errors[-1]}")
        return read_outputs(Path(scratch), levels)


def _check_cases(folder: Path, described: dict[str, Any], fixture: Fixture) -> None:
    """The cases must be those that this description calls for: a fixture that leaves some out proves less than it says."""
    different = bundle.first_difference(fixture.cases, golden.cases(described), "cases")
    if different:
        raise bundle.DamagedBundle(f"{folder / golden.FOLDER / 'cases.json'}: {different}"[:300])
    for case in fixture.cases:
        for output in case["outputs"]:
            name = case.get("expected", {}).get(output, f"{case['level']}.{case['case']}.{output}")
            if name not in fixture.expected:
                raise bundle.DamagedBundle(f"{folder / golden.FOLDER}: golden tensor {name} is missing")


def _as_loaded(fixture: Fixture, attached: Attachment) -> tuple[Fixture, describe.Tensors]:
    """What the model gives as users load it, in fp32, in one call; and the part of the fixture that this answers."""
    cases = [case for case in fixture.cases if case["case"] == "oneshot"]
    found = golden.answers(attached, cases, fixture.inputs, {golden.PLAIN: describe.to_plain(attached)})
    return Fixture(levels=fixture.levels, cases=cases, must_differ=[], inputs=fixture.inputs, expected=fixture.expected), found


def _require(outcome: Outcome, who: str, log: Callable[[str], None], passed: str) -> None:
    if outcome.mismatch is not None:
        raise PortFailed(f"{who}: {outcome.mismatch}")
    levels = ", ".join(f"{level} {'equal' if level == 'L1' else f'to {error:.1g}'}" for level, error in outcome.largest.items())
    log(f"{passed}: {outcome.tensors} golden tensors reproduced ({levels})")


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
