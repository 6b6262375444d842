"""Perplexity of a model, with whatever is attached to it, on windows of held-out text.

Shapes: N windows, T tokens of each.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from mitigate.config import ConfigError, WorkFailed, require
from mitigate.readout import in_eval_mode, not_finite


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perplexity:
    """What `measure` found.

    Attributes:
        perplexity: exp(nats_per_token); bits_per_token: nats_per_token / ln 2.
        nats_standard_error: of the mean over windows; None of a single one.
        tokens: predicted tokens.
        windows, window_length: windows, and tokens of each, the given ones in front included.
    """

    perplexity: float
    nats_per_token: float
    nats_standard_error: float | None
    bits_per_token: float
    tokens: int
    windows: int
    window_length: int


@torch.inference_mode()
def measure(model: Any, tokens_NT: np.ndarray, *, batch: int = 1) -> Perplexity:
    """exp of the mean negative log-likelihood per token. Each window stands for itself: its first token is given, the T - 1 others are predicted.

    Args:
        model: a causal language model, with or without a variant attached.
        tokens_NT: windows of equal length, integers.
        batch: windows of a forward pass.

    Raises:
        ConfigError: there is no window or no token to predict, a token is none of the model's, or a window is longer than the model's positions.
        WorkFailed: the model's logits are not finite, or so wrong that the perplexity is beyond all floats.
    """
    require(batch >= 1, "perplexity: batch", "at least 1", batch)
    if tokens_NT.ndim != 2 or not np.issubdtype(tokens_NT.dtype, np.integer):
        raise ConfigError(f"perplexity: tokens_NT must be integers [windows, tokens], got {tokens_NT.dtype} of shape {list(tokens_NT.shape)}")
    windows, length = tokens_NT.shape
    require(windows >= 1, "perplexity: windows", "at least 1", windows)
    require(length >= 2, "perplexity: tokens of a window", "at least 2 (the first is given)", length)
    check_length(model, length, "perplexity: a window")
    known = known_tokens(model)
    for token in (int(tokens_NT.min()), int(tokens_NT.max())):
        require(0 <= token < known, "perplexity: a token", f"between 0 and {known - 1}, the last that the model knows", token)
    nats = []
    with in_eval_mode(model):
        for rows in torch.from_numpy(tokens_NT.astype(np.int64)).split(batch):
            tokens = rows.to(model.device)
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
            nats += F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(dim=1).double().tolist()
            if not math.isfinite(sum(nats)):
                raise not_finite("perplexity", model)
    mean, error = float(np.mean(nats)), float(np.std(nats, ddof=1) / math.sqrt(windows)) if windows > 1 else None
    try:
        perplexity = math.exp(mean)
    except OverflowError:  # no file of results could hold an infinity
        raise WorkFailed(
            f"perplexity: exp of {mean:.0f} nats per token is beyond all floats; the model or the variant does not know this text at all"
        ) from None
    return Perplexity(
        perplexity=perplexity,
        nats_per_token=mean,
        nats_standard_error=error,
        bits_per_token=mean / math.log(2),
        tokens=windows * (length - 1),
        windows=windows,
        window_length=length,
    )


def check_length(model: Any, length: int, what: str) -> None:
    """ConfigError unless `length` tokens are within the model's positions; `what` is what has so many."""
    known = getattr(model.config, "max_position_embeddings", None)
    if known is not None and length > known:
        raise ConfigError(f"{what} must have at most the model's {known} positions, got {length} tokens")


def known_tokens(model: Any) -> int:
    """How many tokens the model has embeddings for."""
    return len(model.get_input_embeddings().weight)


def check_tokens(model: Any, highest: int, tokenizer: str) -> None:
    """ConfigError unless the model has an embedding for the highest token that a tokenizer makes; `tokenizer` says whose it is."""
    known = known_tokens(model)
    if highest >= known:
        raise ConfigError(f"{tokenizer} makes token {highest}, and the model knows {known}; they do not belong together")
