"""The program: its parser, which lists the commands in the order of `mitigate --help`, and `main` with the exit codes."""

from __future__ import annotations

import argparse
import io
import os
import sys

from mitigate import __version__
from mitigate.cli import bundles, installation, pretrained, results, scores, searches, trials
from mitigate.cli.shared import Command
from mitigate.config import ConfigError, WorkFailed

_COMMANDS = (
    searches.add_search,
    searches.add_status,
    searches.add_verify_study,
    searches.add_rescore,
    trials.add_trial,
    scores.add_score,
    pretrained.add_finetune,
    pretrained.add_generate,
    trials.add_transition,
    results.add_front,
    results.add_show,
    results.add_compare,
    results.add_report,
    bundles.add_export,
    bundles.add_verify,
    installation.add_variants,
    installation.add_doctor,
    results.add_paper,
)  # in the order of `mitigate --help`


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
    for add in _COMMANDS:
        add(commands)
    return parser
