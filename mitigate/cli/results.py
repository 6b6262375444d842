"""Commands that show results: front, show, compare and report those of a study, paper the published ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mitigate.cli.shared import add_command, add_study, baselines, study_folder

if TYPE_CHECKING:
    from mitigate.rows import Row


def add_front(commands: Any) -> None:
    parser = add_command(commands, "front", _front, "print the Pareto front of a study, or of its trials that meet requirements")
    add_study(parser)
    parser.add_argument("--require", action="append", default=[], metavar="TEXT", help='such as "kv_kept <= 0.15"; give it again for another, all must hold')
    parser.add_argument("--sort", metavar="COLUMN", help="best first by a column of results/README.md, such as a_min (default: fewest KV bytes)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON, rows whole, in the form of front.json")
    form.add_argument("--csv", action="store_true", help="as CSV, in the form of front.csv")


def _front(arguments: argparse.Namespace) -> int:
    from mitigate import pareto, requirements, results
    from mitigate.report import data, tables

    study = study_folder(arguments)
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


def add_show(commands: Any) -> None:
    parser = add_command(commands, "show", _show_trial, "one trial of a study: config, standing, phase curve, gates, how to export it")
    add_study(parser)
    parser.add_argument("trial", type=int, metavar="TRIAL", help="trial number")
    parser.add_argument("--json", action="store_true", help="the whole Row as JSON")


def _show_trial(arguments: argparse.Namespace) -> int:
    from mitigate import pareto, results
    from mitigate.report import gates, page, tables

    study = study_folder(arguments)
    row = results.trial_row(study, arguments.trial)
    if arguments.json:
        print(row.to_json())
        return 0
    rows = [row if other.trial == row.trial else other for other in results.read_rows(study)]
    command = page.export_command(study, arguments.trial) if row.status == "ok" and not pareto.is_full(row) else None
    print(tables.trial_text(row, rows, gates.of_trial(study, row), command))
    return 0


def add_compare(commands: Any) -> None:
    parser = add_command(commands, "compare", _compare, "two trials of a study on the same prompts: paired differences with intervals")
    add_study(parser)
    parser.add_argument("a", type=int, metavar="A", help="trial number")
    parser.add_argument("b", type=int, metavar="B", help="trial number; differences are A minus B")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _compare(arguments: argparse.Namespace) -> int:
    import json

    from mitigate import results
    from mitigate.report import comparison

    study = study_folder(arguments)
    found = comparison.compare(study, *(results.trial_row(study, number) for number in (arguments.a, arguments.b)))
    print(json.dumps(comparison.plain(found), indent=1, allow_nan=False) if arguments.json else comparison.text(found))
    return 0


def add_report(commands: Any) -> None:
    parser = add_command(commands, "report", _report, "write tables, figures and report.html of a study again")
    add_study(parser)
    parser.add_argument(
        "--baseline", type=Path, action="append", metavar="STUDY", help="a random search to draw beside this one (default: those beside it of the same config)"
    )


def _report(arguments: argparse.Namespace) -> int:
    from mitigate import results
    from mitigate.report import page

    study = study_folder(arguments)
    rows = results.read_rows(study)
    given = None if arguments.baseline is None else [path if results.is_study(path) else arguments.results / path for path in arguments.baseline]
    settings = results.read_config(study)
    written = results.write_tables(study, rows) + page.write_report(study, rows, settings, baselines(study, settings, given))
    print("\n".join(str(path) for path in written))
    return 0


def add_paper(commands: Any) -> None:
    add_command(commands, "paper", _paper, "the paper's published figures beside ours recomputed, with the period found in each run")


def _paper(arguments: argparse.Namespace) -> int:
    from mitigate import paper

    rows = paper.paper_table()
    print(paper.format_paper_table(rows))
    return 0 if all(row.agrees for row in rows) else 1
