"""Coarse layers: layers whose windows and strides are a multiple of the others', so that bytes go where facts are looked up."""

from __future__ import annotations

from mitigate.registry import register

SOURCE = "DeepSeek-V4, which alternates layers of S = 4 and S = 128"


@register("coarse", "none", summary="all layers have the same window and stride", source="arXiv:2609.36322, default")
def none(*, layer: int, layers: int) -> bool:
    """Whether a layer is coarse."""
    return False


@register("coarse", "even", summary="layers 0, 2, 4, ... are coarse", source=SOURCE)
def even(*, layer: int, layers: int) -> bool:
    """Whether a layer is coarse."""
    return layer % 2 == 0


@register("coarse", "odd", summary="layers 1, 3, 5, ... are coarse", source=SOURCE)
def odd(*, layer: int, layers: int) -> bool:
    """Whether a layer is coarse."""
    return layer % 2 == 1


@register("coarse", "early", summary="the first half of the layers, rounded down, is coarse", source="this project")
def early(*, layer: int, layers: int) -> bool:
    """Whether a layer is coarse."""
    return layer < layers // 2
