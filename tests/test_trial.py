"""One config in, one Row out, on a base that really learned its task in seconds."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from mitigate import bases, cost, registry, score, train, trial
from mitigate.compressor import phase_profile
from mitigate.config import BaseConfig, ConfigError, CostConfig, ScoreConfig, TaskConfig, TrainConfig, TrialConfig, VariantConfig, content_hash, to_dict
from mitigate.config_files import replace
from mitigate.rows import Row
from mitigate.stage import Stage
from mitigate.surgery import attach
from mitigate.tasks import retrieval

# One record: its name has to be found among filler, which a tiny model learns at once. Trials then ask for more records than that.
NEEDLE = TaskConfig(keys=8, names=12, filler_tokens=3, records=1, queries=2, filler=8, filler_in_sequence=12)
BASE = BaseConfig(
    hidden=32,
    heads=2,
    kv_heads=2,
    head_dim=8,
    intermediate=48,
    rope_theta=100.0,
    updates=200,
    settle=80,
    learning_rate=5e-3,
    tokens_per_batch=64,
    task=NEEDLE,
)
CONFIG = TrialConfig(
    variant=VariantConfig(window=4, stride=4, local_window=2, bypass="last", coverage="entropy", coverage_weight=0.1),
    base=BASE,
    task=dataclasses.replace(NEEDLE, records=6, queries=4, filler=21, filler_in_sequence=30),
    train=TrainConfig(updates=7, batch=8, warmup=2),
    score=ScoreConfig(period=8, prompts=9, replicates=60, batch=20),
    cost=CostConfig(context=21, batch=2, steps=2, repeats=2),
    seed=5,
)
TIMINGS = {"wall_s", "base_s", "train_s", "score_s", "cost_s"}
RATES = {"decode_tokens_per_s", "decode_tokens_per_s_full", "throughput_ratio", "prefill_tokens_per_s", "prefill_tokens_per_s_full", "prefill_ratio"}


@pytest.fixture(scope="session")
def base_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the trained base in it."""
    cache = tmp_path_factory.mktemp("cache")
    found = bases.load(BASE, cache)
    assert found.accuracy >= bases.PERFECT
    assert not found.cached
    return cache


@pytest.fixture(scope="session")
def finished(base_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Row, Path, list[str]]:
    """A trial's Row, the folder of its weights, and its log."""
    out, log = tmp_path_factory.mktemp("out") / "weights", []
    row = trial.run_trial(CONFIG, trial=3, anchor=True, out=out, cache=base_cache, log=log.append)
    return row, out, log


def loaded(cache: Path, variant: VariantConfig, out: Path | None = None) -> Any:
    """The base with a variant on, with stored weights if there is a folder."""
    model = bases.load(BASE, cache).model
    attached = attach(model, variant)
    if out is not None:
        model.load_state_dict(load_file(out / trial.MODEL_FILE))
        attached.compressors.load_state_dict(load_file(out / trial.COMPRESSOR_FILE))
    return attached


# the base --------------------------------------------------------------------------------------------------------------------------------------


def test_the_base_comes_from_the_cache(base_cache: Path) -> None:
    log: list[str] = []
    one, other = (bases.load(BASE, base_cache, log=log.append) for _ in range(2))
    assert one.cached and other.cached
    assert log == []
    assert one.sha256 == other.sha256
    assert not one.model.training
    assert all(torch.equal(a, b) for a, b in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True))
    assert bases.check(one.model, NEEDLE, seed=BASE.seed) == one.accuracy >= bases.PERFECT
    (folder,) = (base_cache / "bases").iterdir()
    assert folder.name == content_hash(BASE)[:16]
    assert {path.name for path in folder.iterdir()} <= {"model.safetensors", "base.json", "lock"}


def test_training_a_base_again_gives_the_same_weights(base_cache: Path, tmp_path: Path) -> None:
    np.random.seed(1)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    log: list[str] = []
    again = bases.load(BASE, tmp_path, log=log.append)
    assert not again.cached
    assert again.sha256 == bases.load(BASE, base_cache).sha256
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is left alone"
    assert log and all(line.startswith("base: update ") for line in log)


