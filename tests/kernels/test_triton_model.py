"""Whole models on the Triton kernels, under the interpreter: every operator in its place, against fp64, as good as the CPU path in the same precision.

What a model on a GPU calls is called here on CPU tensors: `ops.OPERATED` and `ops.TRITON` name the CPU too.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import interpreter
import pytest
import torch
from tiny_models import VARIANTS, attached, tiny, tokens, whole
from tolerance import assert_as_good_as
from transformers import DynamicCache, PreTrainedModel

from mitigate import attached_layer
from mitigate.config import VariantConfig
from mitigate.kernels import checks, ops
from mitigate.surgery import Attachment

if interpreter.INSTALLED:
    from mitigate.kernels import attend, decode, pool

# Between them every gate, tie, payload and bypass, stagger, overlap, origins of both signs; heads per kv head 2.
LLAMA = ("w8s8", "w8s4", "deepseek-csa", "two")
QWEN3 = ("content-overlap", "uniform-stagger", "everything", "per-offset-tied")


@pytest.fixture(autouse=True)
def _shims() -> Iterator[None]:
    with interpreter.shims():
        yield


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each launcher ran."""
    counts: dict[str, int] = {}

    def counted(module: object, name: str) -> None:
        plain = getattr(module, name)

        def run(*args: object, **kwargs: object) -> object:
            counts[name] = counts.get(name, 0) + 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(module, name, run)

    for module, names in ((pool, ("pool_fwd", "pool_bwd")), (attend, ("attend_fwd", "attend_bwd")), (decode, ("decode_fwd",))):
        for name in names:
            counted(module, name)
    return counts


def forced(monkeypatch: pytest.MonkeyPatch, *, operators: bool = False, triton: bool = False, blocked_from: int = 48) -> None:
    for name, on in (("OPERATED", operators), ("TRITON", triton)):
        monkeypatch.setattr(ops, name, frozenset({"cpu"} if on else {"cuda"}))
    monkeypatch.setattr(attached_layer, "BLOCKED_FROM", blocked_from)


def results(model: PreTrainedModel, on: Attachment, ids: torch.Tensor, pads: int) -> dict[str, torch.Tensor]:
    """Logits of one call, of chunks over a cache and of single tokens; gradients of every parameter. The last row has left pads."""
    parameters = {**dict(model.named_parameters()), **{f"compressor {name}": p for name, p in on.compressors.named_parameters()}}
    length, mask = ids.shape[1], torch.ones_like(ids)
    mask[-1, :pads] = 0
    live = mask[..., None]
    logits = whole(model, ids, attention_mask=mask) * live
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype)
    gradients = torch.autograd.grad((logits * weight).sum(), list(parameters.values()), allow_unused=True)
    found = {"logits": logits.detach()} | {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}
    cache = DynamicCache()
    with torch.no_grad():
        for start, stop in itertools.pairwise([0, 17, *range(length - 2, length + 1)]):
            made = model(input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache, use_cache=True).logits
            found[f"cached {start}"] = made * live[:, start:stop]
    return found


def check(family: str, variant: VariantConfig, monkeypatch: pytest.MonkeyPatch, batch: int = 1, pads: int = 0) -> None:
    model = tiny(family, wide=False)
    ids = tokens(model, 31, batch=batch)
    ways: list[dict[str, Any]] = [{}, {"blocked_from": 1}, {"operators": True}, {"operators": True, "triton": True}]
    found = []
    with attached(model, variant) as on:
        for way in ways:
            forced(monkeypatch, **way)
            assert ops.backend(model.device).startswith("triton-" if "triton" in way else "torch-cpu")
            found.append(results(model, on, ids, pads))
        weights = copy.deepcopy(on.compressors.state_dict())
    forced(monkeypatch)
    wide = tiny(family)
    with attached(wide, variant) as on:
        on.compressors.load_state_dict(weights)
        exact = results(wide, on, ids, pads)
    *plain, fast = found
    assert fast.keys() == exact.keys()
    for name in exact:
        assert_as_good_as(fast[name], [way[name] for way in plain], exact[name], f"{family} {name}", chained=2)


@pytest.mark.parametrize("name", LLAMA)
def test_llama(name: str, monkeypatch: pytest.MonkeyPatch, launched: dict[str, int]) -> None:
    padded = {"batch": 2, "pads": 5} if name == "w8s8" else {}
    check("llama", VARIANTS[name], monkeypatch, **padded)
    assert set(launched) == {"pool_fwd", "pool_bwd", "attend_fwd", "attend_bwd", "decode_fwd"}, launched


@pytest.mark.parametrize("name", QWEN3)
def test_qwen3(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check("qwen3", VARIANTS[name], monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_check_of_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `mitigate doctor` and the bench run there, whole."""
    forced(monkeypatch, triton=True)
    found = checks.small_checks(torch.device("cpu"), dtype)
    assert all(check.passed and check.backend.startswith("triton-") for check in found), found
    assert {check.kernel.split()[0] for check in found} == {"pool", "attend", "decode", "append"}


interpreter.own_process(globals(), __file__)
