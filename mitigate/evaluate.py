"""Score a model as it stands, without training: a pretrained model with its own attention or with an untrained variant attached. One config in, one Row out."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mitigate import bases, cost, registry, score
from mitigate.config import ConfigError, EvaluationConfig, content_hash, replace, to_dict
from mitigate.rows import Row, installed_versions, worst_of
from mitigate.surgery import BACKEND, attach
from mitigate.tasks import words
from mitigate.tasks.prompts import Sweep


def evaluate(config: EvaluationConfig, *, label: str = "", log: Callable[[str], None] = lambda line: None) -> Row:
    """Run the phase sweep of the words task on a pretrained model.

    Args:
        config: everything the result depends on.
        label: shown in tables; the model's name and the variant if empty.
        log: called with progress lines.

    Raises:
        ConfigError: the model cannot be loaded or cannot carry the variant, or its tokenizer has no words for the task.
    """
    started = time.perf_counter()
    base = bases.load_pretrained(config.model, revision=config.revision, dtype=config.dtype)
    found = words.find(base.tokenizer, config.words)
    _check_vocabulary(base, found, config.model)
    settings = config.score
    sweeps = [words.sweep(found, config.words, p, period=settings.period, prompts=settings.prompts, seed=settings.seed) for p in settings.protocols]
    _check_length(base, sweeps)
    log(_words_line(found))
    loaded = time.perf_counter()
    torch.manual_seed(config.seed)
    with attach(base.model, config.variant) as attached:
        scores = [score.summarise(score.run_sweep(attached, sweep, batch=settings.batch, log=log), sweep, settings) for sweep in sweeps]
        scored = time.perf_counter()
        measured = cost.measure(attached, config.cost, seed=config.seed)
    ended = time.perf_counter()
    return Row(
        status="ok",
        label=label or default_label(config),
        config=to_dict(recorded(config)),
        config_sha256=content_hash(recorded(config)),
        base_sha256=base.sha256,
        seed=config.seed,
        versions=installed_versions(),
        device=f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)",
        backend=BACKEND if config.variant.compress else "transformers-sdpa",
        wall_s=ended - started,
        base_s=loaded - started,
        score_s=scored - loaded,
        cost_s=ended - scored,
        scores=scores,
        curve=score.find_period(scores),
        cost=measured,
        **worst_of(scores),
    )


def recorded(config: EvaluationConfig) -> EvaluationConfig:
    """The config as a Row keeps it: of a model on disk the name alone, since where it lies is this machine's; `base_sha256` says what it is."""
    return replace(config, model=Path(config.model).name) if Path(config.model).exists() else config


def default_label(config: EvaluationConfig) -> str:
    """The model's own name and what was attached to it."""
    name = Path(config.model).name.removesuffix(".gguf")
    return f"{name}, {registry.describe(config.variant) + ' untrained' if config.variant.compress else 'own attention'}"


def _check_vocabulary(base: bases.Pretrained, found: words.Words, name: str) -> None:
    parts = (found.keys, found.names, found.between, found.after, found.filler, found.prefix, found.opening)
    embedding: Any = base.model.get_input_embeddings()
    highest, known = max(int(part.max(initial=0)) for part in parts), len(embedding.weight)
    if highest >= known:
        raise ConfigError(f"--model {name}: its tokenizer makes token {highest}, and the model knows {known}; they do not belong together")


def _check_length(base: bases.Pretrained, sweeps: list[Sweep]) -> None:
    longest = max(next(iter(sweep)).tokens.shape[1] for sweep in sweeps)
    known = getattr(base.model.config, "max_position_embeddings", None)
    if known is not None and longest > known:
        raise ConfigError(f"score: a prompt must have at most the model's {known} positions, got {longest}; ask for fewer records or a smaller context")


def _words_line(found: words.Words) -> str:
    parts = [f"{len(found.keys)} keys and {len(found.names)} names", f"records of {found.record_length} tokens", f"prefix of {len(found.prefix)}"]
    return "words: " + ", ".join(parts) + (f" ({found.note})" if found.note else "")
