"""`mitigate doctor`: what it finds here, how it says so, and that a wrong kernel does not pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mitigate import doctor
from mitigate.kernels import ops
from mitigate.kernels.checks import small_checks


@pytest.fixture(scope="module")
def found() -> doctor.Examination:
    return doctor.examine()


def test_every_kernel_is_checked_and_right(found: doctor.Examination) -> None:
    assert found.healthy
    names = [check.kernel for check in found.checks]
    assert {name.split()[0] for name in names} == {"pool", "attend", "decode", "append"}, "every operator"
    for words in ("pool scalar", "pool vector", "pool uniform", "pool vector per role", "pool scalar packed", "attend H4 G1", "attend H4 G2 packed"):
        assert sum(name.startswith(f"{words} W") for name in names) == 1, words
    assert all(0 < check.error <= check.allowed for check in found.checks)
    assert sum(check.seconds for check in found.checks) < 60


def test_it_names_devices_versions_and_backends(found: doctor.Examination) -> None:
    assert found.devices[0].name == "cpu"
    assert found.devices[0].backend == ops.backend("cpu")
    printed = doctor.text(found)
    for word in ("torch", torch.__version__, "kernels: torch-cpu-blocked", "all kernels agree with the reference"):
        assert word in printed


def test_it_prints_and_gives_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run() == 0
    assert capsys.readouterr().out.endswith("all kernels agree with the reference\n")


@pytest.mark.parametrize("error", [1.0, float("nan"), float("inf")])
def test_a_failed_check_is_said_loudly(found: doctor.Examination, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(found.checks[0], error=error)
    ill = dataclasses.replace(found, checks=(wrong, *found.checks[1:]))
    assert not ill.healthy
    assert f"WRONG: {wrong.kernel}" in doctor.text(ill)
    assert "FAIL" in doctor.text(ill)
    monkeypatch.setattr(doctor, "examine", lambda: ill)
    assert doctor.run() == 1


@pytest.mark.parametrize("name", ["pool", "attend", "decode", "append"])
def test_a_wrong_kernel_fails_its_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(ops, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = right(*args, **kwargs)
        return (found[0] * 1.001, None) if isinstance(found, tuple) else found * 1.001

    monkeypatch.setattr(ops, name, wrong)
    for check in small_checks(torch.device("cpu")):
        assert check.passed != check.kernel.startswith(name), check


def test_notes() -> None:
    assert "mitigate[gpu]" in doctor.notes(cuda=True, triton=False)[0]
    assert "no CUDA device" in doctor.notes(cuda=False, triton=True)[0]
    assert doctor.notes(cuda=True, triton=True) == doctor.notes(cuda=False, triton=False) == ()
