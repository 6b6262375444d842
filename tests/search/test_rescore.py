"""Re-scoring on fresh seeds: what is chosen, what is run, and what the numbers say."""

from __future__ import annotations

import io
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_trials
import pytest
from filelock import FileLock
from rich.console import Console

from mitigate import cli, pareto, rescored, results
from mitigate.cli import searches
from mitigate.config import ConfigError, TrialConfig, VariantConfig
from mitigate.config_files import from_dict
from mitigate.config_search import SearchConfig
from mitigate.files import write_atomic
from mitigate.rows import Row
from mitigate.search import rescore as module
from mitigate.search.loop import run_search
from mitigate.search.rescore import rescore
from mitigate.search.workers import ExecutorError, InlineExecutor, read_result

Make = Callable[..., SearchConfig]
WIDE = {"stride": [1, 2, 3, 4, 6, 8, 12], "overlap": ["1", "3/2", "2"], "gate": ["scalar", "vector"], "local_window": list(range(1, 30))}
RUNGS: dict[str, Any] = {"space": WIDE, "rungs": {"updates": [20, 60], "eta": 3, "bracket": 4}, "trial": {"train": {"updates": 180}}}


def studied(config: SearchConfig, folder: Path, run: str = "staged") -> Path:
    return run_search(config, results=folder, cache=folder / "cache", inline=True, run=f"fake_trials:{run}", console=Console(quiet=True)).folder


def again(folder: Path, **options: Any) -> tuple[list[int], str]:
    text = io.StringIO()
    settings = {"cache": folder / "cache", "inline": True, "run": "fake_trials:staged", "console": Console(file=text, width=80)} | options
    return rescore(folder, **settings), text.getvalue()


def executions(folder: Path) -> Counter[str]:
    return Counter((folder / "executions.log").read_text().splitlines())


@pytest.fixture(scope="module")
def once() -> dict[str, Path]:
    return {}


