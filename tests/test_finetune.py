"""Fine-tuning a pretrained model: what changes and how fast, resuming to the bit, distillation, precision, budgets, refusals."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_tuning import TRAIN, VARIANT, ready, settings, write_model, write_text
from torch.nn import functional as F

from mitigate import config, config_files, finetune, train
from mitigate.config import ConfigError, VariantConfig
from mitigate.config_finetune import FineTuneConfig, TuneConfig
from mitigate.finetune import divergence, fine_tune
from mitigate.readout import logits_at
from mitigate.surgery import Attachment, attach

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuning")
    write_model(path / "model")
    write_text(path / "text.txt")
    return path


def tensors(attached: Attachment) -> dict[str, torch.Tensor]:
    """Copies of everything that could have been trained."""
    named = [*attached.model.named_parameters(), *attached.compressors.named_parameters(prefix="compressor")]
    return {name: parameter.detach().clone() for name, parameter in named}


def tuned(folder: Path, *, seed: int = 0, **changes: Any) -> tuple[dict[str, torch.Tensor], finetune.Tuned]:
    wanted = settings(folder, **changes)
    _, data, attached = ready(wanted, seed)
    done = fine_tune(attached, data, wanted)
    return tensors(attached), done


# what changes, and by how much --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["compressor", "attention", "all"])
def test_only_what_was_asked_for_changes(folder: Path, what: str) -> None:
    wanted = settings(folder, train={"what": what})
    _, data, attached = ready(wanted)
    before = tensors(attached)
    done = fine_tune(attached, data, wanted)
    changed = {name for name, tensor in tensors(attached).items() if not torch.equal(tensor, before[name])}
    compressor = {name for name in before if name.startswith("compressor")}
    own = {
        "compressor": set(),
        "attention": {name for name in before if name.split(".")[-2] in PROJECTIONS},
        "all": before.keys() - compressor,
    }[what]
    assert changed == compressor | own
    assert set(finetune.trained_names(attached, what)) == own
    assert all(parameter.requires_grad and parameter.grad is None for parameter in attached.model.parameters())
    assert not attached.model.training
    assert (done.updates, len(done.steps)) == (6, 6)
    assert [step.answers for step in done.steps] == [False, True] * 3
    assert done.loss == done.steps[-1].loss


def test_each_group_has_its_rate(folder: Path) -> None:
    """Adam's first step is the rate, whatever the gradient."""
    for factor, warmup in ((1.0, 0), (0.25, 4)):
        wanted = settings(folder, train={"what": "attention", "updates": 1000, "warmup": warmup, "clip": 1e9, "gate_bias_rate": 7.0})
        _, data, attached = ready(wanted)
        before = tensors(attached)
        fine_tune(attached, data, wanted, until=1)
        moved = {name: float((tensor - before[name]).abs().max()) for name, tensor in tensors(attached).items()}
        for name, distance in moved.items():
            rate = 7e-2 if name.endswith("gate_bias") else 1e-2 if name.startswith("compressor") else 1e-3 if name.split(".")[-2] in PROJECTIONS else 0
            assert distance == pytest.approx(factor * rate, rel=0.02), name


def test_the_rate_falls_to_the_end_of_the_budget(folder: Path) -> None:
    wanted = settings(folder, train={"updates": 100, "warmup": 10, "final_rate": 0.2})
    _, data, attached = ready(wanted)
    run = finetune._Run(attached, data, wanted, [{"params": list(attached.compressors.parameters()), "peak": 1.0, "weight_decay": 0.0}])
    rates = []
    for update in range(100):
        run.update = update
        rates.append(run.rate())
    assert rates[:10] == pytest.approx([(update + 1) / 10 if update < 9 else 1 - 0.8 * 0.09 for update in range(10)])
    assert rates[10:] == pytest.approx([1 - 0.8 * update / 100 for update in range(10, 100)])


