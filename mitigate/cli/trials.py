"""Commands of a single trial: trial runs one, transition measures a trained one over distances."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mitigate import config, config_files
from mitigate.cli.shared import add_cache, add_command, add_results, show_result
from mitigate.config import ConfigError

if TYPE_CHECKING:
    from mitigate.rows import Row


def add_trial(commands: Any) -> None:
    parser = add_command(commands, "trial", _trial, "run one trial and draw its phase curve")
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of a trial or of a search (its trial template)")
    parser.add_argument("--variant", metavar="NAME", help="a preset, see `mitigate variants`")
    parser.add_argument("--seed", type=int, help="seed of the fine-tune, instead of the config's")
    parser.add_argument("--updates", type=int, help="updates of the fine-tune, instead of the config's")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the result; default: results/trials/<label>-<hash>")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1: the reference budget is one core)")
    add_results(parser)
    add_cache(parser)


def _trial(arguments: argparse.Namespace) -> int:
    wanted = config_files.load_trial(arguments.config)
    if arguments.variant is not None:
        wanted = config_files.replace(wanted, variant=config_files.load_variant(arguments.variant))
    if arguments.seed is not None:
        wanted = config_files.replace(wanted, seed=arguments.seed)
    if arguments.updates is not None:
        wanted = config_files.replace(wanted, train=config_files.replace(wanted.train, updates=arguments.updates))
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

    return show_result(out, identity, run)


def add_transition(commands: Any) -> None:
    parser = add_command(commands, "transition", _transition, "accuracy against the distance from fact to query, at every phase, of a trained trial")
    parser.add_argument("trial", type=Path, metavar="DIR", help="folder of a finished trial: results/trials/NAME, or results/STUDY/trials/NNNN")
    parser.add_argument("--distance", type=int, metavar="N", help="largest distance, tokens (default: local window + W + S + 16)")
    parser.add_argument("--prompts", type=int, default=32, help="logical prompts behind each cell (default 32)")
    parser.add_argument("--seed", type=int, default=2, help="of the prompts (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")


def _transition(arguments: argparse.Namespace) -> int:
    from mitigate import results
    from mitigate.tasks import transition as transition_task

    folder: Path = arguments.trial
    stored = next((folder / name for name in ("row.json", "result.json") if (folder / name).is_file()), None)
    if stored is None or not (folder / "model.safetensors").is_file() or (folder / "MANIFEST.json").exists():
        raise ConfigError(f"{folder} holds no trained trial (row.json or result.json, and model.safetensors)")
    trained = config_files.from_dict(config.TrialConfig, results.read_row(stored).config)
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
