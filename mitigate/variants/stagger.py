"""Stagger: shift the window grid from layer to layer, so that one token has different phases in different layers."""

from __future__ import annotations

from mitigate.registry import register

SOURCE = "arXiv:2609.36322, proposed direction"


@register("stagger", "none", summary="all layers on one grid", source="arXiv:2609.36322, default")
def none(*, layer: int, layers: int, window: int, stride: int) -> int:
    """Tokens by which this layer's grid is shifted back."""
    return 0


@register("stagger", "half", summary="odd layers shifted by half a stride", source=SOURCE)
def half(*, layer: int, layers: int, window: int, stride: int) -> int:
    """Tokens by which this layer's grid is shifted back."""
    return stride // 2 if layer % 2 else 0


@register("stagger", "spread", summary="layers spread evenly over one stride", source=SOURCE)
def spread(*, layer: int, layers: int, window: int, stride: int) -> int:
    """Tokens by which this layer's grid is shifted back."""
    return layer * stride // layers


@register("stagger", "step", summary="each layer one token further, so that no two neighbours share a boundary", source="this project")
def step(*, layer: int, layers: int, window: int, stride: int) -> int:
    """Tokens by which this layer's grid is shifted back."""
    return layer % stride