def test_passes_of_an_update_add_up_to_one_larger_batch(folder: Path) -> None:
    several, at_once = (tuned(folder, train={"batch": b, "accumulate": a, "updates": 3, "what": "all"}) for b, a in ((1, 4), (4, 1)))
    assert several[1].tokens == at_once[1].tokens
    for name, tensor in several[0].items():
        assert torch.allclose(tensor, at_once[0][name], atol=2e-5), name
    for one, other in zip(several[1].steps, at_once[1].steps, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)


def test_training_helps(folder: Path) -> None:
    _, done = tuned(folder, train={"updates": 60, "batch": 4, "retrieval": 0.0, "warmup": 5})
    losses = [step.divergence for step in done.steps]
    assert None not in losses
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:5])  # type: ignore[arg-type]


# data ----------------------------------------------------------------------------------------------------------------------------------------


def test_updates_are_shared_out(folder: Path) -> None:
    for share, pattern in ((0.0, [0] * 8), (1.0, [1] * 8), (0.25, [0, 0, 0, 1] * 2), (0.5, [0, 1] * 4)):
        wanted = settings(folder, train={"retrieval": share})
        _, data, _ = ready(wanted)
        rng = np.random.default_rng(0)
        assert [finetune.draw(data, wanted, rng, update).answers for update in range(8)] == [bool(one) for one in pattern]


def test_batches_ask_for_what_is_there(folder: Path) -> None:
    wanted = settings(folder, train={"batch": 2, "accumulate": 3})
    base, data, _ = ready(wanted)
    rng = np.random.default_rng(0)
    text, prompts = finetune.draw(data, wanted, rng, 0), finetune.draw(data, wanted, rng, 1)
    assert text.tokens.shape == (6, 24)
    assert (text.tokens[:, 0] == base.tokenizer.bos_token_id).all()
    assert len(text.positions) == 10 == len(set(text.positions.tolist()))
    assert bool((text.positions.diff() > 0).all()) and text.positions.min() >= 0 and text.positions.max() < 23
    assert prompts.tokens.shape[0] == 6
    words = base.tokenizer.convert_ids_to_tokens(prompts.tokens[0].tolist())
    for position in prompts.positions.tolist():
        assert words[position] == ":"
        found = [i for i, word in enumerate(words[: position - 1]) if word == words[position - 1]]
        assert words[found[0] + 2] == words[position + 1], "the record gives the answer"
    every = finetune.draw(data, settings(folder, train={"positions": 0}), rng, 0)
    assert every.positions.tolist() == list(range(23))


def test_held_out_text_is_never_drawn(folder: Path) -> None:
    wanted = settings(folder)
    _, data, _ = ready(wanted)
    rng = np.random.default_rng(0)
    train_rows = {tuple(data.text.train[i : i + 5]) for i in range(len(data.text.train) - 4)}
    held_rows = {tuple(data.text.held_out[i : i + 5]) for i in range(len(data.text.held_out) - 4)}
    assert not train_rows & held_rows
    for _ in range(20):
        row = finetune.draw(data, wanted, rng, 0).tokens[0, 1:].numpy()
        assert all(tuple(row[i : i + 5]) in train_rows for i in range(len(row) - 4))


# distillation --------------------------------------------------------------------------------------------------------------------------------


