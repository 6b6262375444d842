"""Overlap: windows wider than their stride. W - S tokens are pooled twice; at a fixed S it costs no KV bytes."""

from __future__ import annotations

from fractions import Fraction

from mitigate.registry import register

SOURCE = "arXiv:2609.36322, W > S runs; DeepSeek-V4 CSA (W = 2S)"


def overlapped_window(stride: int, ratio: Fraction) -> int:
    """W for a stride and a ratio W/S, rounded up to whole tokens; ValueError below 1."""
    if ratio < 1:
        raise ValueError(f"overlap must be at least 1, got {ratio}")
    return -(-stride * ratio.numerator // ratio.denominator)


@register("overlap", "1", summary="W = S, every token in one window", source="arXiv:2609.36322, default")
def none(*, stride: int) -> int:
    """Window length."""
    return overlapped_window(stride, Fraction(1))


@register("overlap", "3/2", summary="W = 1.5 S, every other half stride in two windows", source=SOURCE)
def half(*, stride: int) -> int:
    """Window length."""
    return overlapped_window(stride, Fraction(3, 2))


@register("overlap", "2", summary="W = 2 S, every token in two windows", source=SOURCE)
def double(*, stride: int) -> int:
    """Window length."""
    return overlapped_window(stride, Fraction(2))
