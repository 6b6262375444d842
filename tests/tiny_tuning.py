"""A tiny random Llama with a tokenizer of whole words, a text of these words, and a fine-tuning config for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from test_evaluate import save
from tokenizers_for_tests import known_words

from mitigate import bases, finetune
from mitigate.config import CostConfig, ScoreConfig, VariantConfig, WordsConfig
from mitigate.config_finetune import FineTuneConfig, TextConfig, TuneConfig
from mitigate.surgery import Attachment, attach
from mitigate.tasks.words import ANIMALS, NAMES

VOCABULARY = [*ANIMALS[:40], *NAMES[:16]]
VARIANT = VariantConfig(window=4, stride=2, origin=-2, local_window=3)
TRAIN = TuneConfig(updates=6, batch=2, length=24, positions=10, compressor_rate=1e-2, model_rate=1e-3, warmup=0)


def write_model(folder: Path, seed: int = 1) -> Path:
    """A pretrained model in a folder of its own."""
    save(folder, known_words(VOCABULARY), seed=seed)
    return folder


def write_text(path: Path, *, documents: int = 20, words: int = 30, separator: str = "\f") -> Path:
    """Documents of random words that the tokenizer knows, a token each."""
    rng = np.random.default_rng(5)
    path.write_text(separator.join(" ".join(VOCABULARY[i] for i in rng.integers(len(VOCABULARY), size=words)) for _ in range(documents)))
    return path


def settings(folder: Path, **changes: Any) -> FineTuneConfig:
    """A config for the model and the text in `folder`; `train` is changes to `TRAIN`."""
    given: dict[str, Any] = {
        "model": str(folder / "model"),
        "text": TextConfig(path=str(folder / "text.txt"), length=20, windows=3),
        "variant": VARIANT,
        "words": WordsConfig(records=6, demonstrations=2, queries=3, filler=9, filler_in_sequence=14),
        "score": ScoreConfig(period=4, prompts=3, replicates=20, batch=12),
        "cost": CostConfig(context=21, batch=1, steps=2, repeats=2),
        "prompt": "dog cat fox",
        "new_tokens": 9,
    }
    train = dataclasses.replace(TRAIN, **changes.pop("train", {}))
    return FineTuneConfig(**given | {"train": train} | changes)


def ready(config: FineTuneConfig, seed: int = 0) -> tuple[bases.Pretrained, finetune.Data, Attachment]:
    """The loaded base, its data, and the variant attached with gates that see something."""
    base = bases.load_pretrained(config.model, dtype=config.dtype)
    data = finetune.load_data(base, config)
    torch.manual_seed(seed)
    return base, data, attach(base.model, config.variant)