def test_divergence_of_equal_models_is_zero_and_by_hand_otherwise(folder: Path) -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    other = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(1))
    assert float(divergence(logits, logits)) == pytest.approx(0, abs=1e-6)
    for temperature in (1.0, 2.5):
        p, q = (F.softmax(x / temperature, dim=-1) for x in (other, logits))
        by_hand = (p * (p.log() - q.log())).sum(-1).mean() * temperature**2
        assert float(divergence(logits, other, temperature)) == pytest.approx(float(by_hand), rel=1e-5)
    base, data, attached = ready(settings(folder))
    attached.detach()
    late = attach(base.model, VariantConfig(window=64, stride=64))  # its first window is not complete yet
    wanted = settings(folder, train={"positions": 0})
    run = finetune._Run(late, data, wanted, [{"params": list(late.compressors.parameters()), "peak": 1.0, "weight_decay": 0.0}])
    run.teacher = finetune._teacher(late, wanted.train)
    batch = finetune.draw(data, wanted, run.rng, 0)
    teacher = run._wanted(batch.tokens, batch.positions)
    assert teacher is not None
    assert float(divergence(logits_at(late, batch.tokens, batch.positions).detach(), teacher)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("what", ["compressor", "attention", "all"])
def test_the_teacher_is_the_untouched_model(folder: Path, what: str) -> None:
    wanted = settings(folder, train={"what": what, "model_rate": 0.1})
    base, data, attached = ready(wanted)
    ids, every = torch.from_numpy(data.text.train[None, :20]), torch.arange(20)
    with attached.removed(), torch.no_grad():
        untouched = base.model(input_ids=ids, use_cache=False).logits
    seen = []
    make = finetune._teacher

    def spied(*args: Any) -> Any:
        seen.append(make(*args))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "_teacher", spied)
        fine_tune(attached, data, wanted)
    assert (seen[0].model is base.model) == (what == "compressor")
    with attached.removed(), torch.no_grad():
        assert torch.allclose(logits_at(seen[0], ids, every), untouched, atol=1e-5)
        assert torch.equal(base.model(input_ids=ids, use_cache=False).logits, untouched) == (what == "compressor")


def test_without_distillation_no_teacher_runs(folder: Path) -> None:
    _, done = tuned(folder, train={"distill": 0.0, "text_loss": 1.0})
    assert [step.divergence for step in done.steps] == [None] * 6
    assert [step.loss for step in done.steps] == [step.cross_entropy for step in done.steps]
    _, weighted = tuned(folder, train={"distill": 0.5, "text_loss": 2.0, "answer_loss": 3.0})
    for step in weighted.steps:
        assert step.divergence is not None
        assert step.loss == pytest.approx((3 if step.answers else 2) * step.cross_entropy + 0.5 * step.divergence, rel=1e-5)


def test_the_coverage_loss_is_added(folder: Path) -> None:
    plain = dataclasses.replace(VARIANT, coverage="entropy", coverage_weight=0.5)
    _, without = tuned(folder)
    _, covered = tuned(folder, variant=plain)
    wanted = settings(folder, variant=plain)
    _, data, attached = ready(wanted)
    attached.collect_gates(True)
    batch = finetune.draw(data, wanted, np.random.default_rng([0, 3]), 0)
    logits_at(attached, batch.tokens, batch.positions)
    extra = float(train.coverage_loss(attached, plain).detach())
    assert covered.steps[0].loss == pytest.approx(without.steps[0].loss + extra, rel=1e-5)


# precision -----------------------------------------------------------------------------------------------------------------------------------


def test_gates_stay_fp32_under_a_bf16_model(folder: Path) -> None:
    wanted = settings(folder, dtype="bfloat16")
    base, data, attached = ready(wanted)
    before = tensors(attached)
    fine_tune(attached, data, wanted)
    assert {parameter.dtype for parameter in base.model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in attached.compressors.parameters()} == {torch.float32}
    after = tensors(attached)
    assert all(torch.equal(after[name], before[name]) != name.startswith("compressor") for name in after)
    one = tensors(attached)["compressor.0.gate_weight"]
    assert not torch.equal(one, one.bfloat16().float()), "steps finer than bf16"


def test_recomputing_and_watching_change_nothing(folder: Path) -> None:
    plain, done = tuned(folder)
    again, _ = tuned(folder, train={"recompute": True})
    seen, watched = tuned(folder, train={"watch_every": 2})
    for name, tensor in plain.items():
        assert torch.allclose(tensor, again[name], atol=1e-6), name
        assert torch.equal(tensor, seen[name]), name
    assert done.watched == ()
    assert [one.update for one in watched.watched] == [2, 4, 6]
    assert all(0 <= one.a_min <= one.mean <= 1 for one in watched.watched)


