"""What the operators refuse: one error that names the argument, the bound and the value, before anything is computed or changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mitigate.kernels import ops, stream

GRID = {"window": 8, "stride": 4, "origin": -3}


def pool(**changes: Any) -> torch.Tensor:
    given: dict[str, Any] = {"z_BTZGE": torch.zeros(1, 30, 2, 3, 1), "u_BTUGD": torch.zeros(1, 30, 1, 3, 6), **GRID}
    return ops.pool(**given | changes)[0]


def attend(**changes: Any) -> torch.Tensor:
    """30 tokens, 7 summaries, 6 heads on 3 kv heads."""
    q, s, t = torch.zeros(1, 30, 6, 8), torch.zeros(1, 7, 3, 8), torch.zeros(1, 30, 3, 8)
    given: dict[str, Any] = {"q_BTHD": q, "ks_BNGD": s, "vs_BNGV": s, "k_BTGD": t, "v_BTGV": t, "local": 4, "scale": 1.0, **GRID}
    return ops.attend(**given | changes)[0]


def decode(**changes: Any) -> torch.Tensor:
    """The query at 29 sees 7 summaries and 4 exact tokens."""
    s, t = torch.zeros(1, 7, 3, 8), torch.zeros(1, 4, 3, 8)
    given: dict[str, Any] = {"q_BHD": torch.zeros(1, 6, 8), "ks_BNGD": s, "vs_BNGV": s, "k_BXGD": t, "v_BXGV": t, "local": 4, "scale": 1.0, "position": 29}
    return ops.decode(**given | GRID | changes)


def append(**changes: Any) -> torch.Tensor:
    given: dict[str, Any] = {"state": started(), "z_BTZGE": torch.zeros(1, 5, 2, 3, 1), "u_BTUGD": torch.zeros(1, 5, 1, 3, 6)}
    return ops.append(**given | changes)


def started(**changes: Any) -> stream.State:
    given: dict[str, Any] = {"batch": 1, "groups": 3, "dim": 6, **GRID}
    return stream.start(**given | changes)


def test_what_fits_passes() -> None:
    assert pool().shape == (1, 7, 3, 6)
    assert attend().shape == (1, 30, 6, 8)
    assert decode().shape == (1, 6, 8)
    assert append().shape == (1, 1, 3, 6)


@pytest.mark.parametrize("run", [pool, attend, decode, started])
@pytest.mark.parametrize(("window", "stride", "origin"), [(4, 5, 0), (8, 0, 0), (8, 4, 1), (8, 4, -8), (0, 0, 0), (-1, -2, 0)])
def test_grids(run: Callable[..., Any], window: int, stride: int, origin: int) -> None:
    got = f"1 <= stride <= window and -window < origin <= 0, got window {window}, stride {stride}, origin {origin}"
    with pytest.raises(ValueError, match=got):
        run(window=window, stride=stride, origin=origin)


def z(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"z_BTZGE": torch.zeros(shape, dtype=dtype)}


def u(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"u_BTUGD": torch.zeros(shape, dtype=dtype)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (u(1, 30, 3, 6), r"pool: u must be \[B, T, U, G, D\] with D of at least 1, got shape \(1, 30, 3, 6\)"),
        (z(1, 30, 3, 1), r"pool: z must be \[B, T, Z, G, E\] with E of at least 1, got shape"),
        (u(1, 30, 3, 3, 6), r"pool: u must have 1 role or 2, window 8 over stride 4, got 3"),
        ({**u(1, 30, 2, 3, 6), "stride": 8}, r"pool: u must have 1 role, window 8 over stride 8, got 2"),
        (u(1, 30, 1, 3, 0), r"pool: u must be \[B, T, U, G, D\] with D of at least 1, got shape \(1, 30, 1, 3, 0\)"),
        (z(1, 30, 5, 3, 1), r"pool: z must have 1 role or 2, window 8 over stride 4, got 5"),
        (z(1, 30, 2, 3, 2), r"pool: z must have 1 or 6 gate channels, got 2"),
        (z(1, 29, 2, 3, 1), r"pool: z and u must agree in batch, tokens and kv heads, got \(1, 29, 2, 3, 1\) and \(1, 30, 1, 3, 6\)"),
        (z(2, 30, 2, 3, 1), r"pool: z and u must agree"),
        (z(1, 30, 2, 1, 1), r"pool: z and u must agree"),
        ({"cu_seqlens": torch.tensor([0, 10, 29])}, r"pool: cu_seqlens must begin with 0, not fall and end with 30, got 0, 10, 29"),
        ({"cu_seqlens": torch.tensor([3, 30])}, r"must begin with 0, not fall and end with 30, got 3, 30"),
        ({"cu_seqlens": torch.tensor([0, 20, 10, 30])}, r"must begin with 0, not fall and end with 30, got 0, 20, 10, 30"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, r"end with 30, got nothing"),
        ({"cu_seqlens": torch.tensor([[0, 30]])}, r"pool: cu_seqlens must be integers \[sequences \+ 1\], got torch.int64 of shape \(1, 2\)"),
        ({"cu_seqlens": torch.tensor([0.0, 30.0])}, r"cu_seqlens must be integers \[sequences \+ 1\], got torch.float32"),
        ({**z(2, 30, 2, 3, 1), **u(2, 30, 1, 3, 6), "cu_seqlens": torch.tensor([0, 30])}, r"pool: packed sequences need a batch of 1, got 2"),
    ],
)
def test_pool(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pool(**changes)


@pytest.mark.parametrize("changes", [z(1, 30, 2, 3, 1, dtype=torch.int64), u(1, 30, 1, 3, 6, dtype=torch.int64)])
def test_numbers_that_are_whole(changes: dict[str, Any]) -> None:
    for run in (pool, append):
        given = changes if run is pool else {name: x[:, :5] for name, x in changes.items()}
        with pytest.raises(TypeError, match=r"must be of a floating-point dtype, got torch\.int64"):
            run(**given)


def bank(count: int = 2, **changes: Any) -> dict[str, Any]:
    x = torch.zeros(1, count, 3, 8)
    return {"kb_BPGD": x, "vb_BPGV": x, "pos_b": torch.arange(count)} | changes


ZEROS = torch.zeros


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"local": -1}, r"attend: local must be at least 0, got -1"),
        ({"q_BTHD": ZEROS(1, 30, 8)}, r"attend: q must be \[B, T, H, D\] with D of at least 1, got shape \(1, 30, 8\)"),
        ({"ks_BNGD": ZEROS(7, 3, 8)}, r"attend: ks must be \[B, N, G, D\] with D of at least 1, got shape"),
        ({"v_BTGV": ZEROS(1, 30, 24)}, r"attend: v must be \[B, T, G, V\] with V of at least 1, got shape"),
        ({"q_BTHD": ZEROS(1, 30, 4, 8)}, r"attend: 3 kv heads must divide 4 query heads"),
        ({"q_BTHD": ZEROS(1, 30, 6, 4)}, r"attend: q \(1, 30, 6, 4\), keys \(1, 7, 3, 8\) and values \(1, 7, 3, 8\) do not fit"),
        ({"vs_BNGV": ZEROS(1, 6, 3, 8)}, r"keys \(1, 7, 3, 8\) and values \(1, 6, 3, 8\) do not fit"),
        ({"q_BTHD": ZEROS(2, 30, 6, 8)}, r"attend: q \(2, 30, 6, 8\), keys .* do not fit"),
        ({"ks_BNGD": ZEROS(1, 6, 3, 8), "vs_BNGV": ZEROS(1, 6, 3, 8)}, r"attend: the query at 29 sees 7 summaries, held are 6"),
        ({"q_start": 1}, r"attend: queries 1 \.\. 30 need exact tokens from 0 on, held are \[0, 30\)"),
        ({"q_start": -1}, r"attend: queries -1 \.\. 28 need exact tokens"),
        ({"k_start": 5}, r"attend: queries 5 \.\. 34 need exact tokens from 2 on, held are \[5, 35\)"),
        ({"q_BTHD": ZEROS(1, 31, 6, 8)}, r"attend: queries -1 \.\. 29 need exact tokens"),
        ({"kb_BPGD": ZEROS(1, 2, 3, 8)}, r"attend: kb, vb and pos_b come together"),
        (bank(pos_b=torch.arange(3)), r"attend: pos_b must name 2 positions, got shape \(3,\)"),
        (bank(pos_b=torch.tensor([4, 4])), r"attend: pos_b must be integers that grow from 0 on, got 4, 4"),
        (bank(pos_b=torch.tensor([-1, 4])), r"attend: pos_b must be integers that grow from 0 on, got -1, 4"),
        (bank(pos_b=torch.tensor([0.0, 4.0])), r"attend: pos_b must be integers that grow from 0 on, got torch.float32"),
        ({"cu_seqlens": torch.tensor([0, 31])}, r"attend: cu_seqlens must begin with 0, not fall and end with 30, got 0, 31"),
        ({"cu_seqlens": torch.tensor([0, 10, 30])}, r"attend: packed sequences need a batch of 1, as many exact tokens as queries and 6 summaries"),
        (bank() | {"cu_seqlens": torch.tensor([0, 30])}, r"attend: packed sequences with bypassed tokens need cu_bypass"),
        (bank() | {"cu_seqlens": torch.tensor([0, 30]), "cu_bypass": torch.tensor([0, 1])}, r"attend: cu_bypass must begin with 0, not fall and end with 2"),
        (
            bank() | {"cu_seqlens": torch.tensor([0, 30]), "cu_bypass": torch.tensor([0, 1, 2])},
            r"attend: cu_bypass must name 1 sequences, as cu_seqlens does, got 2",
        ),
    ],
)
def test_attend(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        attend(**changes)


@pytest.mark.parametrize("name", ["ks_BNGD", "vs_BNGV", "k_BTGD", "v_BTGV"])
def test_several_dtypes(name: str) -> None:
    bad = {"ks_BNGD": ZEROS(1, 7, 3, 8), "vs_BNGV": ZEROS(1, 7, 3, 8)}.get(name, ZEROS(1, 30, 3, 8)).bfloat16()
    with pytest.raises(TypeError, match=rf"attend: {name.split('_')[0]} must have the dtype of q, torch.float32, got torch.bfloat16"):
        attend(**{name: bad})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"local": -1}, r"decode: local must be at least 0, got -1"),
        ({"position": -1}, r"decode: position must be at least 0, got -1"),
        ({"position": 33}, r"decode: the query at 33 sees 8 summaries and 4 exact tokens, the banks hold 7 and 4"),
        ({"q_BHD": ZEROS(1, 1, 6, 8)}, r"decode: q must be \[B, H, D\] with D"),
        ({"q_BHD": ZEROS(1, 5, 8)}, r"decode: 3 kv heads must divide 5 query heads"),
        ({"v_BXGV": ZEROS(1, 3, 3, 8)}, r"decode: q .* do not fit"),
        ({"kb_BPGD": ZEROS(1, 3, 3, 8)}, r"decode: kb and vb come together"),
        ({"kb_BPGD": ZEROS(1, 3, 3, 8), "vb_BPGV": ZEROS(1, 2, 3, 8)}, r"decode: q .* do not fit"),
    ],
)
def test_decode(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (u(1, 5, 1, 3, 4), r"append: u must have the state's batch, kv heads and head dim \(1, 3, 6\), got \(1, 5, 1, 3, 4\)"),
        (u(2, 5, 1, 3, 6) | z(2, 5, 2, 3, 1), r"append: u must have the state's batch"),
        (z(1, 5, 2, 3, 6), r"append: z must have 1 gate channels, got 6"),
        (z(1, 5, 3, 3, 1), r"append: z must have 1 role or 2"),
        (z(1, 4, 2, 3, 1), r"append: z and u must agree"),
    ],
)
def test_append_refuses_and_changes_nothing(changes: dict[str, Any], words: str) -> None:
    state = started()
    append(state=state)
    before = state.snapshot()
    for run in (ops.append, stream.append):
        given: dict[str, Any] = {"z_BTZGE": torch.ones(1, 5, 2, 3, 1), "u_BTUGD": torch.ones(1, 5, 1, 3, 6)} | changes
        with pytest.raises(ValueError, match=words):
            run(state, given["z_BTZGE"], given["u_BTUGD"])
    assert state.seen == before.seen == 5
    assert all(torch.equal(getattr(state, name), getattr(before, name)) for name in ("most", "total", "weighted"))


@pytest.mark.parametrize(
    ("run", "changes", "words"),
    [
        (pool, {"u_BTUGD": [[1.0]]}, r"pool: u must be a tensor, got list"),
        (pool, {"cu_seqlens": [0, 30]}, r"pool: cu_seqlens must be a tensor, got list"),
        (attend, {"k_BTGD": ZEROS(1, 30, 3, 8).numpy()}, r"attend: k must be a tensor, got ndarray"),
        (attend, bank(pos_b=[0, 1]), r"attend: pos_b must be a tensor, got list"),
        (attend, bank(kb_BPGD=[0, 1]), r"attend: kb must be a tensor, got list"),
        (decode, {"q_BHD": 1.0}, r"decode: q must be a tensor, got float"),
        (append, {"z_BTZGE": "z"}, r"append: z must be a tensor, got str"),
    ],
)
def test_things_that_are_no_tensors(run: Callable[..., Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        run(**changes)


def test_packed_sequences_start_at_zero() -> None:
    packed = {"cu_seqlens": torch.tensor([0, 30])}
    for given, got in (({"q_start": 3}, "3 and 0"), ({"k_start": 3}, "None and 3"), ({"q_start": 0}, "0 and 0")):
        with pytest.raises(ValueError, match=f"attend: packed sequences start at position 0, so q_start and k_start must not be given, got {got}"):
            attend(**packed, **given)


def test_channels_of_a_stream() -> None:
    with pytest.raises(ValueError, match="stream: channels must be 1 or 6, got 2"):
        started(channels=2)
