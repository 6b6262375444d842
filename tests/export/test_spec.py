"""SPEC.md says of each variant what its compressor.json says, in words that differ where variants differ."""

from __future__ import annotations

import presets
import pytest

from mitigate.config import TrialConfig
from mitigate.config_files import from_dict
from mitigate.export import describe, spec


def text(name: str) -> str:
    """The SPEC of a variant."""
    row, attached = presets.made(presets.VARIANTS[name])
    return spec.render(describe.describe(from_dict(TrialConfig, row.config), row, attached, weights_sha256="0" * 64))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("w8s8", "Z_i is row i of `gate.weight`, b_i is row i of `gate.bias`"),
        ("w8s8-no-bias", "there is no bias"),
        ("w8s8-content", "one Z serves every offset (`gate.weight` has one row)"),
        ("w8s8-uniform", "Dividing by W is wrong in a short window"),
        ("w8s8-vector", "each of the 8 channels of a KV head has a gate of its own"),
        ("w8s8-tied-gates", "Keys and values share the gate `layers.{i}.k.gate.*`"),
        ("w8s8-tied", "The finished key, normalised and rotated, is the value too"),
        ("w8s8-per-offset", "C_i being row i of `layers.{i}.k.payload.weight` for keys and of `layers.{i}.v.payload.weight` for values"),
        ("norm-tokens", "Each token's key is RMS-normalised first"),
        ("w8s8-bypass-last", "or the token's phase is one that stays exact for good"),
        ("w8s8-local4", "i ≥ min(t − 4 + 1, covered(t))"),
        ("w8s8-stagger", "| 1 | 8 | 8 | -4 | 3 | none |"),
        ("rope-end", "max(0, origin + j * stride + window - 1): token 0 for layer 0's first summary, 4 for its second"),
        ("w12s8", "Neighbouring windows share W − S = 4 tokens"),
        ("w12s8", "`gate.weight` is [12, 24, 2], columns"),
        ("w12s8", "at most 11 x 24 hidden states"),
        ("coarse-overlap", "| 0 | 6 | 4 | -3 | 2 | 1 |\n| 1 | 12 | 8 | -3 | 8 | 3 |"),
        ("coarse-overlap", "Neighbouring windows share W − S (2 in layer 0; 4 in layer 1) tokens"),
        ("coarse-overlap", "`gate.weight` is [W, 24, 2], W being the layer's own, columns"),
        ("coarse-overlap", "token 2 for layer 0's first summary, 6 for its second; token 8 for layer 1's first summary, 16 for its second"),
        ("coarse-overlap", "at most the layer's window - 1 (5 to 11) x 24 hidden states"),
    ],
)
def test_the_spec_says_what_this_variant_does(name: str, said: str) -> None:
    assert said in text(name)


def test_bypass_is_not_spoken_of_where_there_is_none() -> None:
    assert "stays exact for good (1.1)" not in text("w8s8")