@pytest.fixture
def study(make_config: Make, tmp_path: Path, once: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a finished study, made once."""
    if "study" not in once:
        config = make_config(trials=10, max_consecutive_failures=99, **RUNGS)
        once["study"] = studied(config, tmp_path_factory.mktemp("once"), "staged_vector_fails")
    return shutil.copytree(once["study"], tmp_path / "study")


def test_the_compressed_trials_of_the_front_are_run_whole_on_seeds_of_their_own(study: Path) -> None:
    before = executions(study)
    journal = (study / "study.journal").read_bytes()
    numbers, text = again(study, seeds=2)
    rows = results.read_rows(study)
    expected = [row.trial for row in pareto.front(rows) if row.label != "full"]
    assert numbers == expected and expected and 0 not in numbers
    folders = sorted(path.name for path in (study / "rescored").iterdir())
    assert folders == sorted(f"{number:04d}-s{repeat}" for number in numbers for repeat in (1, 2))
    fresh = [(path.parent.name, results.read_row(path)) for path in sorted((study / "rescored").glob("*/result.json"))]
    assert {executions(study)[f"{n} score 0"] - before[f"{n} score 0"] for n in numbers} == {2}
    for name, row in fresh:
        trained, selected = from_dict(TrialConfig, row.config), from_dict(TrialConfig, results.trial_row(study, int(name[:4])).config)
        assert (row.status, row.cost, row.updates, row.rung) == ("ok", None, 180, None)
        assert trained.variant == selected.variant and trained.train == selected.train
        assert (trained.seed, trained.score.seed) not in [(selected.seed, selected.score.seed)]
        assert trained.seed != selected.seed and trained.score.seed != selected.score.seed
    assert all(len({row.seed for name, row in fresh if name.startswith(f"{n:04d}")}) == 2 for n in numbers), "each repeat has its own"
    assert text.count("\n") == len(fresh) and f"| {len(fresh)}/{len(fresh)}" in text
    assert (study / "study.journal").read_bytes() == journal, "the search does not know of it"
    assert results.read_rows(study) == rows
    assert not list(study.glob("rescored/*/checkpoint.pt"))


def test_what_is_there_is_not_run_again_and_more_seeds_add(study: Path) -> None:
    again(study, seeds=1)
    before = executions(study)
    numbers, text = again(study, seeds=1, prepare=lambda config: pytest.fail("nothing to prepare for"))
    assert (executions(study), text) == (before, "")
    again(study, seeds=3)
    assert sum((executions(study) - before).values()) == 2 * len(numbers)


def test_a_call_that_was_cut_short_goes_on(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = InlineExecutor.poll
    count = 0

    def poll(self: InlineExecutor, timeout_s: float) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return whole(self, timeout_s)

    before = executions(study)
    with monkeypatch.context() as patch:
        patch.setattr(InlineExecutor, "poll", poll)
        with pytest.raises(KeyboardInterrupt):
            again(study, seeds=2)
    assert len(list(study.glob("rescored/*/result.json"))) == 2
    numbers, text = again(study, seeds=2)
    assert sum((executions(study) - before).values()) == 2 * len(numbers) and text.count("\n") == 2 * len(numbers) - 2


def test_trials_by_name_are_run_once_each(study: Path) -> None:
    assert again(study, seeds=1, trials=[0, 1, 0])[0] == [0, 1]
    assert sorted(path.name for path in (study / "rescored").iterdir()) == ["0000-s1", "0001-s1"]


@pytest.mark.parametrize("what", ["stopped", "infeasible", "absent", "seeds", "workers", "busy", "no study"])
def test_what_cannot_be_re_scored_is_refused_in_a_line_and_leaves_nothing(study: Path, what: str) -> None:
    rows = results.read_rows(study)
    number = next((row.trial for row in rows if row.status == what), 99)
    said = {
        "stopped": f"rescore: trial {number} is stopped; only finished trials can be re-scored",
        "infeasible": f"rescore: trial {number} is infeasible; only finished trials can be re-scored",
        "absent": "has no trial 99 with a result; it has 0 to 9",
        "seeds": "rescore: --seeds must be at least 1, got 0",
        "workers": "SearchConfig.workers must be at least 1, got 0",
        "busy": "is in use: ",
        "no study": "is no study",
    }[what]
    with FileLock(study / "driver.lock") if what == "busy" else FileLock(study.parent / "other.lock"), pytest.raises(ConfigError) as caught:
        again(
            study.parent / "none" if what == "no study" else study,
            seeds=0 if what == "seeds" else 1,
            workers=0 if what == "workers" else None,
            inline=what != "workers",  # Ray must not start
            trials=None if what in ("seeds", "workers", "busy") else [number],
        )
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not (study / "rescored").exists()


def test_a_front_of_full_attention_alone_has_nothing_to_re_score(make_config: Make, tmp_path: Path) -> None:
    folder = studied(make_config(trials=1, anchors=["full"]), tmp_path)
    with pytest.raises(ConfigError, match=r"has no compressed trial on its front to re-score"):
        again(folder)


def test_only_what_meets_the_requirements_is_chosen(make_config: Make, tmp_path: Path) -> None:
    folder = studied(make_config(trials=10, space=WIDE, require=["a_min >= 0.75"]), tmp_path)
    numbers, _ = again(folder, seeds=1)
    rows = results.read_rows(folder)
    assert all((rows[n].a_min or 0) >= 0.75 for n in numbers)
    assert any((row.a_min or 0) < 0.75 for row in pareto.front(rows)), "the front without the requirement holds more"


def test_a_gpu_study_is_re_scored_on_its_gpu(study: Path, make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((study / "config.json").read_text())
    config["resources"]["gpus"] = 0.5
    (study / "config.json").write_text(json.dumps(config))
    seen: list[tuple[str, float]] = []
    submit = InlineExecutor.submit

    def noting(self: InlineExecutor, task: Any) -> None:
        seen.append((task.stage.device, task.resources.gpus))
        submit(self, task)

    monkeypatch.setattr(InlineExecutor, "submit", noting)
    again(study, seeds=1, trials=[1])
    assert seen == [("cuda", 0.5)]


def test_a_repeat_that_fails_is_said_and_not_counted(study: Path) -> None:
    again(study, seeds=1, trials=[1])
    _, text = again(study, seeds=2, trials=[1], run="fake_trials:raising")
    assert "trial 1 w8s8, seed 1002: ValueError: no such thing | 1/1" in text
    failed = read_result(study / "rescored" / "0001-s2")
    assert failed is not None and failed.status == "infeasible"
    (one,) = rescored.read(study)
    assert len(one.fresh) == 1


def test_a_table_with_rows_is_not_replaced_by_one_without(study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    again(study, seeds=1, trials=[1])
    before = rescored.csv_of(rescored.read(study))
    (study / rescored.FILE).write_bytes(before)
    monkeypatch.setattr(rescored, "read", lambda folder: [])
    assert cli.main(["rescore", str(study), "--seeds", "1", "--trial", "1", "--inline"]) == 2
    assert "rescored.csv holds 1 row and would be written again with none" in capsys.readouterr().err
    assert (study / rescored.FILE).read_bytes() == before


def test_a_cluster_that_is_not_there_is_one_line(study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ExecutorError("Ray could not join the cluster at nowhere: ConnectionError: no")

    monkeypatch.setattr(module, "RayExecutor", unreachable)
    monkeypatch.setattr(searches, "_prepare_base", lambda base, cache: {})
    assert cli.main(["rescore", str(study), "--address", "nowhere"]) == 1
    assert capsys.readouterr().err == "mitigate: Ray could not join the cluster at nowhere: ConnectionError: no\n"


# what the numbers say -----------------------------------------------------------------------------------------------------------------------------


def made(folder: Path, trial: int, stride: int, selected: float, fresh: list[float], width: float = 0.0) -> None:
    """A trial and its repeats, mean accuracy a tenth above A_min."""
    config = TrialConfig(variant=VariantConfig(window=stride, stride=stride))

    def row(a_min: float, cost: bool) -> Row:
        whole = fake_trials.make_row(config, label=f"t{trial}", trial=trial, anchor=False, a_min=a_min)
        changes = {"mean_accuracy": a_min + 0.1, "a_min_low": a_min - width, "a_min_high": a_min + width}
        return whole.model_copy(update=changes | ({} if cost else {"cost": None}))

    write_atomic(folder / "trials" / f"{trial:04d}" / "result.json", row(selected, True).to_json().encode())
    for repeat, a_min in enumerate(fresh, 1):
        write_atomic(folder / "rescored" / f"{trial:04d}-s{repeat}" / "result.json", row(a_min, False).to_json().encode())


@pytest.mark.parametrize(
    "numbers, half",
    [([1.0, 2.0, 3.0], 2.484), ([0.0, 1.0], 6.353), ([2.0, 2.0, 2.0, 2.0], 0.0), ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0], 2.166)],
)
def test_a_t_interval_is_the_textbook_one(numbers: list[float], half: float) -> None:
    found = rescored.t_interval(numbers)
    middle = sum(numbers) / len(numbers)
    assert found.value == pytest.approx(middle)
    assert (found.low, found.high) == (pytest.approx(middle - half, abs=2e-3), pytest.approx(middle + half, abs=2e-3))


def test_a_trial_that_is_better_in_everything_is_on_the_front_for_certain(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    made(tmp_path, 1, 8, 0.8, [0.78, 0.79, 0.80], width=0.01)
    made(tmp_path, 2, 4, 0.4, [0.30, 0.31, 0.32], width=0.01)  # twice the bytes, and worse
    made(tmp_path, 3, 8, 0.7, [])
    better, worse = rescored.read(tmp_path)
    assert (better.selected.trial, better.probability, worse.probability) == (1, 1.0, 0.0)
    assert len(better.fresh) == 3 and better.a_min.value == pytest.approx(0.79) and better.luck == pytest.approx(0.01)
    assert better.a_min.high - better.a_min.value == pytest.approx(2.484 * 0.01, abs=1e-4)
    assert better.mean.value == pytest.approx(0.89) and worse.luck == pytest.approx(0.09)
    curse = rescored.luck([better, worse])
    assert curse is not None and curse.value == pytest.approx(0.05)
    assert curse.high - curse.value == pytest.approx(12.706 * 0.04 * 2**0.5 / 2**0.5, abs=1e-3)
    assert rescored.luck([better]) is None and rescored.luck([]) is None


def test_two_that_cannot_be_told_apart_share_the_front(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    made(tmp_path, 1, 8, 0.8, [0.7, 0.7], width=0.05)
    made(tmp_path, 2, 8, 0.8, [0.7, 0.7], width=0.05)
    first, second = rescored.read(tmp_path)
    assert 0.3 < first.probability < 1 and 0.3 < second.probability < 1
    assert [one.probability for one in rescored.read(tmp_path)] == [first.probability, second.probability], "the draws are seeded"


def test_one_seed_keeps_its_own_interval_and_several_are_clipped(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    made(tmp_path, 1, 8, 0.8, [0.7], width=0.05)
    made(tmp_path, 2, 4, 0.8, [0.1, 0.9])
    one, two = rescored.read(tmp_path)
    assert (one.a_min.low, one.a_min.high) == (pytest.approx(0.65), pytest.approx(0.75))
    assert (two.a_min.low, two.a_min.high) == (0.0, 1.0)


def test_the_table_has_a_line_per_trial(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    made(tmp_path, 1, 8, 0.8, [0.75, 0.7])
    lines = rescored.csv_of(rescored.read(tmp_path)).decode().splitlines()
    assert lines[0] == ",".join(rescored.COLUMNS) and len(lines) == 2
    assert lines[1].startswith("1,t1,0.125,1.875,2,0.9,0.825,") and '"[0.75, 0.7]"' in lines[1] and lines[1].endswith(",1.0")
    assert rescored.csv_of([]).decode().splitlines() == [lines[0]]


def test_a_study_that_was_not_re_scored_has_no_numbers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    made(tmp_path, 1, 8, 0.8, [])
    assert rescored.read(tmp_path) == []
