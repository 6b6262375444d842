"""One layer's learned compressor, and the one pure function that makes summaries from hidden rows.

Shapes: B batch, T rows, N summaries, W window, S stride, C hidden width, G kv heads, D head dim, E gate channels, X gate outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from mitigate import registry
from mitigate.config import VariantConfig
from mitigate.geometry import Grid
from mitigate.kernels import views


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """Summaries before RoPE (and before the key norm, unless the tokens' keys were normalised).

    Args:
        key, value: [B, N, G, D]; value is None where the finished key serves as the value.
        key_gates, value_gates: alpha [B, N, W, G, E] in fp32; the same tensor where the gate is shared.
    """

    key: torch.Tensor
    value: torch.Tensor | None
    key_gates: torch.Tensor
    value_gates: torch.Tensor


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
    ) -> Pooled:
        """Pool windows ``window0 .. window0 + count - 1``.

        Args:
            hidden_BTC: hidden states of consecutive tokens.
            key_BTF, value_BTF: the layer's projections of them before key norm and RoPE, F = G*D.
            row0: position of the first row; every token of the windows from position 0 on must be among the rows.
            normalise: applied to the tokens' keys [..., G, D] before they are pooled.
        """
        grid = self.grid
        first = grid.origin + window0 * grid.stride
        exists_NW = views.exists(window=grid.window, stride=grid.stride, first=first, count=count, device=hidden_BTC.device)

        def cut(x_BTF: torch.Tensor) -> torch.Tensor:
            return views.windows(x_BTF, window=grid.window, stride=grid.stride, start=first - row0, count=count)

        hidden_BNWC = cut(hidden_BTC) if self.channels or not self.shares_projection else None
        key_gates, value_gates = self._gates(hidden_BTC, hidden_BNWC, count, exists_NW)
        key_BNWGD = self._payload(cut, hidden_BNWC, key_BTF, "key_maps")
        key = views.weighted_sum(key_gates, normalise(key_BNWGD) if normalise is not None else key_BNWGD)
        value = None
        if self.tie.held == 2:
            value = views.weighted_sum(value_gates, self._payload(cut, hidden_BNWC, value_BTF, "value_maps"))
        return Pooled(key=key, value=value, key_gates=key_gates, value_gates=value_gates)

    def _gates(self, like: torch.Tensor, hidden_BNWC: torch.Tensor | None, count: int, exists_NW: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if hidden_BNWC is None or not self.channels:
            alpha = views.uniform_weights(like.shape[0], count, self.grid.window, exists_NW, like)[..., None]
            return alpha, alpha
        weight_WCX = self.gate_weight.expand(self.grid.window, -1, -1)
        alpha_BNWX = views.gate_weights(hidden_BNWC, weight_WCX, getattr(self, "gate_bias", None), exists_NW)
        branches = alpha_BNWX.unflatten(-1, (self.tie.gates, self.kv_heads, self.channels)).unbind(dim=3)
        return branches[0], branches[-1]

    def _payload(self, cut, hidden_BNWC: torch.Tensor | None, projected_BTF: torch.Tensor, maps: str) -> torch.Tensor:  # type: ignore[no-untyped-def]
        if self.shares_projection:
            u_BNWF = cut(projected_BTF)
        else:
            assert hidden_BNWC is not None
            u_BNWF = torch.einsum("bnwc,wcf->bnwf", hidden_BNWC, getattr(self, maps).to(hidden_BNWC.dtype))
        return u_BNWF.unflatten(-1, (self.kv_heads, self.head_dim))


def phase_profile(alpha_BNWGE: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Mean gate of each head over batch, windows and channels, summed onto phases: [G, S], rows sum to 1. Needs one window at least."""
    mean_WG = alpha_BNWGE.mean(dim=(0, 1, 4))
    padding = -grid.window % grid.stride
    mean_WG = torch.nn.functional.pad(mean_WG, (0, 0, 0, padding))
    return mean_WG.unflatten(0, (-1, grid.stride)).sum(dim=0).T
