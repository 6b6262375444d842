"""Bundles of presets on a tiny untrained base, with gates far from their start: made in a second, without a search."""

from __future__ import annotations

from pathlib import Path

import tiny_models
from fake_rows import fake_row
from numpy.random import default_rng

from mitigate import bases, cost, registry
from mitigate.config import BaseConfig, ScoreConfig, TaskConfig, TrialConfig, VariantConfig, content_hash, to_dict
from mitigate.export import bundle
from mitigate.rows import Row
from mitigate.surgery import Attachment
from mitigate.trial import store_weights

BASE = BaseConfig(
    layers=2, hidden=24, heads=4, kv_heads=2, head_dim=8, intermediate=24, rope_theta=100.0, task=TaskConfig(keys=8, names=8, records=4, queries=2)
)

VARIANTS = {
    **tiny_models.COMPRESSED,
    "coarse-overlap": VariantConfig(window=6, stride=4, origin=-3, coarse="odd", coarse_factor=2, bypass="last", rope_position="window_end", local_window=3),
    "coarse-one": VariantConfig(window=1, stride=1, coarse="odd", coarse_factor=3, local_window=1),
}
COARSE = [name for name, variant in VARIANTS.items() if variant.coarse != "none"]


def made(variant: VariantConfig, base: BaseConfig = BASE, trial: int = 0) -> tuple[Row, Attachment]:
    """A Row of a variant and its model; accuracies are drawn, bytes are true."""
    task = TaskConfig(keys=8, names=8, records=4, queries=2, filler=600, filler_in_sequence=600)
    config = TrialConfig(variant=variant, base=base, task=task, score=ScoreConfig(period=variant.stride * variant.coarse_factor if variant.compress else 8))
    row = fake_row(trial, registry.describe(variant), VariantConfig(), default_rng(trial))
    model = bases.build(base)
    tiny_models.randomise(model)
    attached = tiny_models.attached(model.eval(), variant)
    assert row.cost is not None
    true = {"kv_bytes_per_token": cost.bytes_per_token(variant, cost.shape_of(model)), "kv_kept": registry.kept_fraction(variant, layers=base.layers)}
    changes = {"config": to_dict(config), "config_sha256": content_hash(config), "cost": row.cost.model_copy(update=true)}
    return row.model_copy(update=changes), attached


def exported(variant: VariantConfig, folder: Path, base: BaseConfig = BASE) -> Path:
    """A bundle of a variant."""
    row, attached = made(variant, base)
    return bundle.into_folder(folder, lambda partial: bundle.write_parts(partial, row, attached))


def study(folder: Path, variants: list[VariantConfig], base: BaseConfig = BASE) -> Path:
    """A study folder with one finished trial a variant."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for number, variant in enumerate(variants):
        row, attached = made(variant, base, number)
        store_weights(attached, folder / "trials" / f"{number:04d}")
        (folder / "trials" / f"{number:04d}" / "result.json").write_text(row.to_json())
    return folder
