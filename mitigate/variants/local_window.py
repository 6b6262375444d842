"""Local window: how many recent tokens stay exact besides the open tail."""

from __future__ import annotations

from mitigate.registry import register


@register("local_window", "tail-only", summary="L = 1: nothing exact but the open tail", source="arXiv:2609.36322, uncompressed tail runs")
def tail_only() -> int:
    """L in tokens."""
    return 1


@register("local_window", "16", summary="L = 16 exact tokens; any L >= 1 can be set", source="arXiv:2609.36322, default")
def sixteen() -> int:
    """L in tokens."""
    return 16
