"""The command line. Bad input gives one line on stderr and exit code 2, and changes nothing."""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mitigate import __version__, config
from mitigate.config import ConfigError, WorkFailed

if TYPE_CHECKING:
    from mitigate.rows import Row

Command = Callable[[argparse.Namespace], int]
_TRIAL_FILES = {
    "model.safetensors",
    "compressor.safetensors",
    "outcomes.safetensors",
    "phase_curve.png",
    "phase_curve.svg",
}  # what a trial that was cut short may leave


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 the work failed, 2 bad input, 130 interrupted."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # tables and bars are Unicode; a terminal that is not shows "?"
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    try:
        return command(arguments)
    except ConfigError as error:
        print(f"mitigate: {error}", file=sys.stderr)
        return 2
    except WorkFailed as error:
        print(f"mitigate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mitigate: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (NotADirectoryError, FileExistsError, IsADirectoryError, PermissionError) as error:
        print(f"mitigate: {error.filename}: {(error.strerror or str(error)).lower()}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mitigate", description="Search for KV-cache compressors without periodic weak spots.")
    parser.add_argument("--version", action="version", version=f"mitigate {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    search = _add(commands, "search", _search, "run or resume a search; ends in a front table, figures and an HTML report")
    search.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, see configs/quickstart.toml")
    search.add_argument("--trials", type=int, help="total number of trials, instead of the config's")
    search.add_argument("--workers", type=int, help="trials at once, instead of the config's")
    search.add_argument("--max-hours", type=float, help="stop proposing after this many hours")
    search.add_argument("--max-updates", type=int, help="stop proposing after so many fine-tuning updates of all trials together")
    search.add_argument("--require", action="append", metavar="TEXT", help='such as "kv_kept <= 0.15"; again for another; instead of the config\'s')
    search.add_argument("--reproducible", action="store_true", help="the same proposals whatever the workers' timing; some of them may wait")
    search.add_argument("--address", help="a running Ray cluster to join (host:port or 'auto'); default: Ray on this machine")
    search.add_argument("--inline", action="store_true", help="run trials one by one in this process, without Ray")
    _results(search)
    _cache(search)

    status = _add(commands, "status", _status, "how a study stands, beside a running search or after it")
    _named_study(status)
    status.add_argument("--watch", type=float, nargs="?", const=5.0, metavar="SECONDS", help="again every so many seconds (default 5) until it ends")
    status.add_argument("--json", action="store_true", help="as JSON")

    derived = _add(commands, "verify-study", _verify_study, "derive every proposal and promotion of a study again from its record")
    _named_study(derived)

    again = _add(commands, "rescore", _rescore, "train and score the front, or trials, of a study again on fresh seeds and prompts")
    _named_study(again)
    again.add_argument("--seeds", type=int, default=3, metavar="N", help="fresh seeds for each trial (default 3)")
    again.add_argument("--trial", type=int, action="append", metavar="N", help="this trial, again for another (default: the compressed trials of the front)")
    again.add_argument("--workers", type=int, help="trials at once, instead of the study's")
    again.add_argument("--address", help="a running Ray cluster to join; default: Ray on this machine")
    again.add_argument("--inline", action="store_true", help="one by one in this process, without Ray")
    _cache(again)

    trial = _add(commands, "trial", _trial, "run one trial and draw its phase curve")
    trial.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of a trial or of a search (its trial template)")
    trial.add_argument("--variant", metavar="NAME", help="a preset, see `mitigate variants`")
    trial.add_argument("--seed", type=int, help="seed of the fine-tune, instead of the config's")
    trial.add_argument("--updates", type=int, help="updates of the fine-tune, instead of the config's")
    trial.add_argument("--out", type=Path, metavar="DIR", help="folder of the result; default: results/trials/<label>-<hash>")
    trial.add_argument("--threads", type=int, default=1, help="torch threads (default 1: the reference budget is one core)")
    _results(trial)
    _cache(trial)

    score = _add(commands, "score", _score, "phase sweep of a model as it stands: its own attention, an untrained variant, or a bundle")
    score.add_argument("--model", metavar="NAME_OR_PATH", help="a folder, a GGUF file, a name on the Hugging Face hub, or a preset such as tiny-1kv")
    score.add_argument("--revision", help="of the hub's repository")
    score.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of weights and activations (default float32)")
    score.add_argument("--variant", metavar="NAME", help="a preset to attach untrained, see `mitigate variants`; default: the model's own attention")
    score.add_argument("--bundle", type=Path, metavar="DIR", help="an exported compressor with its model, instead of --variant")
    score.add_argument("--context", type=int, metavar="N", help="prompts of N tokens full of records, the target near the middle, instead of --records")
    score.add_argument("--records", type=int, help="records per prompt (default 64)")
    score.add_argument("--queries", type=int, help="queries per prompt, asked in turn (default 8; 1 is the paper's form)")
    score.add_argument("--chat", action="store_true", help="use the tokenizer's chat template")
    score.add_argument("--period", type=int, help="residues P (default 24, or the next multiple of the variant's stride)")
    score.add_argument("--prompts", type=int, help="logical prompts, each at all P placements under each protocol (default 24)")
    score.add_argument("--protocol", choices=("outer", "in_sequence"), help="one padding protocol only (default: both)")
    score.add_argument("--seed", type=int, help="of the prompts (default 1)")
    score.add_argument("--batch", type=int, help="placements per forward pass (default 48)")
    score.add_argument("--out", type=Path, metavar="DIR", help="folder of the result; default: results/scores/<label>-<hash>")
    score.add_argument("--threads", type=int, help="torch threads (default: torch's own)")
    _results(score)
    _cache(score)

    tune = _add(commands, "finetune", _finetune, "fine-tune a pretrained model with a variant; rows before and after, perplexities, a figure and a bundle")
    tune.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, see configs/real-model.toml and docs/real-models.md")
    tune.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the result; a run that was cut short goes on in it")
    tune.add_argument("--model", metavar="NAME_OR_PATH", help="instead of the config's")
    tune.add_argument("--minutes", type=float, help="budget of training time, instead of the config's")
    tune.add_argument("--threads", type=int, help="torch threads (default: torch's own)")

    saying = _add(commands, "generate", _generate, "continue a prompt with a model, as it is or with a compressor, and count its cache")
    saying.add_argument("--model", required=True, metavar="NAME_OR_PATH", help="a folder, a GGUF file, or a name on the Hugging Face hub")
    saying.add_argument("--revision", help="of the hub's repository")
    saying.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of weights and activations (default: the bundle's, or float32)")
    how = saying.add_mutually_exclusive_group()
    how.add_argument("--bundle", type=Path, metavar="DIR", help="a compressor that `mitigate finetune` trained for this model")
    how.add_argument("--variant", metavar="NAME", help="a preset to attach untrained, see `mitigate variants`")
    saying.add_argument("--prompt", required=True, metavar="TEXT")
    saying.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(default 64)")
    saying.add_argument("--chat", action="store_true", help="the prompt is a user's turn of the tokenizer's chat template")
    saying.add_argument("--temperature", type=float, default=0.0, help="draw tokens instead of taking the likeliest (default 0: greedy)")
    saying.add_argument("--seed", type=int, default=0, help="of the draw, and of an untrained variant's gates (default 0)")
    saying.add_argument("--threads", type=int, help="torch threads (default: torch's own)")

    moving = _add(commands, "transition", _transition, "accuracy against the distance from fact to query, at every phase, of a trained trial")
    moving.add_argument("trial", type=Path, metavar="DIR", help="folder of a finished trial: results/trials/NAME, or results/STUDY/trials/NNNN")
    moving.add_argument("--distance", type=int, metavar="N", help="largest distance, tokens (default: local window + W + S + 16)")
    moving.add_argument("--prompts", type=int, default=32, help="logical prompts behind each cell (default 32)")
    moving.add_argument("--seed", type=int, default=2, help="of the prompts (default 2)")
    moving.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")

    front = _add(commands, "front", _front, "print the Pareto front of a study, or of its trials that meet requirements")
    _named_study(front)
    front.add_argument("--require", action="append", default=[], metavar="TEXT", help='such as "kv_kept <= 0.15"; give it again for another, all must hold')
    front.add_argument("--sort", metavar="COLUMN", help="best first by a column of results/README.md, such as a_min (default: fewest KV bytes)")
    form = front.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON, rows whole, in the form of front.json")
    form.add_argument("--csv", action="store_true", help="as CSV, in the form of front.csv")

    show = _add(commands, "show", _show_trial, "one trial of a study: config, standing, phase curve, gates, how to export it")
    _named_study(show)
    show.add_argument("trial", type=int, metavar="TRIAL", help="trial number")
    show.add_argument("--json", action="store_true", help="the whole Row as JSON")

    compare = _add(commands, "compare", _compare, "two trials of a study on the same prompts: paired differences with intervals")
    _named_study(compare)
    compare.add_argument("a", type=int, metavar="A", help="trial number")
    compare.add_argument("b", type=int, metavar="B", help="trial number; differences are A minus B")
    compare.add_argument("--json", action="store_true", help="as JSON")

    report = _add(commands, "report", _report, "write tables, figures and report.html of a study again")
    _named_study(report)
    report.add_argument(
        "--baseline", type=Path, action="append", metavar="STUDY", help="a random search to draw beside this one (default: those beside it of the same config)"
    )

    export = _add(commands, "export", _export, "write a trial's compressor as a bundle with golden vectors, or for another codebase")
    _named_study(export)
    which = export.add_mutually_exclusive_group(required=True)
    which.add_argument("--trial", type=int, metavar="N", help="trial number")
    which.add_argument("--knee", type=int, nargs="?", const=1, metavar="K", help="the K-th candidate from the front, as the report lists them (default 1)")
    which.add_argument("--best", metavar="COLUMN", help="the trial with the best value in a column of the tables, such as a_min")
    export.add_argument("--require", action="append", default=[], metavar="TEST", help='with --best: only trials that meet it, such as "kv_kept <= 0.15"')
    export.add_argument("--target", choices=("transformers", "deepseek-v4", "vllm"), help="write for another codebase, instead of a bundle")
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")

    verify = _add(
        commands, "verify", _verify, "check a bundle: its files, its golden vectors with our code and with its reference.py, or another codebase's outputs"
    )
    verify.add_argument("bundle", type=Path, metavar="DIR")
    verify.add_argument("--against", type=Path, metavar="OUTPUTS", help="folder with another codebase's L0.safetensors, L1.safetensors, …")
    verify.add_argument("--trust-code", action="store_true", help="run the bundle's reference.py although it is not the text that this version writes")

    _add(commands, "variants", _variants, "list strategies and presets")
    _add(commands, "doctor", _doctor, "devices, versions and backends, and a check of each kernel against the reference")
    _add(commands, "paper", _paper, "the paper's published figures beside ours recomputed, with the period found in each run")
    return parser


def _add(commands: Any, name: str, command: Command, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    parser.set_defaults(command=command)
    return parser


def _results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR", help="where studies lie (default: results)")


def _named_study(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=Path, metavar="STUDY", help="study folder, or its name under the results folder")
    _results(parser)


def _cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", type=Path, default=Path("cache"), metavar="DIR", help="where trained bases lie (default: cache)")


def _study(arguments: argparse.Namespace) -> Path:
    """A study folder as given, or by its name under the results folder."""
    named: Path = arguments.study
    return named if (named / "config.json").is_file() else arguments.results / named


def _search(arguments: argparse.Namespace) -> int:
    from mitigate import requirements, results
    from mitigate.report import page, tables
    from mitigate.search.loop import run_search

    wanted = config.load_search(arguments.config)
    changes = {"trials": arguments.trials, "workers": arguments.workers, "max_hours": arguments.max_hours, "max_updates": arguments.max_updates}
    changes |= {"require": arguments.require, "reproducible": arguments.reproducible or None}
    wanted = config.replace(wanted, **{name: value for name, value in changes.items() if value is not None})
    outcome = run_search(
        wanted,
        results=arguments.results,
        cache=arguments.cache,
        address=arguments.address,
        inline=arguments.inline,
        prepare=lambda: _prepare_base(wanted.trial.base, arguments.cache),
    )
    rows = results.read_rows(outcome.folder)
    results.write_tables(outcome.folder, rows)
    page.write_report(outcome.folder, rows, config.to_dict(wanted), _baselines(outcome.folder, config.to_dict(wanted), None))
    demands = [requirements.parse(text) for text in wanted.require]
    print(tables.front_text(requirements.meeting(rows, demands) if demands and outcome.ok else rows, rows, list(wanted.require)))
    print(outcome.message)
    print(f"report: {outcome.folder / 'report.html'}")
    if outcome.stopped == "interrupted":
        return 130
    return 0 if outcome.finished and outcome.ok else 1


def _status(arguments: argparse.Namespace) -> int:
    import dataclasses
    import json
    import time

    from mitigate.search import status

    study = _study(arguments)
    if arguments.watch is not None and arguments.watch <= 0:
        raise ConfigError(f"--watch must be above 0 seconds, got {arguments.watch:g}")
    while True:
        found = status.read_status(study)
        print(json.dumps(dataclasses.asdict(found)) if arguments.json else "\n".join(status.lines(found)), flush=True)
        if arguments.watch is None or not found.alive:
            return 0
        time.sleep(arguments.watch)


def _verify_study(arguments: argparse.Namespace) -> int:
    from mitigate.search.verify import verify_study

    found = verify_study(_study(arguments))
    for line in found.differences:
        print(line)
    summary = f"{found.proposals} proposals and {found.promotions} promotions derived again: "
    print(summary + (f"{len(found.differences)} differ" if found.differences else "all as recorded"))
    return 1 if found.differences else 0


def _rescore(arguments: argparse.Namespace) -> int:
    from mitigate import rescored
    from mitigate.files import write_atomic
    from mitigate.report import rescoring
    from mitigate.search.rescore import rescore

    study = _study(arguments)
    rescore(
        study,
        cache=arguments.cache,
        seeds=arguments.seeds,
        trials=arguments.trial,
        workers=arguments.workers,
        address=arguments.address,
        inline=arguments.inline,
        prepare=lambda wanted: _prepare_base(wanted.trial.base, arguments.cache),
    )
    found = rescored.read(study)
    write_atomic(study / rescored.FILE, rescored.csv_of(found))
    print(rescoring.text(found))
    print(f"table: {study / rescored.FILE}")
    return 0


def _prepare_base(base: config.BaseConfig, cache: Path) -> dict[str, bytes]:
    """Train the base unless it is there; its files by their path in the cache."""
    import torch

    from mitigate import bases

    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)  # nothing else runs yet
    found = bases.load(base, cache, log=print)
    torch.set_num_threads(threads)
    print(f"base: {'from the cache' if found.cached else 'trained'}, retrieves {found.accuracy:.3f} of fresh queries")
    return bases.files(base, cache)


def _trial(arguments: argparse.Namespace) -> int:
    wanted = config.load_trial(arguments.config)
    if arguments.variant is not None:
        wanted = config.replace(wanted, variant=config.load_variant(arguments.variant))
    if arguments.seed is not None:
        wanted = config.replace(wanted, seed=arguments.seed)
    if arguments.updates is not None:
        wanted = config.replace(wanted, train=config.replace(wanted.train, updates=arguments.updates))
    if arguments.threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {arguments.threads}")

    import torch

    from mitigate import registry
    from mitigate.trial import run_trial

    registry.check(wanted.variant, layers=wanted.base.layers)
    label = registry.describe(wanted.variant)
    identity = config.content_hash(wanted)
    out: Path = arguments.out or arguments.results / "trials" / f"{label.replace(' ', '_')}-{identity[:8]}"

    def run() -> Row:
        torch.set_num_threads(arguments.threads)
        return run_trial(wanted, label=label, out=out, cache=arguments.cache, log=print)

    return _show(out, identity, run)


def default_period(variant: config.VariantConfig) -> int:
    """The residues that a sweep without `--period` covers: ScoreConfig's, or the next multiple of the variant's stride."""
    return -(-config.ScoreConfig().period // variant.widest_stride) * variant.widest_stride


def fitting_filler(task: config.TaskConfig | config.WordsConfig, period: int) -> dict[str, int]:
    """The filler tokens of a task, or as many as a sweep over `period` residues takes where those are more."""
    steps = 3 * (period - 1)
    return {"filler": max(task.filler, steps), "filler_in_sequence": max(task.filler_in_sequence, steps + 3)}


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

    variant = config.load_variant(arguments.variant) if arguments.variant else config.VariantConfig(compress=False)
    if arguments.variant and arguments.period is None:
        sweep["period"] = default_period(variant)
    if arguments.bundle is not None or arguments.model in config.preset_names("bases"):
        return _score_tiny(arguments, variant, sweep, words)
    words |= fitting_filler(config.WordsConfig(), sweep.get("period", config.ScoreConfig().period))
    wanted = config.from_dict(
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

    return _show(arguments.out or arguments.results / "scores" / f"{_slug(label)}-{identity[:8]}", identity, run, weights)


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
        wanted = config.replace(trained, score=config.replace(trained.score, **sweep))
        label = f"bundle {arguments.bundle.name}"
    else:
        base = config.load_base(arguments.model)
        train, score = config.TrainConfig(updates=0), config.replace(config.ScoreConfig(), **sweep)
        task = base.task if score.period <= 8 else config.replace(base.task, **fitting_filler(config.TaskConfig(), score.period))
        parts: dict[str, config.Config] = {"variant": variant, "base": base, "task": task, "train": train, "score": score}
        wanted = config.from_dict(config.TrialConfig, {name: config.to_dict(part) for name, part in parts.items()})
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
    return _show(out, identity, run, None if arguments.bundle is None else weights)


def _finetune(arguments: argparse.Namespace) -> int:
    wanted = config.load_fine_tune(arguments.config, model=arguments.model)
    if arguments.minutes is not None:
        wanted = config.replace(wanted, train=config.replace(wanted.train, minutes=arguments.minutes))
    _set_threads(arguments.threads)

    from mitigate import before_after
    from mitigate.report import tuning

    with tuning.progress_bar(wanted.train.updates) as on_update:
        rows, summary = before_after.run(wanted, arguments.out, log=print, on_update=on_update)
    print(tuning.table(rows, summary))
    print(f"result: {arguments.out / 'row.json'}, figure: {arguments.out / 'phase_curves.png'}, bundle: {arguments.out / before_after.BUNDLE}")
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    for name, value, least in (("max-new-tokens", arguments.max_new_tokens, 1), ("temperature", arguments.temperature, 0), ("seed", arguments.seed, 0)):
        if not value >= least:
            raise ConfigError(f"--{name} must be at least {least}, got {value}")
    _set_threads(arguments.threads)
    variant = config.load_variant(arguments.variant) if arguments.variant else None

    import torch

    from mitigate import bases, generate
    from mitigate.export import pretrained
    from mitigate.surgery import attach

    described = None if arguments.bundle is None else pretrained.read(arguments.bundle)
    dtype = arguments.dtype or (described["base"]["dtype"] if described else "float32")
    base = bases.load_pretrained(arguments.model, revision=arguments.revision, dtype=dtype)
    torch.manual_seed(arguments.seed)
    if described is not None:
        pretrained.put_on(base, arguments.bundle, described)
    elif variant is not None:
        attach(base.model, variant)
    options = {"max_new_tokens": arguments.max_new_tokens, "temperature": arguments.temperature, "seed": arguments.seed}
    found = generate.generate(base.model, base.tokenizer, arguments.prompt, chat=arguments.chat, **options)
    print(found.text)
    print(generate.bytes_line(found))
    return 0


def _set_threads(threads: int | None) -> None:
    """ConfigError below one thread; torch's own number where none is given."""
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {threads}")
    if threads:
        import torch

        torch.set_num_threads(threads)


def _transition(arguments: argparse.Namespace) -> int:
    from mitigate import results
    from mitigate.tasks import transition as transition_task

    folder: Path = arguments.trial
    stored = next((folder / name for name in ("row.json", "result.json") if (folder / name).is_file()), None)
    if stored is None or not (folder / "model.safetensors").is_file() or (folder / "MANIFEST.json").exists():
        raise ConfigError(f"{folder} holds no trained trial (row.json or result.json, and model.safetensors)")
    trained = config.from_dict(config.TrialConfig, results.read_row(stored).config)
    variant = trained.variant
    reach = variant.local_window + (variant.window + variant.stride) * variant.coarse_factor if variant.compress else 0
    least_distance = transition_task.least_distance(trained.task)
    furthest = least_distance + 14 + reach if arguments.distance is None else arguments.distance
    bounds = {"distance": (furthest, least_distance), "prompts": (arguments.prompts, 1), "seed": (arguments.seed, 0), "threads": (arguments.threads, 1)}
    for name, (value, least) in bounds.items():
        if value < least:
            raise ConfigError(f"--{name} must be at least {least}, got {value}")

    import torch

    from mitigate import score
    from mitigate.files import write_atomic
    from mitigate.report import style, tables, transition
    from mitigate.trial import restore

    torch.set_num_threads(arguments.threads)
    distances = range(least_distance, furthest + 1)
    period = variant.widest_stride if variant.compress else 8
    found = score.run_transition(restore(trained, folder), trained.task, period=period, distances=distances, prompts=arguments.prompts, seed=arguments.seed)
    write_atomic(folder / "transition.json", found.model_dump_json(indent=1).encode())
    local = variant.local_window if variant.compress else None
    figure = transition.figure(found, local, title=results.read_row(stored).label)
    for suffix, content in (("png", style.png), ("svg", style.svg)):
        write_atomic(folder / f"transition.{suffix}", content(figure))
    print(tables.transition_text(found, local))
    print(f"result: {folder / 'transition.json'}, figure: {folder / 'transition.png'}")
    return 0


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _slug(label: str) -> str:
    return re.sub("[^A-Za-z0-9.-]+", "_", label)


def _show(out: Path, identity: str, run: Callable[[], Row], weights: Callable[[], str] | None = None) -> int:
    """The result in `out` if it is there, else that of `run`, written there with its phase curve; printed either way.

    Args:
        identity: content hash of the config that a result there must have; weights: gives the hash that its base must have, None where the config says it all.
    """
    from mitigate import results
    from mitigate.files import write_atomic
    from mitigate.report import figures, style, tables

    stored = out / "row.json"
    if stored.is_file():
        row = results.read_row(stored)
        if row.config_sha256 != identity:
            raise ConfigError(f"{out} holds the result of another config ({row.label}, {row.config_sha256[:8]}); choose another --out")
        if weights is not None and row.base_sha256 != weights():
            raise ConfigError(f"{out} holds the result of other weights of the same name ({(row.base_sha256 or '')[:8]}); choose another --out")
        print(f"{out} holds this result already")
    elif out.exists() and not {path.name for path in out.iterdir()} <= _TRIAL_FILES:
        raise ConfigError(f"{out} is not empty and holds no result; choose another --out")
    else:
        row = run()
        for suffix, content in (("png", style.png), ("svg", style.svg)):
            write_atomic(out / f"phase_curve.{suffix}", content(figures.phase_curve(row)))
        write_atomic(stored, row.to_json().encode())
    print(tables.phase_curve_text(row))
    print(tables.front_table([row]))
    print(f"result: {stored}" + (f", figure: {out / 'phase_curve.png'}" if (out / "phase_curve.png").is_file() else ""))
    return 0


def _front(arguments: argparse.Namespace) -> int:
    from mitigate import pareto, requirements, results
    from mitigate.report import data, tables

    study = _study(arguments)
    every = results.read_rows(study)
    wanted = [requirements.parse(text) for text in arguments.require]
    rows = requirements.meeting(every, wanted) if wanted and any(row.status == "ok" for row in every) else every
    key: Callable[[Row], Any] = data.by_cost
    if arguments.sort is not None and any(row.status == "ok" for row in every):
        column = requirements.column_of(arguments.sort, every, option="--sort")
        sign = 1 if column == "trial" or requirements.less_is_better(column) else -1

        def best_first(row: Row) -> tuple[bool, float]:
            value = requirements.value_of(row, column)
            return value is None, sign * (value or 0.0)

        key = best_first
    best = sorted(pareto.front(rows), key=key)
    if arguments.json:
        sys.stdout.write(results.front_json(rows, best, [str(one) for one in wanted]).decode())
    elif arguments.csv:
        sys.stdout.write(results.csv_of(best).decode())
    else:
        print(tables.front_text(rows, every, [str(one) for one in wanted], key))
    return 0


def _show_trial(arguments: argparse.Namespace) -> int:
    from mitigate import pareto, results
    from mitigate.report import gates, page, tables

    study = _study(arguments)
    row = results.trial_row(study, arguments.trial)
    if arguments.json:
        print(row.to_json())
        return 0
    rows = [row if other.trial == row.trial else other for other in results.read_rows(study)]
    command = page.export_command(study, arguments.trial) if row.status == "ok" and not pareto.is_full(row) else None
    print(tables.trial_text(row, rows, gates.of_trial(study, row), command))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    import json

    from mitigate import results
    from mitigate.report import comparison

    study = _study(arguments)
    found = comparison.compare(study, *(results.trial_row(study, number) for number in (arguments.a, arguments.b)))
    print(json.dumps(comparison.plain(found), indent=1, allow_nan=False) if arguments.json else comparison.text(found))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from mitigate import results
    from mitigate.report import page

    study = _study(arguments)
    rows = results.read_rows(study)
    given = None if arguments.baseline is None else [path if results.is_study(path) else arguments.results / path for path in arguments.baseline]
    settings = results.read_config(study)
    written = results.write_tables(study, rows) + page.write_report(study, rows, settings, _baselines(study, settings, given))
    print("\n".join(str(path) for path in written))
    return 0


def _baselines(study: Path, settings: dict[str, Any], given: list[Path] | None) -> list[Any]:
    """The random searches to draw beside a study: those given, else those beside it of the same config, as far as they can be read."""
    from mitigate import results
    from mitigate.report.progress import progress

    found = []
    for path in results.random_siblings(study, settings) if given is None else given:
        try:
            found.append(progress(results.read_rows(path), results.read_config(path), path.absolute().name))
        except ConfigError:
            if given is not None:
                raise
    return found


def _export(arguments: argparse.Namespace) -> int:
    from mitigate.export import bundle, targets

    if arguments.require and arguments.best is None:
        raise ConfigError("export: --require goes with --best")
    study = _study(arguments)
    trial = arguments.trial if arguments.trial is not None else _chosen(study, arguments)
    if arguments.target is None:
        print(f"bundle: {bundle.write(study, trial, arguments.to)}")
        return 0
    print("\n".join(targets.write(arguments.target, study, trial, arguments.to)))
    return 0


def _chosen(study: Path, arguments: argparse.Namespace) -> int:
    """The trial that --knee or --best means; says which, and why."""
    from mitigate import pareto, requirements, results

    rows = results.read_rows(study)
    if arguments.knee is not None:
        found = pareto.knees(rows)
        if not 1 <= arguments.knee <= len(found):
            raise ConfigError(f"--knee must be between 1 and {len(found)}, got {arguments.knee}" if found else f"{study} has no compressed trial on its front")
        row, reason = found[arguments.knee - 1].row, found[arguments.knee - 1].reason
    else:
        compressed = [row for row in rows if not pareto.is_full(row)]
        row = requirements.best(compressed, arguments.best, [requirements.parse(text) for text in arguments.require])
        column = requirements.column_of(arguments.best, compressed)
        reason = f"{column} is {requirements.value_of(row, column):.4g}"
    if row.trial is None:
        raise ConfigError(f"{row.label} has no trial number")
    print(f"trial {row.trial}, {row.label}: {reason}")
    return row.trial


def _verify(arguments: argparse.Namespace) -> int:
    from mitigate.export import verify

    if arguments.against is not None:
        verify.verify_port(arguments.bundle, arguments.against, log=print)
    else:
        verify.verify(arguments.bundle, trust_code=arguments.trust_code, log=print)
    return 0


def _variants(arguments: argparse.Namespace) -> int:
    from mitigate import registry

    strategies, presets = registry.strategies(), registry.presets()
    width = max(len(name) for name in [s.name for s in strategies] + [p.name for p in presets]) + 2
    axis = ""
    print("Strategies, by axis of a variant:")
    for strategy in strategies:
        if strategy.axis != axis:
            axis = strategy.axis
            print(f"  {axis}")
        print(f"    {strategy.name:{width}}{strategy.summary} [{strategy.source}]")
    print("\nPresets (--variant NAME, anchors):")
    for preset in presets:
        print(f"    {preset.name:{width}}{preset.summary} [{preset.source}]")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from mitigate import doctor

    return doctor.run()


def _paper(arguments: argparse.Namespace) -> int:
    from mitigate import paper

    rows = paper.paper_table()
    print(paper.format_paper_table(rows))
    return 0 if all(row.agrees for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
