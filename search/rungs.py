"""Which stage of which trial comes next: rungs, brackets, and costs at the end.

A trial without rungs, and every anchor, is trained whole, scored, and then waits for its costs to be measured. Others pause at each rung until all trials of
their bracket have reached it; those that are not promoted stop there. A bracket takes in trials until it is full, or until no more will come, or until the
first decision in it. What was decided, and beside whom, is recorded in the study before it is acted on; all else is read off the files of the trials.
"""

from __future__ import annotations

from mitigate.rows import Row
from mitigate.search.promotion import Candidate, promoted
from mitigate.search.study import Proposal, StudyOwner
from mitigate.search.workers import read_result, write_result
from mitigate.stage import Stage


class Schedule:
    """The open trials of a study: proposed and not told."""

    def __init__(self, owner: StudyOwner) -> None:
        self.owner = owner
        self._rungs, self._trial = owner.config.rungs, owner.config.trial
        self.last = len(self._rungs.updates)  # number of the rung with the whole budget
        self._open: dict[int, Proposal] = {}
        self._out: dict[int, Stage] = {}  # submitted
        self._rows: dict[tuple[int, int], Row] = {}
        for proposal in owner.running():
            self.add(proposal)

    def add(self, proposal: Proposal) -> None:
        """Take in a trial, and what it has on disk."""
        self._open[proposal.number] = proposal
        for rung in range(self.last + 1):
            self._row(proposal.number, rung)

    def next_bracket(self) -> int | None:
        """The bracket of the next proposal; None without rungs."""
        if not self._rungs.updates:
            return None
        brackets = self.owner.brackets()
        if not brackets:
            return 0
        current = max(brackets)
        takes_in = len(brackets[current]) < self._rungs.bracket and not self._decided(brackets[current])
        return current if takes_in else current + 1

    def ready(self) -> tuple[Proposal, Stage] | None:
        """A trial to train and score further: the highest rung first, then the lowest number."""
        waiting = [(proposal, stage) for proposal in self._open.values() if (stage := self._stage(proposal)) is not None and stage.kind == "score"]
        return min(waiting, key=lambda pair: (-pair[1].rung, pair[0].number), default=None)

    def without_cost(self) -> list[tuple[Proposal, Stage]]:
        """Trials that lack nothing but the measurement of their costs."""
        return [(proposal, stage) for proposal in self._open.values() if (stage := self._stage(proposal)) is not None and stage.kind == "cost"]

    def before(self, number: int, stage: Stage) -> dict[str, str]:
        """The Row that a stage of a trial goes on from, by the name of its file; empty for a trial that has none."""
        rung = stage.rung if stage.kind == "cost" else stage.rung - 1
        row = self._row(number, rung) if rung >= 0 else None
        return {} if row is None else {Stage(rung=rung).scored_file: row.to_json()}

    def submitted(self, number: int, stage: Stage) -> None:
        """A stage is under way."""
        self._out[number] = stage

    def ended(self, number: int) -> None:
        """It is not any more; its Row is on disk."""
        stage = self._out.pop(number)
        self._row(number, stage.rung)

    def told(self, number: int) -> None:
        """A trial has its result."""
        self._open.pop(number, None)

    def updates(self) -> int:
        """Fine-tuning updates that the study's trials have done, those under way counted whole."""
        finished = sum(row.updates for row in self.owner.rows.values())
        return finished + sum(self._reached(number) for number in self._open)

    def settle(self, *, closed: bool) -> list[Row]:
        """Decide what can be decided; returns the results of the trials that stop, written to their folders.

        Args:
            closed: no more trials will come, so that a bracket that is not full is as full as it gets.
        """
        stopped = []
        for bracket, numbers in sorted(self.owner.brackets().items()):
            if not any(number in self._open for number in numbers):
                continue
            del bracket
            whole = closed or len(numbers) >= self._rungs.bracket or self._decided(numbers)
            for rung in range(self.last):
                members = [n for n in numbers if rung == 0 or self.owner.decision(n, rung - 1)]
                if not whole or not all(self._has_settled(n, rung) for n in members):
                    break
                self._decide(members, rung)
                stopped += [self._stop(n, rung) for n in members if n in self._open and self.owner.decision(n, rung) is False]
        return stopped

    def _decide(self, members: list[int], rung: int) -> None:
        if all(self.owner.decision(n, rung) is not None for n in members if n in self._open):
            return
        rows = {n: row for n in members if (row := self._row(n, rung)) is not None and not self._failed(n)}
        going = set(promoted([candidate(row, self.owner.kept(n)) for n, row in rows.items()], eta=self._rungs.eta))
        for number in rows:
            self.owner.decide(number, rung, promoted=number in going, members=sorted(rows))

    def _stop(self, number: int, rung: int) -> Row:
        row = self._row(number, rung)
        assert row is not None
        folder = self.owner.trial_folder(number)
        write_result(folder, row.model_copy(update={"status": "stopped"}))
        found = read_result(folder)
        assert found is not None
        return found

    def _stage(self, proposal: Proposal) -> Stage | None:
        """What an open trial does next; None while it waits for others, or is under way."""
        number = proposal.number
        if number in self._out:
            return None
        device = "cuda" if self.owner.config.resources.gpus else "cpu"
        if self._row(number, self.last) is not None:
            return Stage(kind="cost", rung=self.last, device=device)
        if proposal.bracket is None:
            return self._score(self.last, device)
        reached = max((rung for rung in range(self.last) if self._row(number, rung) is not None), default=-1)
        return self._score(reached + 1, device) if reached < 0 or self.owner.decision(number, reached) else None

    def _score(self, rung: int, device: str) -> Stage:
        if rung < self.last:
            prompts = self._rungs.prompts[rung] if self._rungs.prompts else None
            return Stage(rung=rung, updates=self._rungs.updates[rung], prompts=prompts, device=device)
        return Stage(rung=rung, updates=self._trial.train.updates if self.last else None, device=device)

    def _row(self, number: int, rung: int) -> Row | None:
        if (number, rung) not in self._rows:
            row = read_result(self.owner.trial_folder(number), Stage(rung=rung).scored_file)
            if row is None:
                return None
            self._rows[number, rung] = row
        return self._rows[number, rung]

    def _reached(self, number: int) -> int:
        stage = self._out.get(number)
        if stage is not None and stage.kind == "score":
            return self._trial.train.updates if stage.updates is None else stage.updates
        return max((row.updates for rung in range(self.last + 1) if (row := self._row(number, rung)) is not None), default=0)

    def _failed(self, number: int) -> bool:
        row = self.owner.rows.get(number)
        return row is not None and row.status == "infeasible"

    def _has_settled(self, number: int, rung: int) -> bool:
        return self._failed(number) or self._row(number, rung) is not None

    def _decided(self, numbers: list[int]) -> bool:
        return any(self.owner.decision(n, 0) is not None for n in numbers)


