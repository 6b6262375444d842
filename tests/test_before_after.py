"""`mitigate finetune` as users type it, on a tiny model: everything in the folder, going on after a stop, and refusals that change nothing."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_evaluate import comparable
from tiny_tuning import settings, write_model, write_text

from mitigate import before_after, cli, config, config_files, evaluate, finetune, generate, registry
from mitigate.config_finetune import FineTuneConfig
from mitigate.export import pretrained
from mitigate.report import data, tuning
from mitigate.rows import Row

FILES = {"run.json", "summary.json", "row_full.json", "row_before.json", "row.json", "phase_curves.png", "phase_curves.svg", "bundle"}
TOML = """
model = "model"
prompt = "dog cat fox"
new_tokens = 9

[text]
path = "text.txt"
length = 20
windows = 3

[variant]
window = 4
stride = 2
origin = -2
local_window = 3

[words]
records = 6
demonstrations = 2
queries = 3
filler = 9
filler_in_sequence = 14

[score]
period = 4
prompts = 3
replicates = 20
batch = 12

[cost]
context = 21
batch = 1
steps = 2
repeats = 2

[train]
updates = 6
batch = 2
length = 24
positions = 10
compressor_rate = 1e-2
model_rate = 1e-3
warmup = 0
checkpoint_every = 2
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model, a text, a config, and a finished run in ``done``; the current folder for the module."""
    folder, threads = tmp_path_factory.mktemp("runs"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_model(folder / "model")
        write_text(folder / "text.txt")
        (folder / "run.toml").write_text(TOML)
        assert cli.main(["finetune", "run.toml", "--out", "done"]) == 0
        yield folder
    torch.set_num_threads(threads)


def wanted() -> FineTuneConfig:
    return config_files.load_fine_tune(Path("run.toml"))


def row_in(folder: str, name: str) -> Row:
    return Row.from_json((Path(folder) / name).read_text())


def summary_in(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text())
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_everything_is_in_the_folder(workspace: Path) -> None:
    assert {path.name for path in (workspace / "done").iterdir()} == FILES
    before, after, full = (row_in("done", name) for name in ("row_before.json", "row.json", "row_full.json"))
    assert (full.label, before.label, after.label) == ("model, own attention", "model, w4s2 o-2 l3 untrained", "model, w4s2 o-2 l3 fine-tuned")
    assert len({row.base_sha256 for row in (before, after, full)}) == 1
    for protocol in ("outer", "in_sequence"):
        assert len({row.score(protocol).prompts_sha256 for row in (before, after, full)}) == 1
        assert before.score(protocol).nll != after.score(protocol).nll
    assert (before.updates, after.updates, after.tokens) == (0, 6, summary_in("done")["training"]["tokens"])
    assert after.final_loss is not None and after.train_s > 0
    assert after.config == config.to_dict(evaluate.recorded(wanted()))
    assert after.config["text"]["path"] == "text.txt"
    summary = summary_in("done")
    for stage in ("full", "before", "after"):
        assert summary["perplexity"][stage]["tokens"] == 3 * 19
        assert summary["sentences"][stage]["prompt_tokens"] == 4
    assert summary["perplexity"]["before"] != summary["perplexity"]["after"]
    assert full.cost is not None and summary["kv_bytes_full"] == full.cost.kv_bytes_counted == full.cost.kv_bytes_at_context
    assert len(summary["training"]["steps"]["loss"]) == 6
    assert str(workspace) not in json.dumps([summary, json.loads(Path("done/run.json").read_text()), after.config]), "nothing of this machine"


def test_rows_before_are_those_of_mitigate_score(workspace: Path) -> None:
    plain = config.to_dict(wanted())
    for name, variant in (("row_before.json", plain["variant"]), ("row_full.json", {"compress": False})):
        shared = {key: plain[key] for key in ("model", "words", "score", "cost")}
        again = evaluate.evaluate(config_files.from_dict(config.EvaluationConfig, shared | {"variant": variant}))
        assert comparable(again) == comparable(row_in("done", name))


def test_the_bundle_is_the_model_after_training(workspace: Path) -> None:
    from mitigate import bases

    base = bases.load_pretrained("model")
    with pretrained.put_on(base, Path("done/bundle"), pretrained.read(Path("done/bundle"))) as attached:
        said = generate.generate(base.model, base.tokenizer, "dog cat fox", max_new_tokens=9)
        assert dataclasses.asdict(said) == summary_in("done")["sentences"]["after"]
        again = evaluate.score_attached(attached, base, wanted())
    assert [found.nll for found in again.scores] == [found.nll for found in row_in("done", "row.json").scores]


def test_coarse_layers_train_and_come_back_from_their_bundle(workspace: Path, tmp_path: Path) -> None:
    from mitigate import bases

    coarse = config.VariantConfig(window=2, stride=2, tie="kv", coarse="even", coarse_factor=2, local_window=3)
    wanted_too = settings(workspace, variant=coarse)
    rows, _ = before_after.run(wanted_too, tmp_path / "coarse")
    assert rows["after"].updates == wanted_too.train.updates
    assert [grid.stride for grid in registry.grids(coarse, layers=2)] == [4, 2]
    base, folder = bases.load_pretrained(str(workspace / "model")), tmp_path / "coarse" / "bundle"
    with pretrained.put_on(base, folder, pretrained.read(folder)) as attached:
        assert [layer.grid.stride for layer in attached.layers][:2] == [4, 2]
        again = evaluate.score_attached(attached, base, wanted_too)
    assert [found.nll for found in again.scores] == [found.nll for found in rows["after"].scores]
    assert [found.nll for found in again.scores] != [found.nll for found in rows["before"].scores]


def test_the_same_command_again_changes_nothing(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(workspace / "done")
    assert cli.main(["finetune", "run.toml", "--out", "done"]) == 0
    said = capsys.readouterr().out
    assert "done holds this result already" in said
    for words in ("full attention", "before training", "after training", "perplexity", "KV bytes", "prompt: 'dog cat fox'"):
        assert words in said
    assert files(workspace / "done") == before


class Stop(Exception):
    pass


@pytest.mark.parametrize("update", [1, 5])
def test_a_run_that_was_cut_short_goes_on(workspace: Path, update: int) -> None:
    out = workspace / f"cut{update}"

    def stop(progress: finetune.Progress) -> None:
        if progress.update == update:
            raise Stop

    with pytest.raises(Stop):
        before_after.run(wanted(), out, on_update=stop)
    left = {"run.json", "summary.json", "row_full.json", "row_before.json"}
    assert {path.name for path in out.iterdir()} == left | ({"checkpoint.pt"} if update == 5 else set())
    seen = []
    before_after.run(wanted(), out, on_update=lambda progress: seen.append(progress.update))
    assert seen == list(range(1 if update == 1 else 5, 7)), "from the last checkpoint on"
    assert {path.name for path in out.iterdir()} == FILES
    for name in ("bundle/compressor.safetensors", "bundle/pretrained.json"):
        assert (out / name).read_bytes() == (workspace / "done" / name).read_bytes(), name
    one, other = (comparable(row_in(str(folder), "row.json")) | {"train_s": 0} for folder in (out, workspace / "done"))
    assert one == other


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    before = files(folder)
    assert cli.main(arguments) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mitigate: ")]
    assert len(error) == 1
    assert files(folder) == before
    return error[0].removeprefix("mitigate: ")


def test_refusals_change_nothing(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["finetune", "run.toml", "--out"]
    identity = config.content_hash(evaluate.recorded(wanted()))[:8]
    assert refused([*command, "done", "--minutes", "3"], capsys, workspace) == f"done holds the run of another config ({identity}); choose another --out"
    assert refused([*command, "model"], capsys, workspace) == "model is not empty and holds no run of mitigate finetune; choose another --out"
    assert refused([*command, "run.toml/x/y"], capsys, workspace) == "run.toml is no folder, and run.toml/x/y would lie in it; choose another --out"
    assert refused([*command, "new", "--threads", "0"], capsys, workspace) == "--threads must be at least 1, got 0"
    assert refused([*command, "new", "--minutes", "0"], capsys, workspace) == "TuneConfig.minutes must be above 0, got 0.0"
    assert refused([*command, "new", "--model", "./absent"], capsys, workspace) == "--model ./absent: there is no such folder or GGUF file"
    (workspace / "no-model.toml").write_text(TOML.replace('"model"', '"absent.gguf"'))
    said = "absent.gguf: there is no such folder or GGUF file"
    assert refused(["finetune", "no-model.toml", "--out", "new"], capsys, workspace) == f"FineTuneConfig.model {said}"
    assert refused(["finetune", "no-model.toml", "--out", "new", "--model", "absent.gguf"], capsys, workspace) == f"--model {said}"
    assert refused(["finetune", "absent.toml", "--out", "new"], capsys, workspace) == "config file absent.toml is not there"
    (workspace / "no-text.toml").write_text(TOML.replace("text.txt", "absent.txt"))
    assert refused(["finetune", "no-text.toml", "--out", "new"], capsys, workspace) == "TextConfig.path: there is no text file absent.txt"
    (workspace / "bad.toml").write_text(TOML.replace("checkpoint_every", "checkpoint_evry"))
    assert "TuneConfig.checkpoint_evry is not a known key; did you mean 'checkpoint_every'?" in refused(
        ["finetune", "bad.toml", "--out", "new"], capsys, workspace
    )


def test_another_text_or_base_of_the_same_name_is_refused(workspace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copytree(workspace / "done", tmp_path / "cut")
    (tmp_path / "cut" / "row.json").unlink()
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", seed=3)
    arguments = ["finetune", "run.toml", "--out", str(tmp_path / "cut")]
    assert "holds the run of other weights of the same name" in refused([*arguments, "--model", str(tmp_path / "model")], capsys, tmp_path)
    write_text(tmp_path / "text.txt", words=31)
    (tmp_path / "run.toml").write_text(TOML.replace("text.txt", f"{tmp_path}/text.txt"))
    said = refused(["finetune", str(tmp_path / "run.toml"), "--out", str(tmp_path / "cut")], capsys, tmp_path)
    assert "holds the run of another text of the same name" in said


# figure and progress -------------------------------------------------------------------------------------------------------------------------


def rows_done() -> dict[str, Row]:
    return {stage: row_in("done", name) for stage, name in before_after.ROWS.items()}


def test_the_figure_shows_the_rows_numbers(workspace: Path) -> None:
    rows = rows_done()
    sheet = tuning.figure(rows, title="tiny")
    assert [axes.get_title(loc="left") for axes in sheet.axes] == list(data.PROTOCOL_WORDS.values())
    for axes, protocol in zip(sheet.axes, ("outer", "in_sequence"), strict=True):
        assert [line.get_label() for line in axes.lines] == list(tuning.STAGES.values())
        for line, stage in zip(axes.lines, tuning.STAGES, strict=True):
            assert list(line.get_ydata()) == rows[stage].score(protocol).accuracy
        assert len({line.get_color() for line in axes.lines}) == len({line.get_marker() for line in axes.lines}) == 3, "not by colour alone"
        assert "(tokens)" in axes.get_xlabel()
    assert "fraction" in sheet.axes[0].get_ylabel()
    assert len(tuning.figure({"full": rows["full"]}, title="alone").axes) == 2


def test_progress_is_a_line_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    step = finetune.Step(answers=True, loss=2.0, cross_entropy=2.0, divergence=None)
    with tuning.progress_bar(10) as update:
        update(finetune.Progress(update=1, share=0.1, step=step, watched=None))
        seen = finetune.Watched(update=2, a_min=0.25, mean=0.5)
        update(finetune.Progress(update=10, share=1.0, step=dataclasses.replace(step, answers=False, loss=1.0), watched=seen))
    assert capsys.readouterr().err == "fine-tune: 100 %, update 10 of at most 10, loss: retrieval 2.000, text 1.000, A_min 0.25, mean 0.50\n"


def test_the_helper_config_is_the_one_of_the_file(workspace: Path) -> None:
    given = settings(workspace, train={"checkpoint_every": 2})
    assert evaluate.recorded(given) == evaluate.recorded(wanted())
