"""From contents and places to token ids: ``prefix, records among filler, tail``. Nothing here knows a vocabulary; nothing is decoded or encoded.

The prefix (a BOS, a chat template's opening) is part of the prompt: positions t count every token from 0. The tail holds what follows the records up to the
last answer: separator, demonstrations, queries with their answers.

Shapes: B prompts, R records, L tokens of a record, F filler tokens, Q queries, A tokens of an answer, T tokens, P placements (= residues).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from mitigate.tasks.placement import Design, Ints, Placement


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """A batch of prompts.

    Attributes:
        tokens: int64 [B, T].
        answer_from: positions whose next token is a token of a queried name, int64 [Q, A], the same in every prompt.
        target: position of the queried record's first key token, int64 [B, Q].
    """

    tokens: Ints
    answer_from: Ints
    target: Ints

    @property
    def gold(self) -> Ints:
        """The queried names, int64 [B, Q, A]."""
        return self.tokens[:, self.answer_from + 1]


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a batch of prompts says, wherever its records stand.

    Attributes:
        prefix: int64 [X], the same in every prompt.
        records: int64 [B, R, L], in order.
        filler: int64 [B, F], in order.
        tail: int64 [B, Y].
        answers: places in the tail whose next token is a token of a queried name, int64 [Q, A].
        asked: ordinals of the queried records, int64 [B, Q].
        key_at: place of a record's first key token within it.
    """

    prefix: Ints
    records: Ints
    filler: Ints
    tail: Ints
    answers: Ints
    asked: Ints
    key_at: int = 0

    def repeated(self, times: int) -> Content:
        """Each prompt `times` times in a row."""
        records, filler, tail, asked = (np.repeat(part, times, axis=0) for part in (self.records, self.filler, self.tail, self.asked))
        return replace(self, records=records, filler=filler, tail=tail, asked=asked)


def assemble(content: Content, before_BR: Ints) -> Prompts:
    """Lay prompts out with `before_BR` filler tokens in front of each record, never decreasing along a prompt."""
    count, records, length = content.records.shape
    start_BR = length * np.arange(records) + before_BR
    body = np.empty((count, records * length + content.filler.shape[1]), dtype=np.int64)
    free = np.ones_like(body, dtype=bool)
    rows, place_BRL = np.arange(count)[:, None, None], start_BR[:, :, None] + np.arange(length)
    body[rows, place_BRL] = content.records
    free[rows, place_BRL] = False
    body[free] = content.filler.ravel()
    prefix_BX = np.broadcast_to(content.prefix, (count, len(content.prefix)))
    first = len(content.prefix)
    return Prompts(
        tokens=np.concatenate([prefix_BX, body, content.tail], axis=1),
        answer_from=first + body.shape[1] + content.answers,
        target=first + content.key_at + np.take_along_axis(start_BR, content.asked, axis=1),
    )


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Every logical prompt of a design at its P placements. Iterating makes one logical prompt at a time, a batch of P rows in no particular order.

    Args:
        design: where records stand.
        draw: the content of one logical prompt (B = 1) from its own generator and the asked ordinals [Q]. Contents are the same at every placement and depend
            on nothing but the design's seed, the protocol and the prompt's number.
        note: what a user should know about the contents, one line; empty if nothing.
    """

    design: Design
    draw: Callable[[np.random.Generator, Ints], Content]
    note: str = ""

    def __iter__(self) -> Iterator[Prompts]:
        return (prompts for prompts, _ in self.placed())

    def placed(self) -> Iterator[tuple[Prompts, Placement]]:
        """Prompts with the placement they were made from."""
        design = self.design
        for number, placement in enumerate(design):
            rng = np.random.default_rng([design.seed, number, int(design.protocol == "in_sequence")])
            content, rows = self.draw(rng, placement.asked), len(placement.before)
            yield assemble(content.repeated(rows), placement.before), placement
