"""Which window is complete, and which token is visible: the one place for this arithmetic.

Window ``j`` covers tokens ``origin + j*stride + i`` for ``i = 0 .. window-1``, with ``1 <= stride <= window`` and ``-window < origin <= 0``.
Positions ``t`` are logical: they count real tokens from 0. Every function takes Python integers or integer tensors of any shape and gives
back the same kind; reference, kernels, caches, cost and tests import it and restate nothing. Where Triton is installed, the functions that
kernels need stand at the end once more, as ``@triton.jit`` forms named ``<function>_jit``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import TypeVar

import torch

try:
    import triton
    from triton import language as tl
except ImportError:  # everything but the jit forms works without it
    triton = None

IntOrTensor = TypeVar("IntOrTensor", int, torch.Tensor)


def _at_least(x: IntOrTensor, floor: int) -> IntOrTensor:
    if isinstance(x, torch.Tensor):
        return x.clamp(min=floor)
    return max(x, floor)


def _smaller(x: IntOrTensor, y: IntOrTensor) -> IntOrTensor:
    if isinstance(x, torch.Tensor):
        return torch.minimum(x, y)
    return min(x, y)


def _larger(x: IntOrTensor, y: IntOrTensor) -> IntOrTensor:
    if isinstance(x, torch.Tensor):
        return torch.maximum(x, y)
    return max(x, y)


def end(j: IntOrTensor, window: int, stride: int, origin: int) -> IntOrTensor:
    """Last token of window ``j``."""
    return origin + j * stride + window - 1


def num_completed(t: IntOrTensor, window: int, stride: int, origin: int) -> IntOrTensor:
    """Windows whose last token is at or before ``t``: summary ``j`` is visible to the query at ``t`` iff ``j < num_completed(t)``."""
    # Both Python and torch floor here, so t before the first end gives a value of at most 0.
    return _at_least((t - origin - window + 1) // stride + 1, 0)


def num_windows(length: int, window: int, stride: int, origin: int) -> int:
    """Summaries that a sequence of ``length`` tokens produces."""
    return num_completed(length - 1, window, stride, origin)


def covered(t: IntOrTensor, window: int, stride: int, origin: int) -> IntOrTensor:
    """First token of the open tail at ``t``: everything before it lies in a completed window (0 while none is complete)."""
    n = num_completed(t, window, stride, origin)
    after_last = origin + (n - 1) * stride + window
    if isinstance(n, torch.Tensor):
        return torch.where(n > 0, after_last, torch.zeros_like(n))
    return after_last if n > 0 else 0


def exact_lo(t: IntOrTensor, window: int, stride: int, origin: int, local: int) -> IntOrTensor:
    """First token of the exact interval ``[exact_lo(t), t]``: the open tail and the last ``local`` tokens together."""
    return _at_least(_smaller(t - local + 1, covered(t, window, stride, origin)), 0)


def open_lo(length: IntOrTensor, window: int, stride: int, origin: int) -> IntOrTensor:
    """First token that an incomplete window still needs once ``length`` tokens were seen (may equal ``length``)."""
    return _smaller(_at_least(origin + stride * num_completed(length - 1, window, stride, origin), 0), length)


def stored_exact_lo(length: int, window: int, stride: int, origin: int, local: int) -> int:
    """First token whose exact KV the query at ``length`` may still need once ``length`` tokens were seen; earlier ones can go."""
    return min(exact_lo(length, window, stride, origin, local), length)


def reader_end(i: IntOrTensor, window: int, stride: int, origin: int, local: int) -> IntOrTensor:
    """First query with ``exact_lo(t) > i``: token ``i`` is seen exactly from ``i`` to ``reader_end(i) - 1``, and through the bypass bank after that."""
    first_to_cover = _at_least(-((origin + window - 1 - i) // stride), 0)  # the first window that ends at i or later
    return _larger(i + local, end(first_to_cover, window, stride, origin))


def cu_windows(cu_seqlens: torch.Tensor, window: int, stride: int, origin: int) -> torch.Tensor:
    """Where each sequence's summaries start when sequences are packed one after another.

    Args:
        cu_seqlens: first token of each sequence and the total, int [sequences + 1].

    Returns:
        First summary of each sequence and the total, int32 [sequences + 1].
    """
    counts = num_completed(cu_seqlens[1:] - cu_seqlens[:-1] - 1, window, stride, origin)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)


if triton is not None:
    # Triton's `//` truncates toward zero, so the sign is tested before dividing.

    @triton.jit
    def end_jit(j, window, stride, origin):
        return origin + j * stride + window - 1

    @triton.jit
    def num_completed_jit(t, window, stride, origin):
        x = t - origin - window + 1
        return tl.where(x >= 0, x // stride + 1, 0)

    @triton.jit
    def covered_jit(t, window, stride, origin):
        n = num_completed_jit(t, window, stride, origin)
        return tl.where(n > 0, origin + (n - 1) * stride + window, 0)

    @triton.jit
    def exact_lo_jit(t, window, stride, origin, local):
        return tl.maximum(tl.minimum(t - local + 1, covered_jit(t, window, stride, origin)), 0)

    @triton.jit
    def reader_end_jit(i, window, stride, origin, local):
        x = i - origin - window + 1
        first_to_cover = tl.where(x > 0, (x + stride - 1) // stride, 0)
        return tl.maximum(i + local, end_jit(first_to_cover, window, stride, origin))

    @triton.jit
    def sequence_rows_jit(cu_rows, i_b, rows, packed: tl.constexpr):
        """First row and number of rows of sequence i_b: all rows of a batch element unless sequences are packed one after another."""
        if packed:
            first = tl.load(cu_rows + i_b).to(tl.int64)
            return first, (tl.load(cu_rows + i_b + 1) - first).to(tl.int32)
        else:
            return i_b * 0, rows
