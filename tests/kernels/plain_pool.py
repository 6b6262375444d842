"""The reference's pooling, from logits and payload by role as the kernels take them."""

from __future__ import annotations

import torch

from mitigate.kernels import reference


def by_role(z_BTZGE: torch.Tensor | None, u_BTUGD: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """Summaries [B, N, G, D]. The reference reads by offset, and offset i stands in role i // S; no logits are uniform gates."""
    window, stride, origin = grid
    role = torch.arange(window) // stride
    if z_BTZGE is None or z_BTZGE.shape[2] == 0:
        z_BTZGE = u_BTUGD.new_zeros(*u_BTUGD.shape[:2], 1, u_BTUGD.shape[3], 1)
    z_BTWGE = z_BTZGE[:, :, role] if z_BTZGE.shape[2] > 1 else z_BTZGE.expand(-1, -1, window, -1, -1)
    u_BTWGD = u_BTUGD[:, :, role] if u_BTUGD.shape[2] > 1 else u_BTUGD
    return reference.pool(z_BTWGE, u_BTWGD, window=window, stride=stride, origin=origin)[0]
