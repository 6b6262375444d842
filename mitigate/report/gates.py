"""What a trained gate prefers whatever the token: ``softmax(b)`` over the offsets of a window, by layer, branch and head. Plain data, no drawing.

A gate is ``softmax_i(Z_i . h + b_i)``; its static part, the bias, is what makes a weak spot that returns with every window. Gates without a bias have none:
content alone decides there. Shapes: W offsets, X gate outputs (branches * KV heads * channels).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from mitigate import pareto
from mitigate.rows import Row

WEIGHTS = "compressor.safetensors"


@dataclass(frozen=True, kw_only=True)
class GateProfile:
    """Static gate of one KV head. `weights` has W entries and sums to 1; of a vector gate it is the mean over channels."""

    layer: int
    branch: str
    head: int
    weights: list[float]

    @property
    def name(self) -> str:
        """'layer 0 K head 1'."""
        return f"layer {self.layer} {self.branch} head {self.head}"


def offset_words(profiles: Sequence[GateProfile]) -> str:
    """What the axis of offsets shows: 'offset in the window of 8 tokens', or of each layer's where coarse layers have another."""
    windows = list(dict.fromkeys(len(profile.weights) for profile in profiles))
    return f"offset in the window of {' or '.join(map(str, windows))} tokens{', by layer' if len(windows) > 1 else ''}"


def ends_scale(profiles: Sequence[GateProfile], place: int) -> bool:
    """Whether the strip at `place` is the last before one of another window, so that its offsets need numbers of their own."""
    return place + 1 == len(profiles) or len(profiles[place].weights) != len(profiles[place + 1].weights)


def static_gates(arrays: Mapping[str, NDArray[Any]], *, kv_heads: int, branches: Sequence[str] = ("K", "V")) -> list[GateProfile]:
    """The profiles of a compressor's weights.

    Args:
        arrays: tensors by name; `<layer>.gate_bias` is [W, X].
        kv_heads: KV heads G of the model.
        branches: what the gate outputs are for, outermost: ("K", "V"), or one name where the gates are tied.

    Raises:
        ValueError: a bias does not hold the same number of channels for each branch and head.
    """
    found = []
    for layer in sorted(int(name.split(".")[0]) for name in arrays if name.endswith(".gate_bias")):
        bias_WX = np.asarray(arrays[f"{layer}.gate_bias"], dtype=np.float64)
        window, outputs = bias_WX.shape
        if outputs % (len(branches) * kv_heads):
            raise ValueError(f"layer {layer}: {outputs} gate outputs do not divide into {len(branches)} branches of {kv_heads} KV heads")
        alpha = np.exp(bias_WX - bias_WX.max(axis=0))
        alpha = (alpha / alpha.sum(axis=0)).reshape(window, len(branches), kv_heads, -1).mean(axis=3)
        for (place, branch), head in ((pair, head) for pair in enumerate(branches) for head in range(kv_heads)):
            found.append(GateProfile(layer=layer, branch=branch, head=head, weights=alpha[:, place, head].tolist()))
    return found


def of_trial(study_dir: Path, row: Row) -> list[GateProfile] | str:
    """The profiles of a study's trial, or a sentence that says why there are none."""
    path = study_dir / "trials" / f"{row.trial if row.trial is not None else -1:04d}" / WEIGHTS
    variant, base = pareto.variant_of(row), row.config.get("base") or {}
    if pareto.is_full(row):
        return "Full attention has no gates."
    if row.trial is None or not path.is_file():
        return "Its weights are not in the study folder."
    try:
        branches = ("K", "V") if variant.get("tie") == "none" else ("K and V",)
        found = static_gates(load_file(path), kv_heads=int(base.get("kv_heads", 1)), branches=branches)
    except (SafetensorError, ValueError) as error:
        return f"{WEIGHTS} cannot be read: {error}."
    return found or f"Its {variant.get('gate')} gate has no bias: no offset is preferred whatever the token."
