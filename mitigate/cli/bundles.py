"""Commands that take a compressor elsewhere: export writes a bundle or code, verify checks a bundle."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mitigate.cli.shared import add_command, add_study, study_folder
from mitigate.config import ConfigError


def add_export(commands: Any) -> None:
    parser = add_command(commands, "export", _export, "write a trial's compressor as a bundle with golden vectors, or for another codebase")
    add_study(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--trial", type=int, metavar="N", help="trial number")
    which.add_argument("--knee", type=int, nargs="?", const=1, metavar="K", help="the K-th candidate from the front, as the report lists them (default 1)")
    which.add_argument("--best", metavar="COLUMN", help="the trial with the best value in a column of the tables, such as a_min")
    parser.add_argument("--require", action="append", default=[], metavar="TEST", help='with --best: only trials that meet it, such as "kv_kept <= 0.15"')
    parser.add_argument("--target", choices=("transformers", "deepseek-v4", "vllm"), help="write for another codebase, instead of a bundle")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")


def _export(arguments: argparse.Namespace) -> int:
    from mitigate.export import bundle, targets

    if arguments.require and arguments.best is None:
        raise ConfigError("export: --require goes with --best")
    study = study_folder(arguments)
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


def add_verify(commands: Any) -> None:
    parser = add_command(
        commands, "verify", _verify, "check a bundle: its files, its golden vectors with our code and with its reference.py, or another codebase's outputs"
    )
    parser.add_argument("bundle", type=Path, metavar="DIR")
    parser.add_argument("--against", type=Path, metavar="OUTPUTS", help="folder with another codebase's L0.safetensors, L1.safetensors, …")
    parser.add_argument("--trust-code", action="store_true", help="run the bundle's reference.py although it is not the text that this version writes")


def _verify(arguments: argparse.Namespace) -> int:
    from mitigate.export import verify

    if arguments.against is not None:
        verify.verify_port(arguments.bundle, arguments.against, log=print)
    else:
        verify.verify(arguments.bundle, trust_code=arguments.trust_code, log=print)
    return 0