# resume --------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "variant"),
    [
        ("compressor", VARIANT),
        ("attention", dataclasses.replace(VARIANT, coverage="entropy", coverage_weight=0.1)),
        ("all", dataclasses.replace(VARIANT, gate="vector", payload="per_offset")),
    ],
)
@pytest.mark.parametrize("pause", [1, 3, 4])
def test_going_on_is_equal_to_the_bit(folder: Path, tmp_path: Path, what: str, variant: VariantConfig, pause: int) -> None:
    changes: dict[str, Any] = {"variant": variant, "train": {"what": what, "checkpoint_every": 3, "watch_every": 4}}
    whole, expected = tuned(folder, **changes)
    wanted = settings(folder, **changes)
    base, data, attached = ready(wanted)
    path = tmp_path / "checkpoint.pt"
    first = fine_tune(attached, data, wanted, base_sha256=base.sha256, checkpoint=path, until=pause)
    assert first.updates == pause
    base, data, attached = ready(wanted, seed=123)  # as in another process: other gates until the checkpoint is read
    torch.rand(7)
    done = fine_tune(attached, data, wanted, base_sha256=base.sha256, checkpoint=path)
    assert done.steps == expected.steps
    assert done.watched == expected.watched
    assert done.tokens == expected.tokens
    found = tensors(attached)
    assert all(torch.equal(tensor, found[name]) for name, tensor in whole.items())
    again = fine_tune(attached, data, wanted, base_sha256=base.sha256, checkpoint=path)
    assert again.steps == expected.steps, "a finished run does nothing more"
    assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors(attached).items())


def test_a_checkpoint_is_written_every_so_often(folder: Path, tmp_path: Path) -> None:
    wanted = settings(folder, train={"checkpoint_every": 2, "updates": 5})
    _, data, attached = ready(wanted)
    path, written = tmp_path / "checkpoint.pt", []

    def note(progress: finetune.Progress) -> None:
        written.append((progress.update, path.is_file() and torch.load(path, weights_only=True)["counts"]["update"]))

    fine_tune(attached, data, wanted, checkpoint=path, on_update=note)
    assert written == [(1, False), (2, False), (3, 2), (4, 2), (5, 4)]
    assert torch.load(path, weights_only=True)["counts"]["update"] == 5
    assert {one.name for one in tmp_path.iterdir()} == {"checkpoint.pt"}


def test_a_checkpoint_of_something_else_is_refused(folder: Path, tmp_path: Path) -> None:
    wanted = settings(folder)
    base, data, attached = ready(wanted)
    path = tmp_path / "checkpoint.pt"
    fine_tune(attached, data, wanted, base_sha256=base.sha256, checkpoint=path, until=1)
    for other, sha256 in ((dataclasses.replace(wanted, seed=1), base.sha256), (wanted, "00")):
        with pytest.raises(ConfigError, match=r"^\S+checkpoint.pt is the checkpoint of another config, base or text; choose another folder$"):
            fine_tune(attached, data, other, base_sha256=sha256, checkpoint=path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"^\S+checkpoint.pt is no checkpoint that can be read: [^\n]+; delete it to start again$"):
        fine_tune(attached, data, wanted, base_sha256=base.sha256, checkpoint=path)


# budgets and refusals ------------------------------------------------------------------------------------------------------------------------


def test_minutes_end_the_training(folder: Path) -> None:
    _, done = tuned(folder, train={"minutes": 0.003, "updates": 10**6})
    assert 0.18 <= done.seconds < 5
    assert 1 <= done.updates < 10**4


def test_a_loss_that_is_no_number_stops_it(folder: Path) -> None:
    wanted = settings(folder)
    _, data, attached = ready(wanted)
    with torch.no_grad():
        next(attached.compressors.parameters()).fill_(math.nan)
    before = tensors(attached)
    with pytest.raises(train.Diverged, match=r"^fine_tune: the loss is nan at update 1; lower the learning rates$"):
        fine_tune(attached, data, wanted)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(attached).items() if not tensor.isnan().any())
    assert all(parameter.requires_grad for parameter in attached.model.parameters())


