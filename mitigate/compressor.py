"""One layer's learned compressor, and the one pure function that makes summaries from hidden rows.

Shapes: B batch, T rows, N summaries, W window, S stride, C hidden width, G kv heads, D head dim, E gate channels, X gate outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from mitigate import registry
from mitigate.config import VariantConfig
from mitigate.geometry import Grid
from mitigate.kernels import by_role, ops, views


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """Summaries before RoPE (and before the key norm, unless the tokens' keys were normalised).

    Args:
        key, value: [B, N, G, D]; value is None where the finished key serves as the value.
        gates: gives the gates of both branches, which a kernel that pools does not leave behind.
    """

    key: torch.Tensor
    value: torch.Tensor | None
    gates: Callable[[], tuple[torch.Tensor, torch.Tensor]]

    @property
    def key_gates(self) -> torch.Tensor:
        """Alpha [B, N, W, G, E] in fp32 or wider."""
        return self.gates()[0]

    @property
    def value_gates(self) -> torch.Tensor:
        """Alpha [B, N, W, G, E]; the same tensor as that of the keys where the gate is shared."""
        return self.gates()[1]


class Compressor(nn.Module):
    """Gates and payload maps of one layer: ``s[j,i] = Z_i . h[o+jS+i] + b_i``, ``alpha = softmax_i``, ``summary = sum_i alpha_i * u_i``.

    Args:
        variant: what to build; strategy names are resolved by the registry.
        grid: this layer's windows.
        hidden: width C of the hidden states the attention receives.
        kv_heads, head_dim: G and D.

    Gate weights start at zero and biases at N(0, 0.02), so that a fresh gate is close to uniform.
    """

    def __init__(self, variant: VariantConfig, *, grid: Grid, hidden: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.grid = grid
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.tie = registry.get("tie", variant.tie).function()
        gate = registry.get("gate", variant.gate).function(head_dim=head_dim)
        self.channels: int = gate.channels
        maps = int(registry.get("payload", variant.payload).function(window=grid.window))
        outputs = self.tie.gates * kv_heads * self.channels
        if self.channels:
            self.gate_weight = nn.Parameter(torch.zeros(grid.window if gate.per_offset else 1, hidden, outputs))
            if gate.biased:
                self.gate_bias = nn.Parameter(torch.randn(grid.window, outputs) * 0.02)
        if maps:
            self.key_maps = nn.Parameter(torch.zeros(maps, hidden, kv_heads * head_dim))
            if self.tie.held == 2:
                self.value_maps = nn.Parameter(torch.zeros(maps, hidden, kv_heads * head_dim))

    @torch.no_grad()
    def start_from(self, key_weight: torch.Tensor, value_weight: torch.Tensor) -> None:
        """Start every offset's payload map at the layer's own projections, given as [G*D, C]; nothing to do where they are shared."""
        if hasattr(self, "key_maps"):
            self.key_maps.copy_(key_weight.T.expand_as(self.key_maps))
        if hasattr(self, "value_maps"):
            self.value_maps.copy_(value_weight.T.expand_as(self.value_maps))

    @property
    def shares_projection(self) -> bool:
        """Whether the payload is the layer's own projected key and value."""
        return not hasattr(self, "key_maps")

    def forward(
        self,
        hidden_BTC: torch.Tensor,
        key_BTF: torch.Tensor,
        value_BTF: torch.Tensor,
        *,
        row0: int,
        window0: int,
        count: int,
        normalise: Callable[[torch.Tensor], torch.Tensor] | None = None,
        key_bias: torch.Tensor | None = None,
        value_bias: torch.Tensor | None = None,
    ) -> Pooled:
        """Pool windows ``window0 .. window0 + count - 1``: side by side, and one alone, they are views of the rows; else, and on devices with kernels, by role.

        Args:
            hidden_BTC: hidden states of consecutive tokens.
            key_BTF, value_BTF: the layer's projections of them before key norm and RoPE, F = G*D.
            row0: position of the first row; every token of the windows from position 0 on must be among the rows.
            normalise: applied to the tokens' keys [..., G, D] before they are pooled.
            key_bias, value_bias: those of the layer's projections [F], which maps of each offset's own have in common with them.
        """
        biases = {"key_maps": key_bias, "value_maps": value_bias}
        grid = self.grid
        first = grid.origin + window0 * grid.stride
        operated = ops.operated(hidden_BTC.device)
        if (count > 1 and grid.window > grid.stride) or (count and operated):
            cut = {"window": grid.window, "stride": grid.stride, "start": first - row0, "count": count}
            return self._pooled_by_role(hidden_BTC, key_BTF, value_BTF, cut, normalise, biases, _operator if operated else by_role.pool)
        cut = {"window": grid.window, "start": first - row0, "count": count}
        hidden_BNWC = views.windows(hidden_BTC, **cut)
        key_gates, value_gates = self._gates(hidden_BNWC, views.exists(window=grid.window, first=first, count=count, device=hidden_BTC.device))

        def pooled(gates_BNWGE: torch.Tensor, projected_BTF: torch.Tensor, maps: str, normalised: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            if self.shares_projection:
                u_BNWF = views.windows(projected_BTF, **cut)
            else:
                u_BNWF = _with(biases[maps], torch.einsum("bnwc,wcf->bnwf", hidden_BNWC, getattr(self, maps).to(hidden_BNWC.dtype)))
            return views.weighted_sum(gates_BNWGE, normalised(u_BNWF.unflatten(-1, (self.kv_heads, self.head_dim))))

        key = pooled(key_gates, key_BTF, "key_maps", normalise or _as_it_is)
        value = pooled(value_gates, value_BTF, "value_maps", _as_it_is) if self.tie.held == 2 else None
        return Pooled(key=key, value=value, gates=lambda: (key_gates, value_gates))

    def _gates(self, hidden_BNWC: torch.Tensor, exists_NW: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.channels:
            batch, count, window, _ = hidden_BNWC.shape
            alpha = views.uniform_weights(batch, count, window, exists_NW, hidden_BNWC)[..., None]
            return alpha, alpha
        return self._branches(views.gate_weights(hidden_BNWC, self.gate_weight, getattr(self, "gate_bias", None), exists_NW))

    def _branches(self, x_X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate outputs [..., X] as those of keys and of values, [..., G, E] each; the same tensor where they share one."""
        branches = x_X.unflatten(-1, (self.tie.gates, self.kv_heads, self.channels)).unbind(dim=-3)
        return branches[0], branches[-1]

    def _pooled_by_role(
        self,
        hidden_BTC: torch.Tensor,
        key_BTF: torch.Tensor,
        value_BTF: torch.Tensor,
        cut: dict[str, int],
        normalise: Callable[[torch.Tensor], torch.Tensor] | None,
        biases: dict[str, torch.Tensor | None],
        pool: Callable[..., torch.Tensor],
    ) -> Pooled:
        """No window is cut, and gates are made as windows hold them only where asked for."""
        start, stride, window = cut["start"], cut["stride"], cut["window"]
        rows = slice(max(start, 0), start + (cut["count"] - 1) * stride + window)
        grid = {"window": window, "stride": stride, "origin": min(start, 0)}
        wide = torch.promote_types(hidden_BTC.dtype, torch.float32)
        if self.channels:
            bias = self.gate_bias.to(wide) if hasattr(self, "gate_bias") else None
            with torch.autocast(hidden_BTC.device.type, enabled=False):
                z_BTZX = by_role.rows_by_role(hidden_BTC.to(wide), self.gate_weight.to(wide), bias, **cut)

        def payload(projected_BTF: torch.Tensor, maps: str) -> torch.Tensor:
            if self.shares_projection:
                u_BTUF = projected_BTF[:, rows, None]
            else:
                u_BTUF = _with(biases[maps], by_role.rows_by_role(hidden_BTC, getattr(self, maps).to(hidden_BTC.dtype), None, **cut))
            return u_BTUF.unflatten(-1, (self.kv_heads, self.head_dim))

        def gates() -> tuple[torch.Tensor, torch.Tensor]:
            if self.channels:
                return self._branches(by_role.gates(z_BTZX, **grid))
            return (by_role.gates(hidden_BTC.new_zeros(hidden_BTC.shape[0], rows.stop - rows.start, 1, 1, dtype=wide), **grid)[..., None],) * 2

        key_logits, value_logits = self._branches(z_BTZX) if self.channels else (None, None)
        key = pool(key_logits, (normalise or _as_it_is)(payload(key_BTF, "key_maps")), **grid)
        value = pool(value_logits, payload(value_BTF, "value_maps"), **grid) if self.tie.held == 2 else None
        return Pooled(key=key, value=value, gates=functools.cache(gates))


def _operator(*parts: torch.Tensor | None, **grid: int) -> torch.Tensor:
    return ops.pool(*parts, **grid)[0]  # type: ignore[arg-type]


def _with(bias_F: torch.Tensor | None, u_BTUF: torch.Tensor) -> torch.Tensor:
    return u_BTUF if bias_F is None else u_BTUF + bias_F.to(u_BTUF.dtype)


def _as_it_is(u_BTUGD: torch.Tensor) -> torch.Tensor:
    return u_BTUGD


def phase_profile(alpha_BNWGE: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Mean gate of each head over batch, windows and channels, summed onto phases: [G, S], rows sum to 1. Needs one window at least."""
    mean_WG = alpha_BNWGE.mean(dim=(0, 1, 4))
    padding = -grid.window % grid.stride
    mean_WG = torch.nn.functional.pad(mean_WG, (0, 0, 0, padding))
    return mean_WG.unflatten(0, (-1, grid.stride)).sum(dim=0).T
