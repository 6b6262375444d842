"""Score a model as it stands, without training: a pretrained model with its own attention or with an untrained variant attached. One config in, one Row out."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from mitigate import bases, cost, registry, score
from mitigate.config import ConfigError, EvaluationConfig, content_hash, to_dict
from mitigate.config_files import replace
from mitigate.config_finetune import FineTuneConfig
from mitigate.perplexity import check_tokens
from mitigate.rows import Row, installed_versions, worst_of
from mitigate.surgery import Attachment, attach
from mitigate.tasks import words
from mitigate.tasks.prompts import Sweep

Scored = TypeVar("Scored", EvaluationConfig, FineTuneConfig)


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
    loaded = time.perf_counter()
    row = score_variant(base, config, label=label, log=log)
    return row.model_copy(update={"base_s": loaded - started, "wall_s": time.perf_counter() - started})


def score_variant(base: bases.Pretrained, config: EvaluationConfig, *, label: str = "", log: Callable[[str], None] = lambda line: None) -> Row:
    """`evaluate` of a model that is loaded already; the variant is taken off again."""
    torch.manual_seed(config.seed)
    with attach(base.model, config.variant) as attached:
        return score_attached(attached, base, config, label=label, log=log)


def score_attached(
    attached: Attachment, base: bases.Pretrained, config: EvaluationConfig | FineTuneConfig, *, label: str = "", log: Callable[[str], None] = lambda line: None
) -> Row:
    """Sweeps and cost of a variant on a loaded model as it is now, trained or not: a Row without what only loading and training can say.

    Raises:
        ConfigError: the tokenizer has no words for the task, or a prompt is longer than the model's positions.
    """
    started = time.perf_counter()
    found = words.find(base.tokenizer, config.words)
    check_vocabulary(base, found, config.model)
    settings = config.score
    sweeps = [words.sweep(found, config.words, p, period=settings.period, prompts=settings.prompts, seed=settings.seed) for p in settings.protocols]
    _check_length(base, sweeps)
    log(_words_line(found))
    scores = [score.summarise(score.run_sweep(attached, sweep, batch=settings.batch, log=log), sweep, settings) for sweep in sweeps]
    scored = time.perf_counter()
    measured = cost.measure(attached, config.cost, seed=config.seed)
    ended = time.perf_counter()
    kept: EvaluationConfig | FineTuneConfig = recorded(config)  # type: ignore[type-var]
    return Row(
        status="ok",
        label=label or default_label(config),
        config=to_dict(kept),
        config_sha256=content_hash(kept),
        base_sha256=base.sha256,
        seed=config.seed,
        versions=installed_versions(),
        device=f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)",
        backend=attached.backend,
        wall_s=ended - started,
        score_s=scored - started,
        cost_s=ended - scored,
        scores=scores,
        curve=score.find_period(scores),
        cost=measured,
        **worst_of(scores),
    )


def recorded(config: Scored) -> Scored:
    """The config as a Row keeps it: of a model or a text on disk the name alone, since where it lies is this machine's; hashes say what it is."""
    if isinstance(config, FineTuneConfig):
        config = replace(config, text=replace(config.text, path=Path(config.text.path).name))
    return replace(config, model=Path(config.model).name) if Path(config.model).exists() else config


def default_label(config: EvaluationConfig | FineTuneConfig) -> str:
    """The model's own name and what was attached to it."""
    name = Path(config.model).name.removesuffix(".gguf")
    state = "fine-tuned" if isinstance(config, FineTuneConfig) else "untrained"
    return f"{name}, {f'{registry.describe(config.variant)} {state}' if config.variant.compress else 'own attention'}"


def check_vocabulary(base: bases.Pretrained, found: words.Words, name: str) -> None:
    """ConfigError unless the model knows every token of the words."""
    parts = (found.keys, found.names, found.between, found.after, found.filler, found.prefix, found.opening)
    check_tokens(base.model, max(int(part.max(initial=0)) for part in parts), f"--model {name}: its tokenizer")


def _check_length(base: bases.Pretrained, sweeps: list[Sweep]) -> None:
    longest = max(next(iter(sweep)).tokens.shape[1] for sweep in sweeps)
    known = getattr(base.model.config, "max_position_embeddings", None)
    if known is not None and longest > known:
        raise ConfigError(f"score: a prompt must have at most the model's {known} positions, got {longest}; ask for fewer records or a smaller context")


def _words_line(found: words.Words) -> str:
    parts = [f"{len(found.keys)} keys and {len(found.names)} names", f"records of {found.record_length} tokens", f"prefix of {len(found.prefix)}"]
    return "words: " + ", ".join(parts) + (f" ({found.note})" if found.note else "")
