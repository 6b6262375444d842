"""Gate kind: which pooling weights a KV head learns."""

from __future__ import annotations

from dataclasses import dataclass

from mitigate.registry import register

PAPER = "arXiv:2609.36322, compressor definition"


@dataclass(frozen=True, kw_only=True)
class Gate:
    """`channels` weights per KV head and offset (0: none learned); `per_offset`: Z_i of their own; `biased`: an offset bias b_i."""

    channels: int
    per_offset: bool = True
    biased: bool = True


@register("gate", "scalar", summary="one learned weight per offset and KV head", source=PAPER)
def scalar(*, head_dim: int) -> Gate:
    """Z_i and b_i per offset, one channel."""
    return Gate(channels=1)


@register("gate", "vector", summary="one learned weight per offset and channel", source="arXiv:2609.36322, vector gates; DeepSeek-V4")
def vector(*, head_dim: int) -> Gate:
    """Z_i and b_i per offset, `head_dim` channels."""
    return Gate(channels=head_dim)


@register("gate", "uniform", summary="plain averaging, 1/W, nothing learned", source="arXiv:2609.36322, uniform averaging run")
def uniform(*, head_dim: int) -> Gate:
    """Nothing learned."""
    return Gate(channels=0, per_offset=False, biased=False)


@register("gate", "scalar-no-bias", summary="scalar without b_i: an offset is preferred only through its Z_i", source="arXiv:2609.36322, no gate bias run")
def scalar_no_bias(*, head_dim: int) -> Gate:
    """Z_i per offset, no bias."""
    return Gate(channels=1, biased=False)


@register("gate", "content", summary="one Z for all offsets, no bias: the gate sees what a token is, not where it stands", source="this project")
def content(*, head_dim: int) -> Gate:
    """One Z for all offsets, no bias."""
    return Gate(channels=1, per_offset=False, biased=False)
