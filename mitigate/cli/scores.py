"""The command score: a phase sweep of a model as it stands, be it a pretrained one, a tiny base or a bundle."""

from __future__ import annotations

import argparse
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mitigate import config, config_files
from mitigate.cli.shared import add_cache, add_command, add_results, show_result
from mitigate.config import ConfigError

if TYPE_CHECKING:
    from mitigate.rows import Row


def add_score(commands: Any) -> None:
    parser = add_command(commands, "score", _score, "phase sweep of a model as it stands: its own attention, an untrained variant, or a bundle")
    parser.add_argument("--model", metavar="NAME_OR_PATH", help="a folder, a GGUF file, a name on the Hugging Face hub, or a preset such as tiny-1kv")
    parser.add_argument("--revision", help="of the hub's repository")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of weights and activations (default float32)")
    parser.add_argument("--variant", metavar="NAME", help="a preset to attach untrained, see `mitigate variants`; default: the model's own attention")
    parser.add_argument("--bundle", type=Path, metavar="DIR", help="an exported compressor with its model, instead of --variant")
    parser.add_argument("--context", type=int, metavar="N", help="prompts of N tokens full of records, the target near the middle, instead of --records")
    parser.add_argument("--records", type=int, help="records per prompt (default 64)")
    parser.add_argument("--queries", type=int, help="queries per prompt, asked in turn (default 8; 1 is the paper's form)")
    parser.add_argument("--chat", action="store_true", help="use the tokenizer's chat template")
    parser.add_argument("--period", type=int, help="residues P (default 24, or the next multiple of the variant's stride)")
    parser.add_argument("--prompts", type=int, help="logical prompts, each at all P placements under each protocol (default 24)")
    parser.add_argument("--protocol", choices=("outer", "in_sequence"), help="one padding protocol only (default: both)")
    parser.add_argument("--seed", type=int, help="of the prompts (default 1)")
    parser.add_argument("--batch", type=int, help="placements per forward pass (default 48)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the result; default: results/scores/<label>-<hash>")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own)")
    add_results(parser)
    add_cache(parser)


def _score(arguments: argparse.Namespace) -> int:
    if (arguments.model is None) == (arguments.bundle is None):
        raise ConfigError("score: give either --model or --bundle (a bundle holds its model)")
    if arguments.bundle is not None and arguments.variant is not None:
        raise ConfigError("score: --variant and --bundle exclude each other (a bundle holds its variant)")
    if arguments.threads is not None and arguments.threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {arguments.threads}")
    protocols = None if arguments.protocol is None else (arguments.protocol,)
    sweep = _given(period=arguments.period, prompts=arguments.prompts, seed=arguments.seed, batch=arguments.batch, protocols=protocols)
    words = _given(context=arguments.context, records=arguments.records, queries=arguments.queries, chat=arguments.chat or None)

    import torch

    variant = config_files.load_variant(arguments.variant) if arguments.variant else config.VariantConfig(compress=False)
    if arguments.variant and arguments.period is None:
        sweep["period"] = default_period(variant)
    if arguments.bundle is not None or arguments.model in config_files.preset_names("bases"):
        return _score_tiny(arguments, variant, sweep, words)
    words |= fitting_filler(config.WordsConfig(), sweep.get("period", config.ScoreConfig().period))
    wanted = config_files.from_dict(
        config.EvaluationConfig,
        _given(model=arguments.model, revision=arguments.revision, dtype=arguments.dtype)
        | {"variant": config.to_dict(variant), "words": words, "score": {"prompts": 24, **sweep}},
    )
    if arguments.records is not None and arguments.context is not None:
        raise ConfigError("score: --records and --context exclude each other (a context is filled with as many records as fit)")

    from mitigate import bases, evaluate

    label, identity = evaluate.default_label(wanted), config.content_hash(evaluate.recorded(wanted))

    def run() -> Row:
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        return evaluate.evaluate(wanted, label=label, log=print)

    def weights() -> str:
        return bases.load_pretrained(wanted.model, revision=wanted.revision, dtype=wanted.dtype).sha256

    return show_result(arguments.out or arguments.results / "scores" / f"{_slug(label)}-{identity[:8]}", identity, run, weights)


def _score_tiny(arguments: argparse.Namespace, variant: config.VariantConfig, sweep: dict[str, Any], words: dict[str, Any]) -> int:
    """A tiny base, or a bundle of one: its own task, not the words task."""
    if words:
        raise ConfigError(f"score: --{next(iter(words))} is for models with a tokenizer; the tiny bases have a task of their own")

    for name in ("dtype", "revision"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"score: --{name} is for pretrained models; the tiny bases have none")

    import torch

    from mitigate.export import bundle
    from mitigate.trial import run_trial, score_trained, with_cost

    if arguments.bundle is not None:
        trained = bundle.read_config(arguments.bundle)
        wanted = config_files.replace(trained, score=config_files.replace(trained.score, **sweep))
        label = f"bundle {arguments.bundle.name}"
    else:
        base = config_files.load_base(arguments.model)
        train, score = config.TrainConfig(updates=0), config_files.replace(config.ScoreConfig(), **sweep)
        task = base.task if score.period <= 8 else config_files.replace(base.task, **fitting_filler(config.TaskConfig(), score.period))
        parts: dict[str, config.Config] = {"variant": variant, "base": base, "task": task, "train": train, "score": score}
        wanted = config_files.from_dict(config.TrialConfig, {name: config.to_dict(part) for name, part in parts.items()})
        label = f"{arguments.model} {arguments.variant or 'own attention'} untrained"
    identity = config.content_hash(wanted)

    def run() -> Row:
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        if arguments.bundle is None:
            return run_trial(wanted, label=label, cache=arguments.cache, log=print)
        attached = bundle.load(arguments.bundle)
        row = with_cost(score_trained(attached, wanted, label=label, log=print), attached, wanted, cache=arguments.cache)
        return row.model_copy(update={"base_sha256": weights()})

    def weights() -> str:
        return hashlib.sha256((arguments.bundle / bundle.MANIFEST).read_bytes()).hexdigest()

    out = arguments.out or arguments.results / "scores" / f"{_slug(label)}-{identity[:8]}"
    return show_result(out, identity, run, None if arguments.bundle is None else weights)


def default_period(variant: config.VariantConfig) -> int:
    """The residues that a sweep without `--period` covers: ScoreConfig's, or the next multiple of the variant's stride."""
    return -(-config.ScoreConfig().period // variant.widest_stride) * variant.widest_stride


def fitting_filler(task: config.TaskConfig | config.WordsConfig, period: int) -> dict[str, int]:
    """The filler tokens of a task, or as many as a sweep over `period` residues takes where those are more."""
    steps = 3 * (period - 1)
    return {"filler": max(task.filler, steps), "filler_in_sequence": max(task.filler_in_sequence, steps + 3)}


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _slug(label: str) -> str:
    return re.sub("[^A-Za-z0-9.-]+", "_", label)
