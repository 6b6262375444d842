"""One step of a trial in a search: train and score up to a rung, or measure costs. Plain data that travels to a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a worker does with a trial before it comes back.

    Args:
        kind: "score": fine-tune up to `updates` and sweep the phases. "cost": measure KV bytes, memory and throughput of the model that was scored.
        rung: number of the rung, from 0; the last one has the whole budget.
        updates: fine-tuning updates to reach; None for the config's.
        prompts: logical prompts of the sweep; None for the config's.
        device: torch device that the trial runs on.
    """

    kind: Literal["score", "cost"] = "score"
    rung: int = 0
    updates: int | None = None
    prompts: int | None = None
    device: str = "cpu"

    @property
    def scored_file(self) -> str:
        """Name of the file, in the trial's folder, that holds the Row of this rung."""
        return f"rung-{self.rung}.json"