def candidate(row: Row, kept: float) -> Candidate:
    """What promotion looks at of a trial scored at a rung."""
    from mitigate import pareto

    assert row.trial is not None
    mean, a_min = pareto.accuracy_intervals(row)
    return Candidate(number=row.trial, kept=kept, mean=mean, a_min=a_min)


def derived_promotions(owner: StudyOwner) -> tuple[int, list[str]]:
    """How many promotions of a study were derived again from the Rows of its rungs, and in a line each those that differ from the record."""
    count, wrong = 0, []
    for trial in owner.trials():
        for rung in range(len(owner.config.rungs.updates)):
            record = trial.user_attrs.get(f"rung:{rung}")
            if record is None:
                continue
            count += 1
            rows = {n: read_result(owner.trial_folder(n), Stage(rung=rung).scored_file) for n in record["members"]}
            missing = [n for n, row in rows.items() if row is None or n >= owner.total]
            if missing:
                wrong.append(f"trial {trial.number}, rung {rung}: the Rows or proposals of trials {', '.join(map(str, missing))} are missing")
                continue
            going = promoted([candidate(row, owner.kept(n)) for n, row in rows.items() if row is not None], eta=owner.config.rungs.eta)
            if (trial.number in going) != record["promoted"]:
                wrong.append(f"trial {trial.number}, rung {rung}: recorded {'promoted' if record['promoted'] else 'stopped'}, derived the other")
    return count, wrong
