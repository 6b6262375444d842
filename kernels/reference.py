"""Pool and attend in plain PyTorch, written to be checked against the formulas by eye. Everything faster is held to this file.

Shapes: B batch, T tokens, N summaries, W window, H query heads, G kv heads, D head dim, E gate channels (1: one weight per offset and kv head;
D: one per channel), U payload maps (1: shared by all offsets; W: one per offset), M = N + T entries of the joint softmax.
"""

from __future__ import annotations

import torch

from mitigate.kernels import visibility


def window_index(length: int, window: int, stride: int, origin: int) -> torch.Tensor:
    """Token of offset ``i`` of window ``j`` as an int64 tensor [N, W]; negative where the token does not exist."""
    n = visibility.num_windows(length, window, stride, origin)
    return origin + stride * torch.arange(n)[:, None] + torch.arange(window)[None, :]


def pool(logits_BTWGE: torch.Tensor, payload_BTUGD: torch.Tensor, *, window: int, stride: int, origin: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """``summary_j = sum_i alpha_{j,i} * u_{j,i}`` with ``alpha_j = softmax_i(s_{j,i})`` over the offsets that exist.

    Args:
        logits_BTWGE: gate logit of token t if it stands at offset i, for every offset.
        payload_BTUGD: what is pooled; U = W where each offset has its own map, else 1.

    Returns:
        summaries [B, N, G, D] in the payload's dtype and gates alpha [B, N, W, G, E] in fp32 (fp64 for fp64 logits).
    """
    index_NW = window_index(logits_BTWGE.shape[1], window, stride, origin).to(logits_BTWGE.device)
    exists_NW = index_NW >= 0
    token_NW, offset_W = index_NW.clamp(min=0), torch.arange(window, device=index_NW.device)
    wide = torch.promote_types(logits_BTWGE.dtype, torch.float32)
    s_BNWGE = logits_BTWGE[:, token_NW, offset_W].to(wide)
    s_BNWGE = s_BNWGE.masked_fill(~exists_NW[None, :, :, None, None], float("-inf"))
    alpha_BNWGE = s_BNWGE.softmax(dim=2)
    map_W = offset_W if payload_BTUGD.shape[2] > 1 else torch.zeros_like(offset_W)
    u_BNWGD = payload_BTUGD[:, token_NW, map_W]
    summary_BNGD = (alpha_BNWGE * u_BNWGD.to(wide)).sum(dim=2)
    return summary_BNGD.to(payload_BTUGD.dtype), alpha_BNWGE


def is_bypassed(t: torch.Tensor, *, stride: int, origin: int, phases: tuple[int, ...]) -> torch.Tensor:
    """Tokens whose exact KV is kept for good: those whose phase ``(t - origin) mod stride`` is in ``phases``."""
    phase = (t - origin) % stride
    return torch.isin(phase, torch.tensor(phases, dtype=phase.dtype, device=phase.device))


def visible(
    queries: torch.Tensor, keys: torch.Tensor, summaries: int, *, window: int, stride: int, origin: int, local: int, bypass: tuple[int, ...] = ()
) -> torch.Tensor:
    """Which entries of ``[summaries | exact tokens]`` each query may see.

    Args:
        queries, keys: logical positions, int64 [Tq] and [Tk].
        summaries: how many summaries stand before the exact tokens, window 0 first.
        bypass: phases whose tokens stay exact for good.

    Returns:
        bool [Tq, summaries + Tk].
    """
    t, i = queries[:, None], keys[None, :]
    sees_summary = torch.arange(summaries, device=queries.device)[None, :] < visibility.num_completed(t, window, stride, origin)
    kept = i >= visibility.exact_lo(t, window, stride, origin, local)
    if bypass:
        kept = kept | is_bypassed(i, stride=stride, origin=origin, phases=bypass)
    return torch.cat([sees_summary, kept & (i <= t)], dim=1)


def attend(q_BHTD: torch.Tensor, k_BGMD: torch.Tensor, v_BGMD: torch.Tensor, visible_TM: torch.Tensor, scale: float) -> torch.Tensor:
    """One joint softmax over everything visible; grouped query heads share a kv head. Returns [B, H, T, Dv]."""
    repeat = q_BHTD.shape[1] // k_BGMD.shape[1]
    k_BHMD, v_BHMD = k_BGMD.repeat_interleave(repeat, dim=1), v_BGMD.repeat_interleave(repeat, dim=1)
    logits_BHTM = (q_BHTD @ k_BHMD.transpose(-1, -2)) * scale
    weights_BHTM = logits_BHTM.masked_fill(~visible_TM, float("-inf")).softmax(dim=-1)
    return weights_BHTM @ v_BHMD
