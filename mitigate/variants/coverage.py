"""Coverage: a loss that asks the *set* of heads to cover all phases, so that no phase is every head's blind spot.

Input is the mean gate of every head as a profile over phases, [heads, S], each row summing to 1 (K heads and V heads apart).
"""

from __future__ import annotations

import math

import torch

from mitigate.registry import register

SOURCE = "arXiv:2609.36322, proposed direction"


@register("coverage", "none", summary="no regularizer", source="arXiv:2609.36322, default")
def none(profile_HS: torch.Tensor, *, threshold: float) -> torch.Tensor:
    """Zero."""
    return profile_HS.new_zeros(())


@register("coverage", "entropy", summary="1 - H(mean gate over a set of heads) / log S: even mass over phases", source=SOURCE)
def entropy(profile_HS: torch.Tensor, *, threshold: float) -> torch.Tensor:
    """0 when the heads' mean gate is uniform over phases, 1 when it stands on one phase."""
    stride = profile_HS.shape[1]
    if stride == 1:
        return profile_HS.new_zeros(())
    mean_S = profile_HS.mean(dim=0)
    return 1 + torch.special.xlogy(mean_S, mean_S).sum() / math.log(stride)


@register("coverage", "hinge", summary="sum_r relu(tau - max_h gate_h(r)): every phase has a head that gives it at least tau", source=SOURCE)
def hinge(profile_HS: torch.Tensor, *, threshold: float) -> torch.Tensor:
    """0 when every phase is some head's with at least `threshold` of its mass.

    A profile sums to 1, so that a head serves at most 1/threshold phases: with fewer than S * threshold heads in the set, as with one head per layer,
    S = 8 and a threshold above 1/8, 0 is out of reach, and the loss only pushes mass above the threshold down to it.
    """
    return torch.relu(threshold - profile_HS.max(dim=0).values).sum()
