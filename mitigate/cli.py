"""The command line. Bad input gives one line on stderr and exit code 2, and changes nothing."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mitigate import __version__, config
from mitigate.config import ConfigError, WorkFailed

Command = Callable[[argparse.Namespace], int]
_TRIAL_FILES = {"model.safetensors", "compressor.safetensors", "phase_curve.png", "phase_curve.svg"}  # what a trial that was cut short may leave


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
    search.add_argument("--address", help="a running Ray cluster to join (host:port or 'auto'); default: Ray on this machine")
    search.add_argument("--inline", action="store_true", help="run trials one by one in this process, without Ray")
    _results(search)
    _cache(search)

    trial = _add(commands, "trial", _trial, "run one trial and draw its phase curve")
    trial.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of a trial or of a search (its trial template)")
    trial.add_argument("--variant", metavar="NAME", help="a preset, see `mitigate variants`")
    trial.add_argument("--seed", type=int, help="seed of the fine-tune, instead of the config's")
    trial.add_argument("--updates", type=int, help="updates of the fine-tune, instead of the config's")
    trial.add_argument("--out", type=Path, metavar="DIR", help="folder of the result; default: results/trials/<label>-<hash>")
    trial.add_argument("--threads", type=int, default=1, help="torch threads (default 1: the reference budget is one core)")
    _results(trial)
    _cache(trial)

    front = _add(commands, "front", _front, "print the Pareto front of a study")
    _named_study(front)

    report = _add(commands, "report", _report, "write tables, figures and report.html of a study again")
    _named_study(report)

    export = _add(commands, "export", _export, "write a trial's compressor as a bundle: config as JSON, weights as safetensors")
    _named_study(export)
    export.add_argument("--trial", type=int, required=True, metavar="N", help="trial number")
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")

    verify = _add(commands, "verify", _verify, "check a bundle: every file against its manifest, its logits against the golden ones")
    verify.add_argument("bundle", type=Path, metavar="DIR")

    _add(commands, "variants", _variants, "list strategies and presets")
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
    from mitigate import results
    from mitigate.report import page, tables
    from mitigate.search.loop import run_search

    wanted = config.load_search(arguments.config)
    changes = {"trials": arguments.trials, "workers": arguments.workers, "max_hours": arguments.max_hours}
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
    page.write_report(outcome.folder, rows, config.to_dict(wanted))
    print(tables.front_table(rows))
    print(outcome.message)
    print(f"report: {outcome.folder / 'report.html'}")
    if outcome.stopped == "interrupted":
        return 130
    return 0 if outcome.finished and outcome.ok else 1


def _prepare_base(base: config.BaseConfig, cache: Path) -> None:
    import torch

    from mitigate import bases

    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)  # nothing else runs yet
    found = bases.load(base, cache, log=print)
    torch.set_num_threads(threads)
    print(f"base: {'from the cache' if found.cached else 'trained'}, retrieves {found.accuracy:.3f} of fresh queries")


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
    from mitigate.files import write_atomic
    from mitigate.report import figures, style, tables
    from mitigate.rows import Row
    from mitigate.trial import run_trial

    registry.check(wanted.variant, layers=wanted.base.layers)
    label = registry.describe(wanted.variant)
    identity = config.content_hash(wanted)
    out: Path = arguments.out or arguments.results / "trials" / f"{label.replace(' ', '_')}-{identity[:8]}"
    stored = out / "row.json"
    if stored.is_file():
        row = Row.from_json(stored.read_text(encoding="utf-8"))
        if row.config_sha256 != identity:
            raise ConfigError(f"{out} holds the result of another config ({row.label}, {row.config_sha256[:8]}); choose another --out")
        print(f"{out} holds this trial's result already")
    elif out.exists() and not {path.name for path in out.iterdir()} <= _TRIAL_FILES:
        raise ConfigError(f"{out} is not empty and holds no trial; choose another --out")
    else:
        torch.set_num_threads(arguments.threads)
        row = run_trial(wanted, label=label, out=out, cache=arguments.cache, log=print)
        for suffix, content in (("png", style.png), ("svg", style.svg)):
            write_atomic(out / f"phase_curve.{suffix}", content(figures.phase_curve(row)))
        write_atomic(stored, row.to_json().encode())
    print(tables.phase_curve_text(row))
    print(tables.front_table([row]))
    print(f"result: {stored}, figure: {out / 'phase_curve.png'}")
    return 0


def _front(arguments: argparse.Namespace) -> int:
    from mitigate import results
    from mitigate.report import tables

    study = _study(arguments)
    print(tables.front_table(results.read_rows(study)))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from mitigate import results
    from mitigate.report import page

    study = _study(arguments)
    rows = results.read_rows(study)
    written = results.write_tables(study, rows) + page.write_report(study, rows, results.read_config(study))
    print("\n".join(str(path) for path in written))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from mitigate.export import bundle

    print(f"bundle: {bundle.write(_study(arguments), arguments.trial, arguments.to)}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from mitigate.export import bundle

    difference = bundle.largest_difference(arguments.bundle, bundle.load(arguments.bundle))
    if difference > bundle.TOLERANCE:
        print(f"mitigate: {arguments.bundle}: the golden logits are missed by up to {difference:.2g} (tolerance {bundle.TOLERANCE})", file=sys.stderr)
        return 1
    found = "bit for bit" if difference == 0 else f"to {difference:.2g}, which is rounding on another processor"
    print(f"{arguments.bundle}: every file as in the manifest, golden logits reproduced {found}")
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


def _paper(arguments: argparse.Namespace) -> int:
    from mitigate import paper

    rows = paper.paper_table()
    print(paper.format_paper_table(rows))
    return 0 if all(row.agrees for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