def flip_a_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def change_record(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "base.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_byte,
        truncate,
        change_record(config=to_dict(replace(BASE, updates=201))),
        change_record(accuracy=None),
        change_record(sha256="0" * 64),
        lambda folder: (folder / "base.json").write_text("{"),
        lambda folder: (folder / "base.json").write_bytes(b"\xff\xfe"),
        lambda folder: (folder / "base.json").write_text("[]"),
        lambda folder: (folder / "base.json").unlink(),
        lambda folder: (folder / "model.safetensors").unlink(),
    ],
)
def test_a_damaged_base_is_trained_again(base_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]) -> None:
    shutil.copytree(base_cache, tmp_path / "cache")
    whole = bases.load(BASE, tmp_path / "cache")
    trained: list[BaseConfig] = []

    def stand_in(config: BaseConfig, **options: Any) -> Any:
        trained.append(config)
        return copy.deepcopy(whole.model)

    monkeypatch.setattr(bases, "train", stand_in)
    (folder,) = (tmp_path / "cache" / "bases").iterdir()
    damage(folder)
    log: list[str] = []
    found = bases.load(BASE, tmp_path / "cache", log=log.append)
    assert trained == [BASE]
    assert not found.cached
    assert len(log) == 1
    assert log[0].startswith(f"cached base {folder} is damaged (")
    assert "\n" not in log[0]
    assert bases.load(BASE, tmp_path / "cache").cached, "it was mended"
    assert trained == [BASE]


