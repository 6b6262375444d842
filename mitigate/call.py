"""Where the live tokens of one call stand: left pads, right padding and logical positions, read off its mask and position_ids.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mitigate.attachable import UnsupportedModel


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the live tokens of a call stand.

    Attributes:
        pads: left pads of each row in columns of the whole sequence; None where no row has any.
        right: whether a row of the mask ends in pads.
        positions_BT: logical positions of the call's columns where its position_ids count pads, so that RoPE must be made again; else None.
    """

    pads: tuple[int, ...] | None = None
    right: bool = False
    positions_BT: torch.Tensor | None = None


SMALL_MASK = 2**18  # entries up to which a mask is kept for later forwards
MASKS = 16  # small masks that are kept


class Call:
    """What the layers of the forward under way share: its layout, read once off the mask and position_ids that each of them gets, and visibility masks."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._layout = Layout()
        self._masks: dict[Any, torch.Tensor] = {}

    def layout(self, mask: torch.Tensor | None, position_ids: torch.Tensor | None, past: int, shape: tuple[int, int], known: tuple[int, ...] | None) -> Layout:
        """Layout of a call of `shape` (rows, columns) after `past` columns; `known` are the pads of a cache that holds some.

        Raises:
            UnsupportedModel: the tokens of a row do not follow each other, or not what the cache holds.
        """
        key = (mask, position_ids, past, shape, known)
        if len(self._key) != len(key) or any(a is not b for a, b in zip(key[:2], self._key[:2], strict=True)) or key[2:] != self._key[2:]:
            pads = _left_pads(mask, past, shape, known)
            positions_BT = _logical_positions(position_ids, mask, past, shape[1], pads)
            self._key, self._layout = key, Layout(pads=pads, right=_right_padded(mask), positions_BT=positions_BT)
        return self._layout

    def mask(self, signature: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The mask of a signature, made once for all layers; small ones serve later forwards too."""
        if signature not in self._masks:
            if len(self._masks) >= MASKS:
                self._masks.clear()
            self._masks[signature] = make()
        return self._masks[signature]

    def forget(self) -> None:
        """The next layer is the first of a forward, or of its recomputation."""
        self._key = ()
        self._masks = {signature: mask for signature, mask in self._masks.items() if mask.numel() <= SMALL_MASK}

    def clear(self) -> None:
        """Hold nothing any more."""
        self._key, self._masks = (), {}


def _left_pads(mask: torch.Tensor | None, past: int, shape: tuple[int, int], known: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if known is not None and past and len(known) != shape[0]:
        raise UnsupportedModel(f"attach: the cache holds {len(known)} rows, the call has {shape[0]}; start other rows with an empty cache")
    if mask is None:
        return known
    if mask.dim() != 2:
        raise UnsupportedModel(f"attach: attention_mask must be None or [batch, tokens], got {mask.dim()} dimensions")
    live = mask.bool()
    if bool(live.all()) and known is None:
        return None
    if live.shape != (shape[0], past + shape[1]):
        wanted = (shape[0], past + shape[1])
        raise UnsupportedModel(f"attach: attention_mask with padding must be {wanted}, columns of earlier calls included, got {tuple(live.shape)}")
    starts = (live[:, 1:] & ~live[:, :-1]).sum(dim=1) + live[:, 0]
    if bool((starts > 1).any()):
        row = int((starts > 1).nonzero()[0])
        raise UnsupportedModel(f"attach: attention_mask has a gap between the tokens of row {row}; pads may stand before or after a row's tokens")
    pads = tuple((live.cumsum(dim=1) == 0).sum(dim=1).tolist())
    held = known or (0,) * len(pads)
    for row, (pad, before) in enumerate(zip(pads, held, strict=True) if past else ()):
        if pad != before and min(pad, before) < past:
            raise UnsupportedModel(f"attach: attention_mask has {pad} left pads in row {row}, the cache was filled with {before}")
    return pads if any(pads) or known is not None else None


def _right_padded(mask: torch.Tensor | None) -> bool:
    """Whether a row ends in pads after tokens."""
    return mask is not None and bool((~mask[:, -1].bool() & mask.bool().any(dim=1)).any())


def _logical_positions(
    position_ids: torch.Tensor | None, mask: torch.Tensor | None, past: int, length: int, pads: tuple[int, ...] | None
) -> torch.Tensor | None:
    """What RoPE should have had, or None where position_ids give it already: they count a row's tokens, or (without pads the same) its columns.

    What stands at pads is nobody's position.
    """
    column_T = torch.arange(past, past + length, device=None if position_ids is None else position_ids.device)
    logical_BT = column_T[None] if pads is None else column_T - torch.tensor(pads, device=column_T.device)[:, None]
    dead_BT = logical_BT < 0
    if mask is not None and mask.shape[1] == past + length:
        dead_BT = dead_BT | ~mask[:, past:].bool().to(dead_BT.device)
    if position_ids is not None and bool(((position_ids == logical_BT) | dead_BT).all()):
        return None
    if position_ids is None or bool(((position_ids == column_T) | dead_BT).all()):
        return None if pads is None else logical_BT.clamp(min=0)
    falls = (position_ids[:, 1:] < position_ids[:, :-1]).nonzero()
    if len(falls) and pads is None:
        row, column = falls[0].tolist()
        raise UnsupportedModel(f"attach: packed sequences are not supported (position_ids of row {row} fall at column {column + 1}); give each its own row")
    raise UnsupportedModel(f"attach: position_ids must count tokens from {past} without gaps, pads left out")
