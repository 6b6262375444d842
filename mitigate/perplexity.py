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

from mitigate.config import ConfigError


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
        tokens_NT: windows of equal length, int64.
        batch: windows of a forward pass.

    Raises:
        ConfigError: a window is longer than the model's positions.
    """
    windows, length = tokens_NT.shape
    check_length(model, length, "perplexity: a window")
    model.eval()
    nats = []
    for rows in torch.from_numpy(tokens_NT).split(batch):
        tokens = rows.to(model.device)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
        nats += F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(dim=1).double().tolist()
    mean, error = float(np.mean(nats)), float(np.std(nats, ddof=1) / math.sqrt(windows)) if windows > 1 else None
    return Perplexity(
        perplexity=math.exp(mean),
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
