"""Logits at chosen positions: those of the whole model, without the work for the others."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VARIANTS, attached, tiny, tokens, traces, whole
from transformers import PreTrainedModel

from mitigate.config import ConfigError, VariantConfig
from mitigate.readout import in_eval_mode, logits_at

W8S8 = VariantConfig()


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedModel:
    return tiny("qwen3")


@pytest.mark.parametrize("name", ["full", "w8s8", "deepseek-csa", "everything", "per-offset-tied", "uniform-stagger"])
@pytest.mark.parametrize("length", [43, 200])
def test_readout_equals_the_whole_model(qwen3: PreTrainedModel, name: str, length: int) -> None:
    ids, positions = tokens(qwen3, length), torch.tensor([0, 7, 8, 22, length - 1])
    with attached(qwen3, VARIANTS[name]) as on:
        parameters = {**dict(qwen3.named_parameters()), **{f"compressors.{n}": p for n, p in on.compressors.named_parameters()}}
        results = []
        for logits in (logits_at(on, ids, positions), whole(qwen3, ids)[:, positions]):
            weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
            results.append([logits, *torch.autograd.grad((logits * weight).sum(), parameters.values())])
        for what, one, other in zip(["logits", *parameters], *results, strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=0, msg=what)
        assert all(layer.queries is None for layer in on.layers)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in qwen3.modules())


@pytest.mark.parametrize("name", ["full", "w8s8"])
def test_readout_skips_what_nobody_asked_for(qwen3: PreTrainedModel, name: str) -> None:
    rows: list[int] = []
    last = qwen3.model.layers[-1]
    ids, positions = tokens(qwen3, 30), torch.tensor([4, 20, 29])
    with attached(qwen3, VARIANTS[name]) as on, torch.no_grad():
        handles = [m.register_forward_hook(lambda m, args, out: rows.append(out.shape[1])) for m in (last.mlp.gate_proj, last.mlp.down_proj, qwen3.lm_head)]
        logits_at(on, ids, positions)
        for handle in handles:
            handle.remove()
        assert rows == [3, 3, 3]
        shapes: list[int] = []
        linear = torch.nn.functional.linear

        def count(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            if weight is last.self_attn.o_proj.weight:
                shapes.append(x.shape[1])
            return linear(x, weight, bias)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", count)
            logits_at(on, ids, positions)
        assert shapes == [3]


def test_readout_cleans_up_after_a_failure(qwen3: PreTrainedModel) -> None:
    with attached(qwen3, W8S8) as on:
        before = traces(qwen3)
        with pytest.raises(IndexError):
            logits_at(on, tokens(qwen3, 10) + 1000, torch.tensor([9]))  # no such tokens
        assert traces(qwen3) == before
        assert all(layer.queries is None for layer in on.layers)


@pytest.mark.parametrize("name", ["full", "w8s8"])
@pytest.mark.parametrize("length", [10, 40])
@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.tensor([3, -1]), "must be between 0 and {last}, the last of the {length} tokens, got -1"),
        (torch.tensor([3, 99]), "must be between 0 and {last}, the last of the {length} tokens, got 99"),
        (torch.tensor([], dtype=torch.int64), "must be one or more positions, int64 of one dimension, got int64 of shape [0]"),
        (torch.tensor([True, False]), "must be one or more positions, int64 of one dimension, got bool of shape [2]"),
        (torch.tensor([1.0]), "must be one or more positions, int64 of one dimension, got float32 of shape [1]"),
        (torch.tensor([[1, 2]]), "must be one or more positions, int64 of one dimension, got int64 of shape [1, 2]"),
        (torch.tensor(1), "must be one or more positions, int64 of one dimension, got int64 of shape []"),
    ],
)
def test_positions_that_cannot_be_are_one_error(qwen3: PreTrainedModel, name: str, length: int, positions: torch.Tensor, message: str) -> None:
    with attached(qwen3, VARIANTS[name]) as on:
        before = traces(qwen3)
        with pytest.raises(ConfigError) as error:
            logits_at(on, tokens(qwen3, length), positions)
        assert str(error.value) == f"logits_at: positions_A {message.format(last=length - 1, length=length)}"
        assert traces(qwen3) == before


def test_a_model_is_in_eval_mode_for_a_while() -> None:
    model = tiny(wide=False).train()
    model.lm_head.eval()
    modes = [module.training for module in model.modules()]
    with pytest.raises(KeyError), in_eval_mode(model):
        assert not any(module.training for module in model.modules())
        raise KeyError
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("name", ["full", "everything"])
def test_readout_under_gradient_checkpointing(name: str) -> None:
    model = tiny()
    ids, positions = tokens(model, 60), torch.tensor([0, 7, 30, 59])
    model.train()
    results = []
    for checkpointing in (False, True):
        with attached(model, VARIANTS[name]) as on:
            if checkpointing:
                model.activation_checkpointing_enable()
            parameters = [*model.parameters(), *on.compressors.parameters()]
            logits = logits_at(on, ids, positions)
            assert all(layer.gradient_checkpointing == checkpointing for layer in model.model.layers), "as it was"
            results.append([logits, *torch.autograd.grad(logits.square().mean(), parameters)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
