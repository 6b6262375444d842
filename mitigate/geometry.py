"""Window grids, phases, residues and the KV cost in closed form. Integers only; no tensors, no models."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from mitigate.kernels import visibility


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The windows of one layer: window ``j`` covers ``origin + j*stride + i``, ``i = 0 .. window-1``.

    Args:
        window: tokens pooled into one summary (W).
        stride: distance between window starts (S), 1 <= S <= W.
        origin: start of window 0 (o), -W < o <= 0.

    Raises:
        ValueError: a field is out of its bounds; the message names the field, the bound and the value.
    """

    window: int
    stride: int
    origin: int = 0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"Grid.window must be at least 1, got {self.window}")
        if not 1 <= self.stride <= self.window:
            raise ValueError(f"Grid.stride must be between 1 and window ({self.window}), got {self.stride}")
        if not -self.window < self.origin <= 0:
            raise ValueError(f"Grid.origin must be above -window ({-self.window}) and at most 0, got {self.origin}")

    def end(self, j: int) -> int:
        """Last token of window ``j``."""
        return visibility.end(j, self.window, self.stride, self.origin)

    def num_completed(self, t: int) -> int:
        """Summaries visible to the query at ``t``."""
        return visibility.num_completed(t, self.window, self.stride, self.origin)

    def num_windows(self, length: int) -> int:
        """Summaries that ``length`` tokens produce."""
        return visibility.num_windows(length, self.window, self.stride, self.origin)

    def covered(self, t: int) -> int:
        """First token of the open tail at ``t``."""
        return visibility.covered(t, self.window, self.stride, self.origin)

    def exact_lo(self, t: int, local: int) -> int:
        """First token of the exact interval of the query at ``t`` with a local window of ``local`` tokens."""
        return visibility.exact_lo(t, self.window, self.stride, self.origin, local)

    def open_lo(self, length: int) -> int:
        """First token that an incomplete window still needs after ``length`` tokens."""
        return visibility.open_lo(length, self.window, self.stride, self.origin)

    def stored_exact_lo(self, length: int, local: int) -> int:
        """First token whose exact KV must be held after ``length`` tokens."""
        return visibility.stored_exact_lo(length, self.window, self.stride, self.origin, local)

    def phase(self, t: int) -> int:
        """Place of ``t`` relative to this layer's stride grid, in [0, S)."""
        return (t - self.origin) % self.stride


def period(strides: Iterable[int], *, at_least: int = 1) -> int:
    """Least common multiple of all strides and ``at_least``: the number of residues of a phase sweep."""
    return math.lcm(at_least, *strides)


def kept_entries_per_token(stride: int, bypassed_offsets: Iterable[int]) -> Fraction:
    """Cache entries a layer keeps per token in the limit of a long context.

    Args:
        stride: S.
        bypassed_offsets: phases (mod S) whose exact KV is kept for good.

    Returns:
        ``1/S + bypass fraction`` as an exact fraction; full attention is S = 1 without bypass.
    """
    return Fraction(1 + len({i % stride for i in bypassed_offsets}), stride)
