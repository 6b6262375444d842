"""The training of a base: cut short in any stage of the curriculum it goes on to the same bits, and from no checkpoint but its own."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from mitigate import bases
from mitigate.checkpoint import read_checkpoint, write_checkpoint
from mitigate.cli import searches
from mitigate.config import BaseConfig, TaskConfig, content_hash

CONFIG = BaseConfig(
    hidden=32,
    heads=2,
    kv_heads=2,
    head_dim=8,
    intermediate=48,
    rope_theta=100.0,
    updates=120,
    settle=20,
    learning_rate=5e-3,
    tokens_per_batch=64,
    task=TaskConfig(keys=8, names=4, filler_tokens=3, records=8, queries=2, filler=8, filler_in_sequence=12),
)
STAGES = [(2, False), (4, False), (8, False), (8, True)]  # records, and whether the rate decays already


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that an untrained model passes after a few updates, so that the whole curriculum takes half a second."""
    monkeypatch.setattr(bases, "PASS_ACCURACY", 0.3)
    monkeypatch.setattr(bases, "PERFECT", 0.0)
    monkeypatch.setattr(bases, "CHECKPOINT_EVERY", 3)


class Cut(BaseException):
    """Stands for the kill."""


class Trainer:
    """Trains, and counts updates; `cut_in` is the one that does not come to its step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.updates, self.cut_in = 0, 0
        self._loss = bases._loss
        monkeypatch.setattr(bases, "_loss", self._watched)

    def _watched(self, *args: Any, **options: Any) -> Any:
        self.updates += 1
        if self.updates == self.cut_in:
            raise Cut
        return self._loss(*args, **options)

    def train(self, path: Path | None = None, config: BaseConfig = CONFIG) -> dict[str, torch.Tensor]:
        """Weights at the end; `updates` counts from the checkpoint's on."""
        state = None if path is None else read_checkpoint(path, content_hash(config))
        self.updates = state["done"] if state else 0
        return bases.train(config, checkpoint=path).state_dict()

    def cut(self, update: int, path: Path, config: BaseConfig = CONFIG) -> None:
        self.cut_in = update
        with pytest.raises(Cut):
            self.train(path, config)
        self.cut_in = 0


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    return Trainer(monkeypatch)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], list[int]]:
    """The updates of each stage, numbered from 1."""
    found: dict[tuple[int, bool], list[int]] = {stage: [] for stage in STAGES}
    write, path = bases._Run.write, tmp_path_factory.mktemp("places") / "checkpoint.pt"

    def note(run: bases._Run, path: Path) -> None:
        found[run.records, run.settling > 0].append(run.done + 1)
        write(run, path)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("PASS_ACCURACY", 0.3), ("CHECKPOINT_EVERY", 1)):
            patch.setattr(bases, name, value)
        patch.setattr(bases._Run, "write", note)
        bases.train(CONFIG, checkpoint=path)
    found[STAGES[0]].insert(0, 1)
    every = list(itertools.chain(*found.values()))
    assert every == list(range(1, len(every) + 1))
    assert all(len(updates) > 6 for updates in found.values())
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_cut_short_it_goes_on_to_the_same_bits(trainer: Trainer, places: dict[tuple[int, bool], list[int]], tmp_path: Path, stage: tuple[int, bool]) -> None:
    whole = trainer.train()
    updates, path = places[stage], tmp_path / "checkpoint.pt"
    for update in (updates[0], updates[len(updates) // 2], updates[-1]):  # one after the other: the second goes on from where the first was cut
        trainer.cut(update, path)
        state = read_checkpoint(path, content_hash(CONFIG))
        assert (state["done"] if state else 0) == (update - 1) // 3 * 3
        torch.manual_seed(update)  # as in another process
    assert same(trainer.train(path), whole)
    assert trainer.updates == places[8, True][-1], "it went on, and did no update twice but those after the checkpoint"


def test_checkpoints_alone_change_nothing(trainer: Trainer, tmp_path: Path) -> None:
    assert same(trainer.train(tmp_path / "checkpoint.pt"), trainer.train())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_the_cache_holds_a_checkpoint_until_the_base_is_there(trainer: Trainer, places: dict[tuple[int, bool], list[int]], tmp_path: Path) -> None:
    whole = bases.load(CONFIG, tmp_path / "whole")
    log: list[str] = []
    folder = tmp_path / "cut" / "bases" / content_hash(CONFIG)[:16]
    for update in (places[stage][4] for stage in STAGES):
        state = read_checkpoint(folder / bases.CHECKPOINT_FILE, content_hash(CONFIG))
        trainer.updates, trainer.cut_in = state["done"] if state else 0, update
        with pytest.raises(Cut):
            bases.load(CONFIG, tmp_path / "cut")
        assert {path.name for path in folder.iterdir()} == {"lock", "checkpoint.pt"}
    trainer.cut_in = 0
    found = bases.load(CONFIG, tmp_path / "cut", log=log.append)
    assert log[0].startswith("base: going on after update ")
    assert (found.sha256, found.accuracy, found.cached) == (whole.sha256, whole.accuracy, False)
    assert {path.name for path in folder.iterdir()} <= {"lock", "model.safetensors", "base.json"}
    assert bases.files(CONFIG, tmp_path / "cut") == bases.files(CONFIG, tmp_path / "whole")
    (folder / bases.CHECKPOINT_FILE).write_bytes(b"left by a kill between the base and its removal")
    assert bases.load(CONFIG, tmp_path / "cut").cached
    assert not (folder / bases.CHECKPOINT_FILE).exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", "other seed", "cut", "flipped"])
def test_a_checkpoint_that_does_not_fit_is_not_looked_at(trainer: Trainer, tmp_path: Path, content: bytes | str) -> None:
    whole, path = trainer.train(), tmp_path / "checkpoint.pt"
    every = trainer.updates
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        trainer.cut(20, path, dataclasses.replace(CONFIG, seed=1) if content == "other seed" else CONFIG)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes({"cut": data[:-1000], "flipped": data}.get(content, path.read_bytes()))
    trainer.updates = 0
    assert same(bases.train(CONFIG, checkpoint=path).state_dict(), whole)
    assert trainer.updates == every, "from the start"


def test_a_byte_wrong_anywhere_is_seen(tmp_path: Path) -> None:
    path, state = tmp_path / "checkpoint.pt", {"a": torch.arange(300.0), "b": {"c": 1 << 100, "d": [0.1]}}
    write_checkpoint(path, "mine", state)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        for data in (whole[:place], whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :]):
            path.write_bytes(data)
            found = read_checkpoint(path, "mine")
            assert found is None or (torch.equal(found["a"], state["a"]) and found["b"] == state["b"]), place
    path.write_bytes(whole)
    assert read_checkpoint(path, "mine") is not None
    assert read_checkpoint(path, "another's") is None
    torch.save([1], path)
    assert read_checkpoint(path, "mine") is None


def test_a_search_trains_its_base_with_the_threads_it_may_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before, seen = torch.get_num_threads(), list[int]()
    load = bases.load

    def note(*args: Any, **options: Any) -> bases.Base:
        seen.append(torch.get_num_threads())
        torch.set_num_threads(1)
        return load(*args, **options)

    monkeypatch.setattr(bases, "load", note)
    for wanted in (2, 1):
        monkeypatch.setenv("OMP_NUM_THREADS", str(wanted))
        searches._prepare_base(CONFIG, tmp_path)
        assert torch.get_num_threads() == before
    assert seen == [2, 1]
