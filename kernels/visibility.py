"""Which window is complete, and which token is visible: the one place for this arithmetic.

Window ``j`` covers tokens ``origin + j*stride + i`` for ``i = 0 .. window-1``, with ``1 <= stride <= window`` and ``-window < origin <= 0``.
Positions ``t`` are logical: they count real tokens from 0. Every function takes Python integers or integer tensors of any shape and gives
back the same kind; reference, kernels, caches, cost and tests import it and restate nothing.
"""

from __future__ import annotations

from typing import TypeVar

import torch

IntOrTensor = TypeVar("IntOrTensor", int, torch.Tensor)


def _at_least(x: IntOrTensor, floor: int) -> IntOrTensor:
    if isinstance(x, torch.Tensor):
        return x.clamp(min=floor)
    return max(x, floor)


def _smaller(x: IntOrTensor, y: IntOrTensor) -> IntOrTensor:
    if isinstance(x, torch.Tensor):
        return torch.minimum(x, y)
    return min(x, y)


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