def test_two_that_ask_at_once_train_once(base_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bases.load(BASE, base_cache).model
    trained: list[int] = []

    def slow(config: BaseConfig, **options: Any) -> Any:
        trained.append(1)
        time.sleep(0.3)
        return copy.deepcopy(model)

    monkeypatch.setattr(bases, "train", slow)
    found: list[bases.Base] = []
    threads = [threading.Thread(target=lambda: found.append(bases.load(BASE, tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(trained) == 1
    assert sorted(base.cached for base in found) == [False, True, True]


def test_a_base_below_the_bar_is_refused(base_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bases.load(BASE, base_cache).model
    with torch.no_grad():
        model.lm_head.weight[NEEDLE.keys + 3] = 0  # one name can no longer be said
    monkeypatch.setattr(bases, "train", lambda config, **options: model)
    with pytest.raises(bases.BaseNotLearned, match=r"retrieves 0\.\d+ of fresh queries.*, below 0\.99; raise"):
        bases.load(BASE, tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_base_that_did_not_learn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(bases.BaseNotLearned, match=r"^base [0-9a-f]{12} .*; raise BaseConfig\.\w+ or change BaseConfig\.seed$"):
        bases.load(replace(BASE, updates=1, settle=1), tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("*.partial"))


def test_the_curriculum_keeps_the_share_of_filler() -> None:
    task = TaskConfig()
    small = bases._with_records(task, 8)
    assert (small.records, small.filler, small.filler_in_sequence) == (8, round(task.filler / 4), round(task.filler_in_sequence / 4))
    assert bases._with_records(task, 32) == task


# the trial -------------------------------------------------------------------------------------------------------------------------------------


def test_the_row_says_what_was_run(finished: tuple[Row, Path, list[str]], base_cache: Path) -> None:
    row, out, log = finished
    assert row.status == "ok"
    assert row.error is None
    assert (row.trial, row.anchor, row.seed, row.updates) == (3, True, 5, 7)
    assert row.label == registry.describe(CONFIG.variant)
    assert row.config == to_dict(CONFIG)
    assert row.config_sha256 == content_hash(CONFIG)
    assert row.base_sha256 == bases.load(BASE, base_cache).sha256
    assert row.backend == "torch-cpu-blocked"
    assert {"python", "torch", "transformers", "numpy"} <= set(row.versions)
    outer, inner = (1 + 6 * 2 + filler + 1 + 4 * 2 for filler in (21, 30))
    assert row.tokens == 8 * (4 * outer + 3 * inner)
    assert row.final_loss is not None
    assert 0 < row.final_loss < 10
    assert row.wall_s >= row.train_s + row.score_s + row.cost_s > 0
    assert Row.from_json(row.to_json()) == row
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "compressor.safetensors", "outcomes.safetensors"}
    assert [line.split(",")[0] for line in log if line.startswith("fine-tune")] == [f"fine-tune: update {n}/7" for n in range(1, 8)]
    assert [line.split(",")[0] for line in log if line.startswith("score")] == ["score: outer"] * 3 + ["score: in_sequence"] * 3


def answers(attached: Any, task: TaskConfig, protocol: Any, config: ScoreConfig) -> list[dict[str, Any]]:
    """Every answer of a sweep through the whole model, one placement at a time: what was asked, where, and how it was answered."""
    found = []
    for prompt, batch in enumerate(retrieval.sweep(task, protocol, period=config.period, prompts=config.prompts, seed=config.seed)):
        for placement, tokens in enumerate(batch.tokens):
            with torch.no_grad():
                logits = attached.model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0]
            for q, position in enumerate(batch.answer_from[:, 0].tolist()):
                key, gold = int(tokens[position]), int(tokens[position + 1])
                at = tokens[: batch.answer_from[0, 0]].tolist().index(key)
                chance = logits[position].softmax(-1)
                found.append(
                    {
                        "prompt": prompt,
                        "query": q,
                        "at": at,
                        "residue": at % config.period,
                        "right": int(chance.argmax()) == gold,
                        "gold": float(chance[gold]),
                        "placement": placement,
                    }
                )
    return found


@pytest.mark.parametrize("protocol", ["outer", "in_sequence"])
def test_scores_are_those_of_answers_counted_by_hand(finished: tuple[Row, Path, list[str]], base_cache: Path, protocol: Any) -> None:
    row, out, _ = finished
    found = row.score(protocol)
    with loaded(base_cache, CONFIG.variant, out) as attached:
        asked = answers(attached, CONFIG.task, protocol, CONFIG.score)
    by_residue = [[answer for answer in asked if answer["residue"] == r] for r in range(8)]
    assert found.n == [len(group) for group in by_residue] == [9 * 4] * 8
    accuracy = [sum(answer["right"] for answer in group) / len(group) for group in by_residue]
    assert found.accuracy == pytest.approx(accuracy, abs=1e-12)
    assert found.gold_probability == pytest.approx([sum(answer["gold"] for answer in group) / len(group) for group in by_residue], abs=1e-5)
    mean = sum(accuracy) / 8
    assert found.mean.value == pytest.approx(mean)
    assert found.a_min.value == pytest.approx(min(accuracy))
    assert found.gap.value == pytest.approx(max(accuracy) - min(accuracy))
    assert found.spread.value == pytest.approx(math.sqrt(sum((a - mean) ** 2 for a in accuracy) / 8))
    assert accuracy[found.worst_residue] == min(accuracy)
    assert found.relative_gap == pytest.approx(found.gap.value / found.mean.value)
    assert found.nll == pytest.approx([sum(-math.log(answer["gold"]) for answer in group) / len(group) for group in by_residue], abs=1e-4)
    places = [[answer["at"] for answer in group] for group in by_residue]
    assert found.target_mean == pytest.approx([np.mean(group) for group in places])
    assert found.target_sd == pytest.approx([np.std(group) for group in places])
    assert (found.distractor_lockstep == pytest.approx(1)) == (protocol == "outer")
    assert found.clusters == 9
    assert found.period == 8
    tokens = [batch.tokens for batch in retrieval.sweep(CONFIG.task, protocol, period=8, prompts=9, seed=1)]
    assert found.prompts_sha256 == hashlib.sha256(np.concatenate(tokens).astype("<i8").tobytes()).hexdigest()
    assert 0 < mean < 1, "a curve that is all 0 or all 1 would prove little"
    assert all(low <= value <= high for low, value, high in zip(found.accuracy_low, found.accuracy, found.accuracy_high, strict=True))


def test_headline_numbers_are_the_worse_protocol(finished: tuple[Row, Path, list[str]]) -> None:
    row = finished[0]
    outer, inner = row.score("outer"), row.score("in_sequence")
    assert row.mean_accuracy == pytest.approx((outer.mean.value + inner.mean.value) / 2)
    worst = min((outer, inner), key=lambda s: s.a_min.value)
    assert (row.a_min, row.a_min_high) == (worst.a_min.value, worst.a_min.high)
    assert row.a_min_low == min(s.a_min.low for s in row.scores)
    widest = max(row.scores, key=lambda s: s.gap.value)
    assert (row.gap, row.gap_low, row.gap_high) == (widest.gap.value, widest.gap.low, widest.gap.high)
    assert row.gap == max(outer.gap.value, inner.gap.value)


def test_outcomes_do_not_depend_on_the_batch(base_cache: Path) -> None:
    with loaded(base_cache, CONFIG.variant) as attached:
        sweep = retrieval.sweep(CONFIG.task, "outer", period=8, prompts=9, seed=1)
        runs = [score.run_sweep(attached, sweep, batch=batch) for batch in (1, 20, 1000)]
    for other in runs[1:]:
        assert np.array_equal(runs[0].correct_ER, other.correct_ER)
        np.testing.assert_allclose(runs[0].nll_ER, other.nll_ER, atol=1e-4)
        assert runs[0].sha256 == other.sha256
    assert runs[0].cluster_E.tolist() == [prompt for prompt in range(9) for _ in range(4)]


def test_kv_bytes_are_counted_and_agree(finished: tuple[Row, Path, list[str]], base_cache: Path) -> None:
    found = finished[0].cost
    assert found is not None
    shape = cost.shape_of(bases.load(BASE, base_cache).model)
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.hidden, shape.element) == (2, 2, 8, 32, 4)
    # Context 21, W4 S4 L2: 5 summaries; tokens 20 and on are exact (the query at 21 sees 20, 21); 5 bypassed tokens; row 20 waits.
    assert found.kv_bytes_counted == found.kv_bytes_at_context == 2 * ((5 + 1 + 5) * 2 * 64 + 1 * 128)
    assert found.kv_bytes_per_token == 2 * 2 * 64 * (1 / 4 + 1 / 4)
    assert found.kv_kept == 0.5
    assert found.kv_constant_bytes == found.kv_bytes_counted - 21 * found.kv_bytes_per_token


def metrics(row: Row) -> dict[str, Any]:
    data = row.model_dump(exclude=TIMINGS)
    data["cost"] = {key: value for key, value in data["cost"].items() if key not in RATES}
    return data


def test_the_same_seed_gives_the_same_row(finished: tuple[Row, Path, list[str]], base_cache: Path) -> None:
    torch.manual_seed(123)
    again = trial.run_trial(CONFIG, trial=3, anchor=True, cache=base_cache)
    assert metrics(again) == metrics(finished[0])
    other = trial.run_trial(replace(CONFIG, seed=6), cache=base_cache, label="mine")
    assert other.label == "mine"
    assert other.final_loss != again.final_loss
    assert [s.prompts_sha256 for s in other.scores] == [s.prompts_sha256 for s in again.scores], "scored on the same prompts"


def test_stored_weights_give_bit_identical_logits(base_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(20, (3, 40), generator=torch.Generator().manual_seed(0))
    logits: list[torch.Tensor] = []
    store = trial.store_weights

    def watch(attached: Any, folder: Path) -> None:
        with torch.no_grad():
            logits.append(attached.model(input_ids=tokens, use_cache=False).logits)
        store(attached, folder)

    monkeypatch.setattr(trial, "store_weights", watch)
    variant = replace(CONFIG.variant, payload="per_offset", gate="vector", tie="gates", stagger="half")
    trial.run_trial(replace(CONFIG, variant=variant, score=replace(CONFIG.score, prompts=2)), out=tmp_path, cache=base_cache)
    with loaded(base_cache, variant, tmp_path) as attached, torch.no_grad():
        assert torch.equal(attached.model(input_ids=tokens, use_cache=False).logits, logits[0])
    with loaded(base_cache, variant) as attached, torch.no_grad():
        assert not torch.allclose(attached.model(input_ids=tokens, use_cache=False).logits, logits[0], atol=1e-3)


def test_full_attention_runs_too(base_cache: Path, tmp_path: Path) -> None:
    short = replace(NEEDLE, queries=1, filler=9, filler_in_sequence=15)
    sweep, gently = replace(CONFIG.score, period=4), replace(CONFIG.train, learning_rate=1e-5)
    config = replace(CONFIG, variant=VariantConfig(compress=False), task=short, score=sweep, train=gently)
    row = trial.run_trial(config, out=tmp_path / "x", cache=base_cache)
    assert row.label == "full"
    assert row.backend == "transformers-sdpa"
    assert row.cost is not None
    assert row.cost.kv_kept == 1
    assert row.a_min is not None
    assert row.a_min > 0.95, "what the base learned is still there"
    assert load_file(tmp_path / "x" / "compressor.safetensors") == {}


def test_one_protocol_is_enough(base_cache: Path) -> None:
    row = trial.run_trial(replace(CONFIG, score=replace(CONFIG.score, protocols=["in_sequence"], prompts=3)), cache=base_cache)
    assert [s.protocol for s in row.scores] == ["in_sequence"]
    assert row.mean_accuracy == row.scores[0].mean.value


def test_a_wrong_name_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "load", lambda *args, **kwargs: pytest.fail("the base was loaded"))
    with pytest.raises(ConfigError, match="did you mean 'vector'"):
        trial.run_trial(replace(CONFIG, variant=VariantConfig(gate="vectr", window=4, stride=4)), cache=tmp_path)


# in stages -------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rungs", [(), (2,), (1, 4)])
def test_stages_give_what_one_go_gives(finished: tuple[Row, Path, list[str]], base_cache: Path, tmp_path: Path, rungs: tuple[int, ...]) -> None:
    folder, last = tmp_path / "out", len(rungs)
    for rung, updates in enumerate(rungs):
        row = trial.run_stage(CONFIG, stage=Stage(rung=rung, updates=updates, prompts=2), out=folder, trial=3, anchor=True, cache=base_cache)
        assert (row.rung, row.updates, row.cost, row.scores[0].clusters) == (rung, updates, None, 2)
        assert not (folder / trial.MODEL_FILE).exists()
        (folder / Stage(rung=rung).scored_file).write_text(row.to_json())
    stage = Stage(rung=last, updates=CONFIG.train.updates if rungs else None)
    row = trial.run_stage(CONFIG, stage=stage, out=folder, trial=3, anchor=True, cache=base_cache)
    assert row.cost is None and row.wall_s >= row.train_s + row.score_s
    (folder / stage.scored_file).write_text(row.to_json())
    row = trial.run_stage(CONFIG, stage=Stage(kind="cost", rung=last), out=folder, cache=base_cache)
    assert metrics(row) == metrics(finished[0]) | {"rung": last if rungs else None}
    for name in (trial.MODEL_FILE, trial.COMPRESSOR_FILE):
        one, other = load_file(folder / name), load_file(finished[1] / name)
        assert all(torch.equal(one[key], other[key]) for key in one | other)


def test_seconds_are_those_of_all_stages(base_cache: Path, tmp_path: Path) -> None:
    first = trial.run_stage(CONFIG, stage=Stage(rung=0, updates=3, prompts=2), out=tmp_path, cache=base_cache)
    (tmp_path / "rung-0.json").write_text(first.model_copy(update={"train_s": 100.0, "wall_s": 200.0, "score_s": 50.0, "base_s": 10.0}).to_json())
    second = trial.run_stage(CONFIG, stage=Stage(rung=1, updates=7, prompts=2), out=tmp_path, cache=base_cache)
    assert 100 < second.train_s < 110 and 200 < second.wall_s < 220 and 50 < second.score_s < 60 and 10 < second.base_s < 15


@pytest.mark.parametrize("killed_after", [1, 3, 6])
def test_a_killed_fine_tune_goes_on_bit_for_bit(base_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_after: int) -> None:
    monkeypatch.setattr(train, "CHECKPOINT_EVERY", 1)

    def weights(checkpoint: Path | None, stop: int | None) -> tuple[list[torch.Tensor], Any]:
        def on_update(done: int, loss: float) -> None:
            if done == stop:
                raise KeyboardInterrupt

        torch.manual_seed(0)
        with loaded(base_cache, CONFIG.variant) as attached:
            done = train.fine_tune(attached, CONFIG.task, CONFIG.train, seed=1, checkpoint=checkpoint, on_update=on_update)
            return [*attached.model.state_dict().values(), *attached.compressors.state_dict().values()], done

    whole, all_of_it = weights(None, None)
    path = tmp_path / "checkpoint.pt"
    with pytest.raises(KeyboardInterrupt):
        weights(path, killed_after)
    again, rest = weights(path, None)
    assert rest == all_of_it and all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", "other seed", "cut"])
def test_a_checkpoint_that_does_not_fit_is_not_looked_at(base_cache: Path, tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / "checkpoint.pt"

    def trained(seed: int, checkpoint: Path | None, until: int | None = None) -> Any:
        torch.manual_seed(0)
        with loaded(base_cache, CONFIG.variant) as attached:
            return train.fine_tune(attached, CONFIG.task, CONFIG.train, seed=seed, until=until, checkpoint=checkpoint)

    expected = trained(1, None)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        trained(2 if content == "other seed" else 1, path, until=3)
        if content == "cut":
            path.write_bytes(path.read_bytes()[:-1000])
    assert trained(1, path) == expected


def test_costs_of_weights_that_lie_elsewhere_are_those_of_the_same_shapes(finished: tuple[Row, Path, list[str]], base_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "rung-0.json").write_text(finished[0].model_copy(update={"cost": None}).to_json())
    row = trial.run_stage(CONFIG, stage=Stage(kind="cost"), out=tmp_path, cache=base_cache)
    assert metrics(row) == metrics(finished[0])


# fine-tuning -----------------------------------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_a_number_is_told(base_cache: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, train=replace(CONFIG.train, learning_rate=1e30, warmup=0))
    with pytest.raises(train.Diverged, match=r"^fine_tune: the loss is (nan|inf) after \d+ updates$"):
        trial.run_trial(config, cache=base_cache, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_fine_tuning_learns(base_cache: Path) -> None:
    losses: list[float] = []
    with loaded(base_cache, VariantConfig(window=4, stride=4, local_window=1)) as attached:
        done = train.fine_tune(attached, NEEDLE, TrainConfig(updates=60, batch=16, warmup=5), seed=0, on_update=lambda n, loss: losses.append(loss))
        assert not attached.model.training
    assert len(losses) == done.updates == 60
    assert done.loss == pytest.approx(np.mean(losses[-6:]))
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:5])


def test_no_updates_change_nothing(base_cache: Path) -> None:
    with loaded(base_cache, CONFIG.variant) as attached:
        before = {name: tensor.clone() for name, tensor in attached.model.state_dict().items()}
        done = train.fine_tune(attached, CONFIG.task, TrainConfig(updates=0), seed=0)
        assert (done.updates, done.tokens, done.loss) == (0, 0, None)
        assert all(torch.equal(before[name], tensor) for name, tensor in attached.model.state_dict().items())


def test_every_weight_is_trained_and_the_gate_bias_at_its_own_rate(base_cache: Path) -> None:
    variant = VariantConfig(window=4, stride=4, payload="per_offset", local_window=1)
    moved = {}
    for rate in (1.0, 30.0):
        torch.manual_seed(0)
        with loaded(base_cache, variant) as attached:
            named = [*attached.model.named_parameters(), *((f"gate {n}", p) for n, p in attached.compressors.named_parameters())]
            before = [parameter.detach().clone() for _, parameter in named]
            train.fine_tune(attached, CONFIG.task, TrainConfig(updates=1, batch=4, warmup=0, gate_bias_rate=rate, weight_decay=0.0), seed=0)
            moved[rate] = {name: (p.detach() - old).abs().max().item() for (name, p), old in zip(named, before, strict=True)}
    assert all(size > 0 for size in moved[1.0].values()), moved[1.0]
    for name in moved[1.0]:
        factor = 30 if name.endswith("gate_bias") else 1
        assert moved[30.0][name] == pytest.approx(factor * moved[1.0][name], rel=1e-3), name


def test_the_schedule_by_hand() -> None:
    factors = [train.linear_schedule(step, updates=10, warmup=2) for step in range(11)]
    assert factors == pytest.approx([0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0])
    assert train.linear_schedule(0, updates=5, warmup=0) == 1
    assert train.linear_schedule(5, updates=5, warmup=0) == 0
    assert train.linear_schedule(3, updates=3, warmup=3) == 1


def on_one_phase(attached: Any) -> None:
    """All gates on offset 1."""
    with torch.no_grad():
        for compressor in attached.compressors:
            compressor.gate_bias.zero_()
            compressor.gate_bias[1] = 3.0


def coverage_now(attached: Any, variant: VariantConfig) -> float:
    attached.collect_gates(True)
    tokens = torch.from_numpy(retrieval.training_batch(CONFIG.task, np.random.default_rng(0), 8, "outer").tokens)
    with torch.no_grad():
        attached.model(input_ids=tokens, use_cache=False)
        value = float(train.coverage_loss(attached, variant))
    attached.collect_gates(False)
    return value


@pytest.mark.parametrize("name", ["entropy", "hinge"])
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_coverage_losses_go_down_when_they_are_asked_to(base_cache: Path, name: str, scope: Any) -> None:
    asked = VariantConfig(window=4, stride=4, coverage=name, coverage_weight=1.0, coverage_threshold=0.25, coverage_scope=scope)
    config = TrainConfig(updates=12, batch=4, warmup=0, gate_bias_rate=150.0)
    after = {}
    for label, variant in (("with", asked), ("without", VariantConfig(window=4, stride=4))):
        with loaded(base_cache, variant) as attached:
            on_one_phase(attached)
            before = coverage_now(attached, asked)
            train.fine_tune(attached, CONFIG.task, config, seed=0)
            after[label] = coverage_now(attached, asked)
    assert before > 0.8
    assert after["with"] < 0.5 * before
    assert after["with"] < after["without"]


def test_coverage_loss_by_hand(base_cache: Path) -> None:
    """lambda (K + V), per layer and averaged, or over all heads of the model."""
    tokens = torch.from_numpy(retrieval.training_batch(CONFIG.task, np.random.default_rng(0), 4, "outer").tokens)
    found = {}
    for scope in ("layer", "model"):
        variant = VariantConfig(window=6, stride=4, coverage="entropy", coverage_weight=0.7, coverage_scope=scope)
        torch.manual_seed(0)
        with loaded(base_cache, variant) as attached:
            for parameter in attached.compressors.parameters():
                torch.nn.init.normal_(parameter)
            attached.collect_gates(True)
            attached.model(input_ids=tokens, use_cache=False)
            gates = [layer.collect[0] for layer in attached.layers]
            found[scope] = float(train.coverage_loss(attached, variant).detach())
            with pytest.raises(RuntimeError, match="no window was complete"):
                train.coverage_loss(attached, variant)  # gates of one forward are used once

    def entropy(profiles: list[torch.Tensor]) -> float:
        mean = torch.cat(profiles).mean(dim=0)
        return 1 - float(-(mean * mean.log()).sum()) / math.log(4)

    grid = registry.grids(VariantConfig(window=6, stride=4), layers=1)[0]
    profiles = [[phase_profile(alpha, grid).detach() for alpha in pair] for pair in gates]
    by_layer = sum(entropy([profile]) for pair in profiles for profile in pair) / 2
    by_model = sum(entropy([pair[branch] for pair in profiles]) for branch in (0, 1))
    assert found["layer"] == pytest.approx(0.7 * by_layer, rel=1e-5)
    assert found["model"] == pytest.approx(0.7 * by_model, rel=1e-5)
    assert by_layer > by_model > 0


def test_the_loss_counts_names_of_queries_only(base_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first loss, by hand from the whole model's logits on the same prompts."""
    losses: list[float] = []
    with loaded(base_cache, CONFIG.variant) as attached:
        batch = retrieval.training_batch(CONFIG.task, np.random.default_rng(11), 4, "outer")
        with torch.no_grad():
            logits = attached.model(input_ids=torch.from_numpy(batch.tokens), use_cache=False).logits
        by_hand = F.cross_entropy(logits[:, batch.answer_from[:, 0]].flatten(0, 1), torch.from_numpy(batch.gold).flatten())
        train.fine_tune(attached, CONFIG.task, TrainConfig(updates=1, batch=4), seed=11, on_update=lambda n, loss: losses.append(loss))
    assert losses == [pytest.approx(float(by_hand), rel=1e-5)]
