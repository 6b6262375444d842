"""The one tolerance rule: a fast path may be at most twice as wrong as plain torch in the same precision, and nothing may be NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def assert_as_good_as(fast: torch.Tensor, plain: torch.Tensor | Sequence[torch.Tensor], exact: torch.Tensor, name: str = "", chained: int = 1) -> None:
    """``max|fast - exact| <= 2 (max|plain - exact| + eps max|exact|)``, with eps of the fast path's dtype; `exact` is fp64.

    Where plain torch can be written in several ways, the least precise of them counts. A result that went through several layers of kernels has a budget
    for each (`chained`).
    """
    assert fast.shape == exact.shape, (name, fast.shape, exact.shape)
    assert torch.isfinite(fast).all(), name
    if exact.numel() == 0:
        return
    ways = [plain] if isinstance(plain, torch.Tensor) else plain
    error = float((fast.double() - exact).detach().abs().max())
    allowed = max(float((way.double() - exact).detach().abs().max()) for way in ways)
    budget = 2 * chained * (allowed + torch.finfo(fast.dtype).eps * float(exact.detach().abs().max()))
    assert error <= budget, f"{name}: error {error:.3g} above the budget {budget:.3g}"


def gradients(out: torch.Tensor, weight: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of ``sum(out * weight)`` in every leaf, zeros where there is no path."""
    found = torch.autograd.grad((out.double() * weight).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in zip(leaves, found, strict=True)]
