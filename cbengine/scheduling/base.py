"""What a scheduler decides with, and what it decides. Runs without a model; engine thread only."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np

from cbengine.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Budgets:
    """What one step may hold at most."""

    tokens: int
    """Query tokens."""
    requests: int
    pages_read: int
    """Pages that one forward can read, over all its requests (their block tables have to fit the step's workspace)."""
    prefill: int | None = None
    """Prompt tokens of a step that others decode in. None: as many as there is room for."""
    prefill_per_decode: float = 0
    """At least as many for each that decodes, so that a crowd of decoders does not starve the prompts."""
    prefill_over_square: int = 0
    """At least so many divided by the square of those who decode: a newcomer need not wait for few,"""
    prefill_to_few: int | None = None
    """but no more of them than this,"""
    long_prompt: int | None = None
    """and of a prompt that has more tokens than this,"""
    prefill_of_long: int = 0
    """no more than this: its reader waits for many steps anyway, and each of them holds those up who decode."""
    prefill_per_waiting: int = 0
    """And so many for each that waits to be let in,"""
    prefill_when_waiting: float = 0
    """but no more than so many for each that decodes, nor than few put up with: while many wait, it is all of them who
    matter."""
    attention_reach: int | None = None
    """Context at which a token costs twice what it costs without any: a token of a prompt counts 1 + context / reach."""

    def prefill_share(self, decodes: int, waiting: int = 0, *, of_long: bool = False) -> float:
        """Prompt tokens (without context) that a step with so many decoding rows may compute: of all prompts together, or
        of a long one."""
        if self.prefill is None or not decodes:
            return math.inf
        few, many = self.prefill_over_square / decodes**2, self.prefill_per_decode * decodes
        most = self.prefill_of_long if of_long else self.prefill_to_few
        crowd = min(self.prefill_per_waiting * waiting, self.prefill_when_waiting * decodes)
        if most is not None:
            few, crowd = min(few, most), min(crowd, most)
        return max(self.prefill, few, many, crowd)

    def cost(self, start: int) -> float:
        """What a prompt's token at this position counts."""
        return 1 + start / self.attention_reach if self.attention_reach else 1.0


@dataclass(slots=True)
class Chunk:
    """A piece of a prompt (or of a preempted request's tokens) to compute in this step."""

    request: Request
    row: int
    start: int
    count: int
    last: bool
    """It ends the known tokens, so this step samples the next one."""
    score: tuple[int, int] = (0, 0)
    """Positions (from, to) whose logits say how likely the prompt's next token was."""


@dataclass(slots=True)
class StepPlan:
    """One step: which rows compute how many tokens. Decoding rows first, one token each, then the chunks."""

    decode_rows: np.ndarray
    """int64 [D]."""
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def num_decodes(self) -> int:
        return len(self.decode_rows)

    @property
    def rows(self) -> np.ndarray:
        """int64 [S]: decoding rows, then the rows of the chunks."""
        chunks = np.fromiter((chunk.row for chunk in self.chunks), np.int64, len(self.chunks))
        return np.concatenate([self.decode_rows, chunks])

    @property
    def num_tokens(self) -> int:
        return len(self.decode_rows) + sum(chunk.count for chunk in self.chunks)

    @property
    def num_seqs(self) -> int:
        return len(self.decode_rows) + len(self.chunks)

    def __bool__(self) -> bool:
        return bool(len(self.decode_rows) or self.chunks)


class Scheduler(ABC):
    """Decides at every step what is computed. The loop calls `add` on arrival, then `plan` once a step."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """A request (new, or preempted and ready again) waits for its turn."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """The request ended, or was preempted: forget it, whatever it is doing."""

    @abstractmethod
    def plan(self) -> StepPlan:
        """The next step, its pages reserved and its rows assigned. Empty: nothing can run now."""

    @abstractmethod
    def head(self) -> Request | None:
        """The waiting request that is let in next."""

    @property
    @abstractmethod
    def num_waiting(self) -> int: ...

    @property
    @abstractmethod
    def num_running(self) -> int: ...