def test_nothing_to_train_is_said(folder: Path) -> None:
    uniform = dataclasses.replace(VARIANT, gate="uniform")
    wanted = settings(folder, variant=uniform)
    _, data, attached = ready(wanted)
    message = "^FineTuneConfig.variant.gate must be one that learns, or TuneConfig.what more than the compressor, got 'uniform'$"
    with pytest.raises(ConfigError, match=message):
        fine_tune(attached, data, wanted)
    attached.detach()
    _, done = tuned(folder, variant=uniform, train={"what": "attention"})
    assert done.updates == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"length": 2049}}, "TuneConfig.length must have at most the model's 2048 positions, got 2049 tokens"),
        ({"text": {"length": 2050}}, "TextConfig.length must have at most the model's 2048 positions, got 2050 tokens"),
        ({"words": {"filler": 2200}}, r"WordsConfig: a prompt must have at most the model's 2048 positions, got 22\d\d tokens"),
        ({"text": {"length": 200}}, r"TextConfig.path: \S+text.txt must have at least 199 tokens held out \(held_out = 0.1\), got 62"),
        ({"train": {"length": 1000}}, r"TextConfig.path: \S+text.txt must have at least 999 tokens to train on \(held_out = 0.1\), got 558"),
    ],
)
def test_what_does_not_fit_is_said(folder: Path, changes: dict[str, Any], message: str) -> None:
    plain = config.to_dict(settings(folder))
    wanted = config_files.from_dict(FineTuneConfig, plain | {part: plain[part] | change for part, change in changes.items()})
    with pytest.raises(ConfigError, match=f"^{message}$"):
        ready(wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": {"compress": False}}, "FineTuneConfig.variant.compress must be true: there is nothing to train for full attention, got False"),
        ({"dtype": "bfloat16", "train": {"what": "all"}}, "FineTuneConfig.dtype must be float32 while .*, got 'bfloat16'"),
        ({"train": {"distill": 0.0}}, "TuneConfig.text_loss must be above 0 while text is trained on without distillation, got 0.0"),
        ({"train": {"distill": 0.0, "text_loss": 1, "answer_loss": 0}}, "TuneConfig.answer_loss must be above 0 while .*, got 0.0"),
        ({"train": {"updates": 0}}, "TuneConfig.updates must be at least 1, got 0"),
        ({"train": {"minutes": 0}}, "TuneConfig.minutes must be above 0, got 0.0"),
        ({"train": {"retrieval": 1.5}}, "TuneConfig.retrieval must be between 0 and 1, got 1.5"),
        ({"train": {"what": "gates"}}, "TuneConfig.what: .*, got 'gates'"),
        ({"train": {"learning_rate": 1}}, "TuneConfig.learning_rate is not a known key; .*"),
        ({"text": {"path": "x", "held_out": 1.0}}, "TextConfig.held_out must be above 0 and below 1, got 1.0"),
        ({"text": {}}, "TextConfig.path is missing"),
        ({"variant": {"window": 300}}, r"TuneConfig.length must be above the window \(300\): nothing shorter is compressed, got 256"),
        ({"score": {"period": 3}}, r"ScoreConfig.period must be a multiple of the stride \(8\), got 3"),
        ({"new_tokens": 0}, "FineTuneConfig.new_tokens must be at least 1, got 0"),
    ],
)
def test_a_bad_config_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        config_files.from_dict(FineTuneConfig, {"model": "x", "text": {"path": "y"}} | changes)


def test_configs_round_trip(folder: Path) -> None:
    wanted = settings(folder)
    assert config_files.from_dict(FineTuneConfig, config.to_dict(wanted)) == wanted
    assert config_files.replace(wanted, train=dataclasses.replace(TRAIN, minutes=2.0)).train.minutes == 2.0
    assert config.content_hash(wanted) != config.content_hash(config_files.replace(wanted, seed=1))
    assert config_files.from_dict(TuneConfig, {}) == TuneConfig()


def test_a_model_that_cannot_carry_a_variant_is_refused(folder: Path) -> None:
    base, _, attached = ready(settings(folder))
    attached.detach()
    base.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match=r"^attach: attn_implementation='flash_attention_2' takes no mask over summaries; load the model with 'sdpa'$"):
        attach(base.model, VARIANT)
