"""Pooling token by token: the windows that are open, as running softmax sums, and nothing of the tokens themselves.

Token ``t = origin + g*S + p`` of group g and phase p updates the windows ``j = g - r`` (r = 0 .. R-1, ``r*S + p < W``), which live in slot ``j mod R``.
A window is emitted with its last token; any split of the tokens over calls gives the same summaries. The state is fp32 whatever the payload's dtype,
small enough to snapshot before a speculative step and to roll back.

Shapes: B batch, T tokens, N summaries, R = ceil(W/S) open windows, G kv heads, D head dim, E gate channels (1 or D), Z and U roles of logits and
payload (1 or R).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mitigate.kernels import arguments, visibility


@dataclass(kw_only=True)
class State:
    """The open windows of one layer and branch.

    Attributes:
        window, stride, origin: the grid.
        seen: tokens taken in.
        most, total: running maximum and sum of the softmax, fp32 [R, B, G, E].
        weighted: running weighted sum of the payload, fp32 [R, B, G, D].
    """

    window: int
    stride: int
    origin: int
    seen: int
    most: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor

    @property
    def roles(self) -> int:
        """R, the most windows open at once."""
        return self.most.shape[0]

    @property
    def bytes(self) -> int:
        """Size of the state, ``4 R (2 E + D)`` per sequence and kv head."""
        return sum(x.numel() * x.element_size() for x in (self.most, self.total, self.weighted))

    def snapshot(self) -> State:
        """A copy that later tokens do not touch; going on from it rolls back."""
        same = {"window": self.window, "stride": self.stride, "origin": self.origin, "seen": self.seen}
        return State(**same, most=self.most.clone(), total=self.total.clone(), weighted=self.weighted.clone())


def start(
    batch: int,
    groups: int,
    dim: int,
    *,
    window: int,
    stride: int,
    origin: int = 0,
    channels: int = 1,
    device: torch.device | str = "cpu",
    wide: torch.dtype = torch.float32,
) -> State:
    """No token seen: every slot is empty.

    Args:
        channels: gate channels E, 1 or `dim`.
        wide: dtype of the sums; fp64 is for tests.

    Raises:
        ValueError: the grid is out of its bounds, or a gate has neither one channel nor D.
    """
    arguments.check_grid("stream", window, stride, origin)
    if channels not in (1, dim):
        raise ValueError(f"stream: channels must be 1 or {dim}, got {channels}")
    slots = math.ceil(window / stride)
    sums = {
        "most": torch.full((slots, batch, groups, channels), float("-inf"), dtype=wide, device=device),
        "total": torch.zeros(slots, batch, groups, channels, dtype=wide, device=device),
        "weighted": torch.zeros(slots, batch, groups, dim, dtype=wide, device=device),
    }
    return State(window=window, stride=stride, origin=origin, seen=0, **sums)


def check(state: State, z_BTZGE: torch.Tensor | None, u_BTUGD: torch.Tensor) -> None:
    """TypeError or ValueError unless the tokens fit the state."""
    arguments.check_pool("append", z_BTZGE, u_BTUGD, state.window, state.stride, state.most.shape[3])
    held = (state.weighted.shape[1], *state.weighted.shape[2:])
    if (u_BTUGD.shape[0], *u_BTUGD.shape[3:]) != held:
        raise ValueError(f"append: u must have the state's batch, kv heads and head dim {held}, got {tuple(u_BTUGD.shape)}")


@torch.no_grad()
def append(state: State, z_BTZGE: torch.Tensor | None, u_BTUGD: torch.Tensor) -> torch.Tensor:
    """Take in the next T tokens; changes the state in place. No gradient flows: it would have to keep every token.

    Plain PyTorch; `ops.append` takes the device's kernel.

    Args:
        z_BTZGE: gate logits by role, bias included; None or Z = 0 for uniform gates.
        u_BTUGD: payload by role.

    Returns:
        the summaries that became complete, [B, n, G, D] in the payload's dtype: windows ``num_windows(seen before) ..``, in order.

    Raises:
        TypeError: numbers that are not floating-point.
        ValueError: shapes that do not fit the state.
    """
    check(state, z_BTZGE, u_BTUGD)
    if z_BTZGE is None or z_BTZGE.shape[2] == 0:
        z_BTZGE = u_BTUGD.new_zeros(*u_BTUGD.shape[:2], 1, u_BTUGD.shape[3], 1)
    emitted = []
    first = state.seen
    while first < state.seen + z_BTZGE.shape[1] and z_BTZGE.shape[1]:
        # A run of tokens of one group enters each of its windows in one step; it ends where a window ends or the group does.
        stop = min(_run_end(state, first), state.seen + z_BTZGE.shape[1])
        rows = slice(first - state.seen, stop - state.seen)
        done = _take(state, first, stop, z_BTZGE[:, rows].to(state.most.dtype), u_BTUGD[:, rows].to(state.most.dtype))
        if done is not None:
            emitted.append(done)
        first = stop
    state.seen += z_BTZGE.shape[1]
    shape = u_BTUGD.shape
    empty = u_BTUGD.new_empty(shape[0], 0, *shape[3:])
    return torch.stack(emitted, dim=1).to(u_BTUGD.dtype) if emitted else empty


def _run_end(state: State, t: int) -> int:
    """First token after t that starts a group, or follows the end of a window."""
    to_group = state.stride - (t - state.origin) % state.stride
    ended = visibility.num_completed(t - 1, state.window, state.stride, state.origin)
    return min(t + to_group, visibility.end(ended, state.window, state.stride, state.origin) + 1)


def _take(state: State, first: int, stop: int, z_BTZGE: torch.Tensor, u_BTUGD: torch.Tensor) -> torch.Tensor | None:
    """Tokens ``first .. stop-1`` of one group; the summary of the window that ends with them, if one does."""
    group, phase = divmod(first - state.origin, state.stride)
    for role in range(state.roles):
        window = group - role
        if window < 0 or role * state.stride + phase >= state.window:
            continue
        slot = window % state.roles
        z, u = (x[:, :, min(role, x.shape[2] - 1)] for x in (z_BTZGE, u_BTUGD))
        most = torch.maximum(state.most[slot], z.amax(dim=1))
        base = most.masked_fill(most == float("-inf"), 0.0)  # no logit above it so far: weights of 0, not NaN
        weights = (z - base[:, None]).exp()
        keep = (state.most[slot] - base).exp()
        state.total[slot] = state.total[slot] * keep + weights.sum(dim=1)
        state.weighted[slot] = state.weighted[slot] * keep + (weights * u).sum(dim=1)
        state.most[slot] = most
    ended = visibility.num_completed(stop - 1, state.window, state.stride, state.origin)
    if ended == visibility.num_completed(first - 1, state.window, state.stride, state.origin):
        return None
    slot = (ended - 1) % state.roles
    summary = state.weighted[slot] / state.total[slot]
    state.most[slot], state.total[slot], state.weighted[slot] = float("-inf"), 0.0, 0.0  # empty for the window that opens here next
    return summary
