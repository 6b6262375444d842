"""A study of two real trials on a base that learns in seconds, run inline."""

from __future__ import annotations

from pathlib import Path

QUICK = """
name = "tiny"
trials = 3
workers = 1
anchors = ["full", "w4s4"]

[space]
stride = [2, 4]
bypass = ["none", "last"]

[trial]
seed = 1

[trial.base]
hidden = 32
heads = 2
kv_heads = 2
head_dim = 8
intermediate = 48
rope_theta = 100.0
updates = 200
settle = 80
learning_rate = 5e-3
tokens_per_batch = 64
task = {keys = 8, names = 12, filler_tokens = 3, records = 1, queries = 2, filler = 8, filler_in_sequence = 12}

[trial.task]
keys = 8
names = 12
filler_tokens = 3
records = 4
queries = 3
filler = 9
filler_in_sequence = 15

[trial.train]
updates = 6
batch = 8
warmup = 2

[trial.score]
period = 4
prompts = 6
replicates = 50

[trial.cost]
context = 21
batch = 2
steps = 2
repeats = 2
"""


def write_config(folder: Path, text: str = QUICK) -> Path:
    """The search config as a file in `folder`."""
    path = folder / "search.toml"
    path.write_text(text, encoding="utf-8")
    return path
