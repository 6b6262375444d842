"""`mitigate doctor`: what it finds here, how it says so, and that a wrong kernel does not pass."""

from __future__ import annotations

import dataclasses

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
    assert {check.kernel.split()[0] for check in found.checks} >= {"pool", "attend", "append"}
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


def test_a_wrong_kernel_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.attend
    monkeypatch.setattr(ops, "attend", lambda *args, **kwargs: (right(*args, **kwargs)[0] * 1.001, None))
    checks = {check.kernel: check.passed for check in small_checks(torch.device("cpu"))}
    assert not any(passed for name, passed in checks.items() if name.startswith("attend"))
    assert all(passed for name, passed in checks.items() if not name.startswith("attend"))


def test_notes() -> None:
    assert "mitigate[gpu]" in doctor.notes(cuda=True, triton=False)[0]
    assert "no CUDA device" in doctor.notes(cuda=False, triton=True)[0]
    assert doctor.notes(cuda=True, triton=True) == doctor.notes(cuda=False, triton=False) == ()
