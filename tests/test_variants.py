"""Each strategy by numbers worked out by hand, and what a compressor makes of it."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch

from mitigate import registry
from mitigate.compressor import Compressor, phase_profile
from mitigate.config import VariantConfig
from mitigate.geometry import Grid
from mitigate.variants.overlap import overlapped_window

HIDDEN, KV, DIM = 6, 2, 4


def call(axis: str, name: str, *args: Any, **kwargs: Any) -> Any:
    return registry.get(axis, name).function(*args, **kwargs)


def compressor(grid: Grid | None = None, **fields: Any) -> Compressor:
    variant = VariantConfig(**fields)
    grid = grid or registry.grids(variant, layers=1)[0]
    return Compressor(variant, grid=grid, hidden=HIDDEN, kv_heads=KV, head_dim=DIM).double()


def rows(length: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    widths = (HIDDEN, KV * DIM, KV * DIM)
    made = [torch.randn(batch, length, width, generator=generator, dtype=torch.float64) for width in widths]
    return made[0], made[1], made[2]


# coverage --------------------------------------------------------------------------------------------------------------------------------------


def test_entropy_is_zero_when_uniform_and_one_at_a_single_phase() -> None:
    uniform, point = torch.full((3, 8), 1 / 8, dtype=torch.float64), torch.zeros(3, 8, dtype=torch.float64)
    point[:, 5] = 1
    assert float(call("coverage", "entropy", uniform, threshold=0.0)) == pytest.approx(0, abs=1e-12)
    assert float(call("coverage", "entropy", point, threshold=0.0)) == pytest.approx(1, abs=1e-12)
    assert float(call("coverage", "entropy", torch.ones(2, 1), threshold=0.0)) == 0


def test_entropy_is_of_the_mean_over_heads() -> None:
    """Eight heads, each on a phase of its own, cover everything; two phases shared evenly give 1 - log 2 / log 8."""
    assert float(call("coverage", "entropy", torch.eye(8, dtype=torch.float64), threshold=0.0)) == pytest.approx(0, abs=1e-12)
    pair = torch.zeros(2, 8, dtype=torch.float64)
    pair[0, 1] = pair[1, 6] = 1
    assert float(call("coverage", "entropy", pair, threshold=0.0)) == pytest.approx(1 - 1 / 3)
    by_hand = 1 + (0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(2)
    assert float(call("coverage", "entropy", torch.tensor([[0.75, 0.25]], dtype=torch.float64), threshold=0.0)) == pytest.approx(by_hand)


def test_entropy_has_a_finite_gradient_away_from_the_edge() -> None:
    profile = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: call("coverage", "entropy", p, threshold=0.0), (profile,))


def test_hinge_by_hand() -> None:
    profile = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.1, 0.2, 0.6]], dtype=torch.float64)  # best: .5 .3 .2 .6
    assert float(call("coverage", "hinge", profile, threshold=0.2)) == pytest.approx(0, abs=1e-15)
    assert float(call("coverage", "hinge", profile, threshold=0.25)) == pytest.approx(0.05)
    assert float(call("coverage", "hinge", profile, threshold=0.55)) == pytest.approx(0.05 + 0.25 + 0.35)
    assert float(call("coverage", "hinge", profile[:1], threshold=0.25)) == pytest.approx(0.1 + 0.2)


def test_no_coverage_is_zero() -> None:
    assert float(call("coverage", "none", torch.eye(4), threshold=0.9)) == 0


def test_phase_profile_folds_offsets_onto_phases() -> None:
    alpha = torch.zeros(1, 2, 8, 1, 1, dtype=torch.float64)
    alpha[0, 0, :, 0, 0] = torch.tensor([0.1, 0.2, 0.3, 0.4, 0, 0, 0, 0])
    alpha[0, 1, :, 0, 0] = torch.tensor([0, 0, 0, 0, 0, 0, 1.0, 0])
    assert phase_profile(alpha, Grid(window=8, stride=4)).tolist() == [pytest.approx([0.05, 0.1, 0.65, 0.2])]
    assert phase_profile(alpha, Grid(window=8, stride=8)).tolist() == [pytest.approx([0.05, 0.1, 0.15, 0.2, 0, 0, 0.5, 0])]
    assert phase_profile(alpha, Grid(window=8, stride=6)).tolist() == [pytest.approx([0.05 + 0.5, 0.1, 0.15, 0.2, 0, 0])]
    vector = torch.stack([alpha[..., 0], alpha[..., 0].flip(2)], dim=-1)
    assert phase_profile(vector, Grid(window=8, stride=8)).sum(dim=1).tolist() == pytest.approx([1])


# stagger, bypass, overlap, local window --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shifts"),
    [("none", [0] * 6), ("half", [0, 3, 0, 3, 0, 3]), ("spread", [0, 1, 2, 3, 4, 5]), ("step", [0, 1, 2, 3, 4, 5])],
)
def test_stagger_by_hand(name: str, shifts: list[int]) -> None:
    assert [call("stagger", name, layer=layer, layers=6, window=12, stride=6) for layer in range(6)] == shifts


def test_stagger_of_odd_strides_and_few_layers() -> None:
    assert [call("stagger", "half", layer=layer, layers=2, window=7, stride=7) for layer in range(2)] == [0, 3]
    assert [call("stagger", "spread", layer=layer, layers=2, window=8, stride=8) for layer in range(2)] == [0, 4]
    assert [call("stagger", "spread", layer=layer, layers=3, window=8, stride=8) for layer in range(3)] == [0, 2, 5]
    assert [call("stagger", "step", layer=layer, layers=4, window=2, stride=2) for layer in range(4)] == [0, 1, 0, 1]


def test_bypass_by_hand() -> None:
    assert call("bypass", "none", window=8, stride=8) == ()
    assert call("bypass", "first", window=8, stride=4) == (0,)
    assert call("bypass", "last", window=8, stride=8) == (7,)
    assert call("bypass", "last", window=8, stride=6) == (1,)
    assert call("bypass", "both", window=12, stride=8) == (0, 3)


def test_bypassed_tokens_are_the_edges_of_real_windows() -> None:
    for window, stride, origin in ((8, 8, 0), (12, 8, -5), (8, 6, -1), (5, 3, -4)):
        grid = Grid(window=window, stride=stride, origin=origin)
        starts = {origin + j * stride for j in range(30)}
        ends = {grid.end(j) for j in range(-window, 30)}
        (first,), (last,) = (call("bypass", name, window=window, stride=stride) for name in ("first", "last"))
        assert all((grid.phase(t) == first) == (t in starts) for t in range(60))
        assert all((grid.phase(t) == last) == (t in ends) for t in range(60))


def test_overlap_rounds_up_to_whole_tokens() -> None:
    assert [call("overlap", "1", stride=s) for s in (1, 7, 8)] == [1, 7, 8]
    assert [call("overlap", "3/2", stride=s) for s in (1, 7, 8)] == [2, 11, 12]
    assert [call("overlap", "2", stride=s) for s in (1, 7, 8)] == [2, 14, 16]
    assert overlapped_window(8, Fraction(5, 4)) == 10
    assert overlapped_window(6, Fraction(5, 4)) == 8
    with pytest.raises(ValueError, match="overlap must be at least 1, got 1/2"):
        overlapped_window(8, Fraction(1, 2))


def test_local_windows() -> None:
    assert call("local_window", "tail-only") == 1
    assert call("local_window", "16") == 16


# gates, tying, payload -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "shapes"),
    [
        ({}, {"gate_weight": (8, HIDDEN, 2 * KV), "gate_bias": (8, 2 * KV)}),
        ({"gate": "vector"}, {"gate_weight": (8, HIDDEN, 2 * KV * DIM), "gate_bias": (8, 2 * KV * DIM)}),
        ({"gate": "uniform"}, {}),
        ({"gate": "scalar-no-bias"}, {"gate_weight": (8, HIDDEN, 2 * KV)}),
        ({"gate": "content"}, {"gate_weight": (1, HIDDEN, 2 * KV)}),
        ({"tie": "gates"}, {"gate_weight": (8, HIDDEN, KV), "gate_bias": (8, KV)}),
        ({"tie": "kv", "gate": "vector"}, {"gate_weight": (8, HIDDEN, KV * DIM), "gate_bias": (8, KV * DIM)}),
        ({"gate": "uniform", "payload": "per_offset"}, {"key_maps": (8, HIDDEN, KV * DIM), "value_maps": (8, HIDDEN, KV * DIM)}),
        ({"gate": "uniform", "payload": "per_offset", "tie": "kv"}, {"key_maps": (8, HIDDEN, KV * DIM)}),
    ],
)
def test_parameters_by_hand(fields: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    made = compressor(**fields)
    assert {name: tuple(p.shape) for name, p in made.named_parameters()} == shapes


def test_a_fresh_gate_is_nearly_uniform_and_a_biased_one_goes_where_it_is_told() -> None:
    torch.manual_seed(0)
    made = compressor()
    hidden, key, value = rows(24)
    pooled = made(hidden, key, value, row0=0, window0=0, count=3)
    assert not made.gate_weight.any()
    assert 0.005 < float(made.gate_bias.detach().std()) < 0.05
    torch.testing.assert_close(pooled.key_gates, torch.full_like(pooled.key_gates, 1 / 8), atol=0.02, rtol=0)
    with torch.no_grad():
        made.gate_bias.zero_()
        made.gate_bias[3, 0] = 50  # K head 0 on offset 3
        made.gate_bias[6, 3] = 50  # V head 1 on offset 6
    pooled = made(hidden, key, value, row0=0, window0=0, count=3)
    assert pooled.value is not None
    torch.testing.assert_close(pooled.key[:, :, 0], key.unflatten(-1, (KV, DIM))[:, 3::8, 0])
    torch.testing.assert_close(pooled.key[:, :, 1], key.unflatten(-1, (KV, DIM)).unflatten(1, (3, 8)).mean(2)[:, :, 1])
    torch.testing.assert_close(pooled.value[:, :, 1], value.unflatten(-1, (KV, DIM))[:, 6::8, 1])
    torch.testing.assert_close(pooled.value[:, :, 0], value.unflatten(-1, (KV, DIM)).unflatten(1, (3, 8)).mean(2)[:, :, 0])


def test_content_gates_follow_the_token_and_not_its_offset() -> None:
    made = compressor(gate="content")
    with torch.no_grad():
        made.gate_weight.normal_()
    hidden, key, value = rows(16)
    order = torch.tensor([3, 0, 7, 1, 2, 6, 5, 4])
    turned = [x.clone() for x in (hidden, key, value)]
    for x, source in zip(turned, (hidden, key, value), strict=True):
        x[:, :8] = source[:, order]
    straight, moved = (made(*xs, row0=0, window0=0, count=2) for xs in ((hidden, key, value), turned))
    torch.testing.assert_close(moved.key, straight.key)
    torch.testing.assert_close(moved.key_gates[:, 0], straight.key_gates[:, 0, order])


@pytest.mark.parametrize("gate", ["scalar", "vector", "uniform", "content", "scalar-no-bias"])
def test_tying(gate: str) -> None:
    hidden, key, value = rows(16)
    torch.manual_seed(1)
    apart = compressor(gate=gate)(hidden, key, value, row0=0, window0=0, count=2)
    assert apart.value is not None
    one = compressor(gate=gate, tie="kv")(hidden, key, value, row0=0, window0=0, count=2)
    assert one.value is None
    if gate != "uniform":
        shared = compressor(gate=gate, tie="gates")(hidden, key, value, row0=0, window0=0, count=2)
        assert torch.equal(shared.key_gates, shared.value_gates)
        assert shared.value is not None
        by_hand = (shared.key_gates * value.unflatten(-1, (KV, DIM)).unflatten(1, (2, 8))).sum(2)
        torch.testing.assert_close(shared.value, by_hand)
    if gate in ("scalar", "vector"):
        assert not torch.equal(apart.key_gates, apart.value_gates)


def test_payload_maps_start_at_the_projection() -> None:
    torch.manual_seed(2)
    key_weight, value_weight = (torch.randn(KV * DIM, HIDDEN, dtype=torch.float64) for _ in range(2))
    hidden = rows(21)[0]
    key, value = hidden @ key_weight.T, hidden @ value_weight.T
    for tie in ("none", "kv"):
        torch.manual_seed(3)
        shared = compressor(tie=tie, stride=5)
        torch.manual_seed(3)
        per_offset = compressor(tie=tie, stride=5, payload="per_offset")
        per_offset.start_from(key_weight, value_weight)
        shared.start_from(key_weight, value_weight)
        ours, theirs = (made(hidden, key, value, row0=0, window0=0, count=3) for made in (per_offset, shared))
        torch.testing.assert_close(ours.key, theirs.key)
        if tie == "none":
            torch.testing.assert_close(ours.value, theirs.value)
        with torch.no_grad():
            per_offset.key_maps[2] += 1.0
        moved = per_offset(hidden, key, value, row0=0, window0=0, count=3)
        by_hand = theirs.key + (ours.key_gates[:, :, 2] * hidden[:, 2:17:5].sum(-1)[:, :, None, None])
        torch.testing.assert_close(moved.key, by_hand)


@pytest.mark.parametrize("grid", [Grid(window=8, stride=4, origin=-4), Grid(window=12, stride=8, origin=-3), Grid(window=5, stride=5)])
@pytest.mark.parametrize("fields", [{}, {"gate": "vector"}, {"gate": "uniform"}, {"payload": "per_offset"}])
def test_windows_can_be_pooled_a_few_at_a_time(grid: Grid, fields: dict[str, Any]) -> None:
    """From just the rows that an open window needs, as a cache does."""
    made = compressor(grid, **fields)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    hidden, key, value = rows(40)
    whole = made(hidden, key, value, row0=0, window0=0, count=grid.num_windows(40))
    for seen in range(1, 40):
        done = grid.num_windows(seen)
        row0 = grid.open_lo(seen)
        part = made(hidden[:, row0:], key[:, row0:], value[:, row0:], row0=row0, window0=done, count=grid.num_windows(40) - done)
        torch.testing.assert_close(part.key, whole.key[:, done:], atol=1e-12, rtol=0)
        torch.testing.assert_close(part.value, whole.value[:, done:], atol=1e-12, rtol=0)
