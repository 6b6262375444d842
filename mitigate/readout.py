"""Next-token logits at chosen positions. What the last layer would compute for the other positions never reaches the head, so it is skipped.

Shapes: B batch, T tokens, A chosen positions, C hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mitigate.attached_layer import spread
from mitigate.config import ConfigError, WorkFailed
from mitigate.surgery import Attachment


def logits_at(attached: Attachment, tokens_BT: torch.Tensor, positions_A: torch.Tensor) -> torch.Tensor:
    """Logits of the tokens after `positions_A`: [B, A, vocabulary], equal to those of the whole model at these positions.

    Keys, values and summaries are those of all tokens; only the last layer's queries, output projection and MLP are cut down.

    Raises:
        ConfigError: `positions_A` are not one or more integers within the sequence.
    """
    _check_positions(positions_A, tokens_BT.shape[-1])
    model = attached.model
    decoder: Any = getattr(model, model.base_model_prefix)
    with _last_layer_at(decoder.layers[-1], positions_A), attached.queries_at(positions_A):
        # The model's own forward, since some scale or cap what the head gives.
        logits: torch.Tensor = model(input_ids=tokens_BT, use_cache=False, logits_to_keep=positions_A).logits
    return logits


def not_finite(what: str, model: Any) -> WorkFailed:
    """The error of a model whose logits are not numbers; `what` is the work that it ends."""
    dtype = str(model.dtype).removeprefix("torch.")
    return WorkFailed(f"{what}: the model's logits are not finite ({dtype}); look for NaN and infinities in its weights, or try a wider dtype")


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """The model without dropout and the like for a while; every module is in its own mode again afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _check_positions(positions_A: torch.Tensor, length: int) -> None:
    if positions_A.dim() != 1 or not len(positions_A) or positions_A.dtype != torch.int64:
        got = f"{positions_A.dtype} of shape {list(positions_A.shape)}".removeprefix("torch.")
        raise ConfigError(f"logits_at: positions_A must be one or more positions, int64 of one dimension, got {got}")
    low, high = (int(end) for end in positions_A.aminmax())
    if low < 0 or high >= length:
        raise ConfigError(f"logits_at: positions_A must be between 0 and {length - 1}, the last of the {length} tokens, got {low if low < 0 else high}")


@contextmanager
def _last_layer_at(layer: Any, positions_A: torch.Tensor) -> Iterator[None]:
    """Run the last layer's position-wise parts at the chosen positions; zeros stand at the others.

    It is not checkpointed meanwhile: a backward pass would run it again after this context. What it keeps is of the chosen positions mostly.
    """
    checkpointing = getattr(layer, "gradient_checkpointing", None)
    if checkpointing:
        layer.gradient_checkpointing = False
    handles = [handle for module in (layer.self_attn.o_proj, layer.mlp) for handle in _cut(module, positions_A)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if checkpointing:
            layer.gradient_checkpointing = checkpointing


def _cut(module: nn.Module, positions_A: torch.Tensor) -> tuple[Any, Any]:
    length = 0

    def select(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        nonlocal length
        length = args[0].shape[1]
        return (args[0][:, positions_A], *args[1:])

    def scatter(_: nn.Module, args: Any, output_BAC: torch.Tensor) -> torch.Tensor:
        return spread(output_BAC, positions_A, length)

    return module.register_forward_pre_hook(select), module.register_forward_hook(scatter)
