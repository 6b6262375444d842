"""The bench: its formulas against hand-made numbers and the published floors, and every part of it run once, small."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mitigate.kernels import bench, cases, checks, reference
from mitigate.report import kernels_figure

SMALL = cases.AttendCase(batch=2, heads=2, groups=1, length=40, dim=8, window=8, stride=4, local=5)
CPU = torch.device("cpu")
RATES = {"flops_per_s": 1e11, "bytes_per_s": 1e10}


def test_pairs_are_those_the_mask_shows() -> None:
    for case in (SMALL, *cases.ATTEND):
        t = torch.arange(case.length)
        visible = reference.visible(t, t, case.windows, window=case.window, stride=case.stride, origin=0, local=case.local)
        assert case.pairs == int(visible.sum())


def test_flops_and_bytes_by_hand() -> None:
    case = cases.AttendCase(batch=1, heads=2, groups=1, length=2, dim=4, window=1, stride=1, local=1)
    assert case.windows == 2
    assert case.pairs == (1 + 1) + (2 + 1), "each query sees its summaries and itself"
    assert case.flops("fwd") == 4 * 2 * 4 * 5
    assert case.flops("bwd") == 10 * 2 * 4 * 5
    assert case.bytes("fwd", 2) == 2 * (2 * 2 * 2 * 4 + 2 * (2 + 2) * 4)
    pool = cases.PoolCase(batch=1, groups=1, length=8, dim=4, window=4, stride=2, channels=1)
    assert (pool.windows, pool.roles) == (3, 2)
    assert pool.bytes("fwd", 2) == 2 * 8 * (4 + 2) + 2 * 3 * 4 + 4 * 3
    assert pool.bytes("bwd", 2) == 2 * 2 * 8 * (4 + 2) + 3 * (2 * 2 * 4 + 4)


def test_expected_times_are_the_published_floors() -> None:
    """Those of the design page, to its last digit."""
    rows = [(round(row["fwd_us"]), row["bwd_us"] and round(row["bwd_us"]), row["dense_fwd_us"] and round(row["dense_fwd_us"])) for row in cases.expected()]
    assert rows[:5] == [(67, 135, None), (199, 390, None), (130, 260, None), (261, 515, None), (74, 140, None)]
    assert rows[5] == (3476, 12167, 44537)
    assert rows[6] == (128, 447, 696)
    assert rows[7] == (265, None, 3995)
    assert "computed from the floors, not measured" in bench.expected_table(cases.expected())[0]


@pytest.mark.parametrize("channels", [1, 8])
def test_all_ways_to_pool_agree(channels: int) -> None:
    case = cases.PoolCase(batch=2, groups=2, length=40, dim=8, window=8, stride=4, channels=channels)
    z, u = torch.randn(2, 40, 2, 2, channels), torch.randn(2, 40, 2, 8)
    ways = [bench.unfolded(z, u, 8, 4), bench.gathered(z, u, 8, 4)]
    torch.testing.assert_close(*ways)
    entry = bench.bench_pool(case, CPU, torch.float32, RATES, 1)
    assert set(entry["ways"]) == {"unfold", "gather", "operator", "training path"}
    assert entry["ways"]["unfold"]["faster"] == 1


def test_all_ways_to_attend_agree() -> None:
    leaves = bench.attend_inputs(SMALL, CPU, torch.float64)
    ways = bench.attend_ways(SMALL, CPU)
    found = {name: run(*leaves) for name, run in ways.items() if not name.startswith("dense")}
    for name, out in found.items():
        torch.testing.assert_close(out, found["reference"], atol=1e-12, rtol=0, msg=name)
    entry = bench.bench_attend(SMALL, CPU, torch.float32, RATES, 1)
    assert set(entry["ways"]) == set(ways)
    assert entry["floor_ms"] == 1e3 * max(entry["flops"] / 1e11, entry["bytes"] / 1e10)


def test_ways_take_turns_each_after_an_untimed_call_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    clock = {"a": iter([9.0, 1.0, 2.0, 100.0]), "b": iter([9.0, 4.0, 5.0, 6.0])}

    def timed(way: bench.Way) -> float:
        before = calls[-1]
        way()
        assert calls[-1] == before, "its own untimed call came just before"
        return next(clock[before])

    monkeypatch.setattr(bench, "_cpu_seconds", timed)
    found = bench.medians({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, CPU)
    rounds = ["".join(calls[i : i + 4]) for i in range(0, 16, 4)]
    assert set(rounds) == {"aabb", "bbaa"}, "neither is always the first"
    assert found == {"a": 2.0, "b": 5.0}


@pytest.mark.parametrize(("threads", "clock"), [(1, "process_time"), (2, "perf_counter")])
def test_several_threads_are_timed_by_the_wall_clock(monkeypatch: pytest.MonkeyPatch, threads: int, clock: str) -> None:
    ticks = {"process_time": iter([1.0, 2.0]), "perf_counter": iter([1.0, 4.0])}
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for name, tick in ticks.items():
        monkeypatch.setattr(bench.time, name, tick.__next__)
    assert bench._cpu_seconds(lambda: None) == {"process_time": 1.0, "perf_counter": 3.0}[clock]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The command sets torch's threads for its whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("value", ["0", "-1", "two", ""])
def test_threads_must_be_a_count(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main([f"--threads={value}"])
    assert f"argument --threads: must be at least 1, got {value}" in capsys.readouterr().err


def test_the_command_prints_and_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "ATTEND", (SMALL,))
    monkeypatch.setattr(bench, "POOL", (cases.PoolCase(batch=1, groups=1, length=20, dim=4, window=8, stride=4, channels=1),))
    monkeypatch.setattr(bench, "machine", lambda device, dtype: RATES)
    monkeypatch.setattr(bench, "bench_scaling", lambda lengths, repeats: [{"way": "w", "length": 1024, "seconds": 1.0, "us_per_query": 2.0, "peak_mib": 3.0}])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--quick", "--scaling", "--json", str(tmp_path / "bench.json")]) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["threads"] == torch.get_num_threads() == 1, "as a worker of a search, unless told"
    assert "\n".join(bench.report(found)) + "\n" == printed
    for word in ("training path", "masked SDPA", "% of the floor", "us/query", "not measured", "GB/s measured in this run"):
        assert word in printed


def test_gpu_check_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(bench.NoGpu):
        bench.gpu_check()
    assert bench.main(["--gpu-check"]) == 2
    assert capsys.readouterr().err == "bench --gpu-check needs a CUDA device and Triton\n"


def test_a_failed_gpu_check_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = checks.Check(kernel="pool", backend="triton", error=1.0, allowed=0.1, seconds=0.0)
    found = {"checks": [dataclasses.asdict(wrong) | {"passed": False}], "times": [], "left_out": ["times: a check failed"]}
    monkeypatch.setattr(bench, "gpu_check", lambda: found)
    assert bench.main(["--gpu-check"]) == 1
    assert "FAIL pool" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("way", ["training path", "masked SDPA"])
def test_one_length_of_the_scaling_table(way: str) -> None:
    found = bench.one_length(256, way, 1)
    assert found["seconds"] > 0
    assert found["us_per_query"] == pytest.approx(1e6 * found["seconds"] / 256)
    assert found["peak_mib"] >= 0


@pytest.mark.gpu
def test_all_kernels_on_this_gpu() -> None:
    found = bench.gpu_check()
    assert all(check["passed"] for check in found["checks"])
    assert found["times"]


def test_the_figure_of_the_docs(tmp_path: Path) -> None:
    rows = [
        {"way": way, "length": length, "us_per_query": 10.0 + length / 100, "peak_mib": length / 200}
        for way in ("training path", "masked SDPA")
        for length in (1024, 2048)
    ]
    (tmp_path / "bench.json").write_text(json.dumps({"scaling": rows}))
    assert kernels_figure.main([str(tmp_path / "bench.json"), str(tmp_path / "figure.png")]) == 0
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert kernels_figure.attend_scaling(rows[:1]).axes, "one point is drawn too"
    (tmp_path / "bench.json").write_text(json.dumps({"scaling": []}))
    with pytest.raises(SystemExit):
        kernels_figure.main([str(tmp_path / "bench.json"), str(tmp_path / "figure.png")])
