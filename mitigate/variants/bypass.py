"""Bypass: tokens at a window's boundary keep their exact KV for good, so that a record split by the boundary stays readable."""

from __future__ import annotations

from mitigate.registry import register

SOURCE = "arXiv:2609.36322, boundary phase S-1; proposed direction"


@register("bypass", "none", summary="no token is kept exact for good", source="arXiv:2609.36322, default")
def none(*, window: int, stride: int) -> tuple[int, ...]:
    """Phases that stay exact."""
    return ()


@register("bypass", "first", summary="the first token of every window stays exact (+1/S of the bytes)", source=SOURCE)
def first(*, window: int, stride: int) -> tuple[int, ...]:
    """Phases that stay exact."""
    return (0,)


@register("bypass", "last", summary="the last token of every window stays exact (+1/S of the bytes)", source=SOURCE)
def last(*, window: int, stride: int) -> tuple[int, ...]:
    """Phases that stay exact."""
    return ((window - 1) % stride,)


@register("bypass", "both", summary="first and last token of every window stay exact (+2/S of the bytes)", source=SOURCE)
def both(*, window: int, stride: int) -> tuple[int, ...]:
    """Phases that stay exact."""
    return (0, (window - 1) % stride)
