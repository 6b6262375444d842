"""What the commands share: how one is declared, arguments that several have, and what several look up or print."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mitigate.config import ConfigError

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


def add_command(commands: Any, name: str, command: Command, summary: str) -> argparse.ArgumentParser:
    """Declare a command among `commands` (of `add_subparsers`); its arguments are added to what is returned."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    parser.set_defaults(command=command)
    return parser


def add_results(parser: argparse.ArgumentParser) -> None:
    """The option --results."""
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR", help="where studies lie (default: results)")


def add_study(parser: argparse.ArgumentParser) -> None:
    """The argument STUDY with the option --results, which `study_folder` reads."""
    parser.add_argument("study", type=Path, metavar="STUDY", help="study folder, or its name under the results folder")
    add_results(parser)


def add_cache(parser: argparse.ArgumentParser) -> None:
    """The option --cache."""
    parser.add_argument("--cache", type=Path, default=Path("cache"), metavar="DIR", help="where trained bases lie (default: cache)")


def study_folder(arguments: argparse.Namespace) -> Path:
    """A study folder as given, or by its name under the results folder."""
    named: Path = arguments.study
    return named if (named / "config.json").is_file() else arguments.results / named


def check_out(out: Path) -> None:
    """ConfigError where a folder of results would lie on or below a file."""
    there = next(path for path in (out, *out.parents) if path.exists())
    if not there.is_dir():
        below = "" if there == out else f", and {out} would lie in it"
        raise ConfigError(f"{there} is no folder{below}; choose another --out")


def show_result(out: Path, identity: str, run: Callable[[], Row], weights: Callable[[], str] | None = None) -> int:
    """The result in `out` if it is there, else that of `run`, written there with its phase curve; printed either way.

    Args:
        identity: content hash of the config that a result there must have; weights: gives the hash that its base must have, None where the config says it all.
    """
    from mitigate import results
    from mitigate.files import write_atomic
    from mitigate.report import figures, style, tables

    check_out(out)
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


def baselines(study: Path, settings: dict[str, Any], given: list[Path] | None) -> list[Any]:
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
