"""Payload: one key/value map for all offsets of a window, or one per offset."""

from __future__ import annotations

from mitigate.registry import register


@register("payload", "shared", summary="pool the layer's own keys and values", source="DeepSeek-V4")
def shared(*, window: int) -> int:
    """Learned payload maps per branch: none beside the layer's projection."""
    return 0


@register(
    "payload", "per_offset", summary="a learned map C_i per offset, started from the layer's projection", source="arXiv:2609.36322, compressor definition"
)
def per_offset(*, window: int) -> int:
    """Learned payload maps per branch."""
    return window
