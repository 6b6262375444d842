"""The front on fresh seeds: chosen trials are fine-tuned again under other seeds and swept with other prompts, so that luck in the choice shows.

The results lie in `rescored/NNNN-sK/` of the study folder; those that are there are not run again, so a call that was cut short goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from mitigate import pareto, requirements, results
from mitigate.config import ConfigError, TrialConfig, canonical_json
from mitigate.config_files import from_dict, replace
from mitigate.config_search import SearchConfig
from mitigate.rows import Row
from mitigate.search.loop import RUN_TRIAL
from mitigate.search.study import lock_folder
from mitigate.search.workers import Executor, InlineExecutor, RayExecutor, Task, read_result
from mitigate.stage import Stage

FRESH = 1000  # added to the seeds of the search, with 1, 2, … for each repeat
POLL_S = 1.0


def rescore(
    folder: Path,
    *,
    cache: Path,
    seeds: int = 3,
    trials: Sequence[int] | None = None,
    workers: int | None = None,
    address: str | None = None,
    inline: bool = False,
    run: str = RUN_TRIAL,
    prepare: Callable[[SearchConfig], Mapping[str, bytes] | None] | None = None,
    console: Console | None = None,
) -> list[int]:
    """Fine-tune and score trials of a study again, each under `seeds` fresh seeds.

    Args:
        trials: their numbers; None for the compressed trials of the front that meet the study's requirements.
        workers: trials at once; the study's if None.
        address, inline, run: as for `run_search`.
        prepare: called with the study's config before the first trial.

    Returns:
        The numbers of the trials.

    Raises:
        ConfigError: no study, no such trial, none to re-score, fewer than one worker, or a search runs in the folder.
        ExecutorError: trials cannot be run.
    """
    if seeds < 1:
        raise ConfigError(f"rescore: --seeds must be at least 1, got {seeds}")
    config = from_dict(SearchConfig, results.read_config(folder))
    if workers is not None:
        config = replace(config, workers=workers)
    chosen = _chosen(folder, config, trials)
    console = console or Console()
    with lock_folder(folder):
        left = [task for row in chosen for task in _tasks(folder, row, seeds, config, cache, run) if read_result(Path(task.folder)) is None]
        if left:
            carried = (prepare(config) if prepare else None) or {}
            made = InlineExecutor() if inline else RayExecutor(config.workers, address, resources=config.resources, carried=carried if address else None)
            with contextlib.closing(made) as executor:
                _run(executor, left, console)
    return [row.trial for row in chosen if row.trial is not None]


def _chosen(folder: Path, config: SearchConfig, trials: Sequence[int] | None) -> list[Row]:
    rows = results.read_rows(folder)
    if trials is not None:
        found = [results.trial_row(folder, number) for number in dict.fromkeys(trials)]
        for row in found:
            if row.status != "ok":
                raise ConfigError(f"rescore: trial {row.trial} is {row.status}; only finished trials can be re-scored")
        return found
    wanted = [requirements.parse(text) for text in config.require]
    meeting = [row for row in rows if row.status == "ok" and all(requirements.violation(row, one) <= 0 for one in wanted)]
    best = [row for row in pareto.front(meeting) if not pareto.is_full(row)]
    if not best:
        raise ConfigError(f"{folder} has no compressed trial on its front to re-score")
    return best


def _tasks(folder: Path, row: Row, seeds: int, config: SearchConfig, cache: Path, run: str) -> list[Task]:
    assert row.trial is not None
    trained = from_dict(TrialConfig, row.config)
    tasks = []
    for repeat in range(1, seeds + 1):
        fresh = dataclasses.replace(
            trained, seed=trained.seed + FRESH + repeat, score=dataclasses.replace(trained.score, seed=trained.score.seed + FRESH + repeat)
        )
        task = Task(
            number=row.trial,
            config_json=canonical_json(fresh),
            label=row.label,
            anchor=row.anchor,
            folder=str((folder / "rescored" / f"{row.trial:04d}-s{repeat}").resolve()),
            cache=str(cache.resolve()),
            run=run,
            timeout_s=config.trial_timeout_s,
            stage=Stage(device="cuda" if config.resources.gpus else "cpu"),
            last=True,
            resources=config.resources,
        )
        tasks.append(task)
    return tasks


def _run(executor: Executor, tasks: list[Task], console: Console) -> None:
    waiting, done, count = list(reversed(tasks)), 0, len(tasks)
    while waiting or executor.in_flight:
        while waiting and executor.room > 0:
            executor.submit(waiting.pop())
        for ended in executor.poll(POLL_S):
            done += 1
            row = ended.row
            (Path(ended.task.folder) / "checkpoint.pt").unlink(missing_ok=True)
            said = f"{row.error.kind}: {row.error.message}" if row.error else f"mean {row.mean_accuracy:.3f}, A_min {row.a_min:.3f}"
            console.print(f"trial {row.trial} {row.label}, seed {row.seed}: {said} | {done}/{count}", markup=False, highlight=False, soft_wrap=True)
