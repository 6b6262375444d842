"""Tying: what the key branch and the value branch of a summary share."""

from __future__ import annotations

from dataclasses import dataclass

from mitigate.registry import register


@dataclass(frozen=True, kw_only=True)
class Tie:
    """`gates`: gate branches learned (2: K and V apart); `held`: tensors a cache holds per summary (1: the key is the value)."""

    gates: int
    held: int


@register("tie", "none", summary="keys and values have gates of their own", source="arXiv:2609.36322, default")
def separate() -> Tie:
    """Two gates, two held tensors."""
    return Tie(gates=2, held=2)


@register("tie", "gates", summary="keys and values share one gate, so a summary keeps one token's key with its own value", source="this project")
def shared_gates() -> Tie:
    """One gate, two held tensors."""
    return Tie(gates=1, held=2)


@register("tie", "kv", summary="the normalised, rotated key summary is the value too, held once (half the bytes)", source="arXiv:2609.36322, tied K/V run")
def one_summary() -> Tie:
    """One gate, one held tensor."""
    return Tie(gates=1, held=1)
