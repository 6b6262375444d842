"""Commands that run a search and look after it: search, status, verify-study, rescore."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mitigate import config, config_files
from mitigate.cli.shared import add_cache, add_command, add_results, add_study, baselines, study_folder
from mitigate.config import ConfigError

LONGEST_WATCH_S = 86_400  # a day between two looks


def add_search(commands: Any) -> None:
    parser = add_command(commands, "search", _search, "run or resume a search; ends in a front table, figures and an HTML report")
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, see configs/quickstart.toml")
    parser.add_argument("--trials", type=int, help="total number of trials, instead of the config's")
    parser.add_argument("--workers", type=int, help="trials at once, instead of the config's")
    parser.add_argument("--max-hours", type=float, help="stop proposing after this many hours")
    parser.add_argument("--max-updates", type=int, help="stop proposing after so many fine-tuning updates of all trials together")
    parser.add_argument("--require", action="append", metavar="TEXT", help='such as "kv_kept <= 0.15"; again for another; instead of the config\'s')
    parser.add_argument("--reproducible", action="store_true", help="the same proposals whatever the workers' timing; some of them may wait")
    parser.add_argument("--address", help="a running Ray cluster to join (host:port or 'auto'); default: Ray on this machine")
    parser.add_argument("--inline", action="store_true", help="run trials one by one in this process, without Ray")
    add_results(parser)
    add_cache(parser)


def _search(arguments: argparse.Namespace) -> int:
    from mitigate import requirements, results
    from mitigate.report import page, tables
    from mitigate.search.loop import run_search

    wanted = config_files.load_search(arguments.config)
    changes = {"trials": arguments.trials, "workers": arguments.workers, "max_hours": arguments.max_hours, "max_updates": arguments.max_updates}
    changes |= {"require": arguments.require, "reproducible": arguments.reproducible or None}
    wanted = config_files.replace(wanted, **{name: value for name, value in changes.items() if value is not None})
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
    page.write_report(outcome.folder, rows, config.to_dict(wanted), baselines(outcome.folder, config.to_dict(wanted), None))
    demands = [requirements.parse(text) for text in wanted.require]
    print(tables.front_text(requirements.meeting(rows, demands) if demands and outcome.ok else rows, rows, list(wanted.require)))
    print(outcome.message)
    print(f"report: {outcome.folder / 'report.html'}")
    if outcome.stopped == "interrupted":
        return 130
    return 0 if outcome.finished and outcome.ok else 1


def add_status(commands: Any) -> None:
    parser = add_command(commands, "status", _status, "how a study stands, beside a running search or after it")
    add_study(parser)
    parser.add_argument("--watch", type=float, nargs="?", const=5.0, metavar="SECONDS", help="again every so many seconds (default 5) until it ends")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _status(arguments: argparse.Namespace) -> int:
    import dataclasses
    import json
    import time

    from mitigate.search import status

    study = study_folder(arguments)
    if arguments.watch is not None and not 0 < arguments.watch <= LONGEST_WATCH_S:
        raise ConfigError(f"--watch must be above 0 and at most {LONGEST_WATCH_S} seconds, got {arguments.watch:g}")
    while True:
        found = status.read_status(study)
        print(json.dumps(dataclasses.asdict(found)) if arguments.json else "\n".join(status.lines(found)), flush=True)
        if arguments.watch is None or not found.alive:
            return 0
        time.sleep(arguments.watch)


def add_verify_study(commands: Any) -> None:
    parser = add_command(commands, "verify-study", _verify_study, "derive every proposal and promotion of a study again from its record")
    add_study(parser)


def _verify_study(arguments: argparse.Namespace) -> int:
    from mitigate.search.verify import verify_study

    found = verify_study(study_folder(arguments))
    for line in found.differences:
        print(line)
    summary = f"{found.proposals} proposals and {found.promotions} promotions derived again: "
    print(summary + (f"differences in {len(found.differences)} places" if found.differences else "all as recorded"))
    return 1 if found.differences else 0


def add_rescore(commands: Any) -> None:
    parser = add_command(commands, "rescore", _rescore, "train and score the front, or trials, of a study again on fresh seeds and prompts")
    add_study(parser)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="fresh seeds for each trial (default 3)")
    parser.add_argument("--trial", type=int, action="append", metavar="N", help="this trial, again for another (default: the compressed trials of the front)")
    parser.add_argument("--workers", type=int, help="trials at once, instead of the study's")
    parser.add_argument("--address", help="a running Ray cluster to join; default: Ray on this machine")
    parser.add_argument("--inline", action="store_true", help="one by one in this process, without Ray")
    add_cache(parser)


def _rescore(arguments: argparse.Namespace) -> int:
    from mitigate import rescored, results
    from mitigate.files import write_atomic
    from mitigate.report import rescoring
    from mitigate.search.rescore import rescore

    study = study_folder(arguments)
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
    results.require_rows(study / rescored.FILE, len(found))
    write_atomic(study / rescored.FILE, rescored.csv_of(found))
    print(rescoring.text(found))
    print(f"table: {study / rescored.FILE}")
    return 0


def _prepare_base(base: config.BaseConfig, cache: Path) -> dict[str, bytes]:
    """Train the base unless it is there; its files by their path in the cache."""
    import torch

    from mitigate import bases, cores

    threads = torch.get_num_threads()
    torch.set_num_threads(cores.wanted_threads())  # nothing else runs yet
    found = bases.load(base, cache, log=print)
    torch.set_num_threads(threads)
    print(f"base: {'from the cache' if found.cached else 'trained'}, retrieves {found.accuracy:.3f} of fresh queries")
    return bases.files(base, cache)
