"""Answers being streamed, as the views of the demo draw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from cbengine.errors import CBEngineError
from cbengine.stream import TokenStream


@dataclass(slots=True)
class Answer:
    """The answer to one prompt, while it is being made and after."""

    number: int
    """Place in the list of prompts, from 1."""
    prompt: str
    stream: TokenStream | None = None
    error: CBEngineError | None = None
    done: bool = False

    @property
    def text(self) -> str:
        return self.stream.text_so_far if self.stream is not None else ""

    @property
    def tokens(self) -> int:
        return self.stream.usage.completion_tokens if self.stream is not None else 0

    @property
    def status(self) -> str:
        """Where the request is in its life; once it has ended, how: its finish reason, or "error"."""
        if self.error is not None:
            return "error"
        if self.stream is None:
            return "pending"
        return str(self.stream.finish_reason or self.stream.status)

    @property
    def rate(self) -> float | None:
        """Tokens per second since the first token; None below two tokens."""
        seconds = self.stream.metrics.mean_itl if self.stream is not None else None
        return 1 / seconds if seconds else None

    @property
    def summary(self) -> str:
        """For example "decoding, 34 tokens, 21.3 tokens/s"."""
        if self.error is not None:
            return f"error: {self.error}"
        count = f"{self.tokens} token{'' if self.tokens == 1 else 's'}"
        parts = [self.status, count] if self.rate is None else [self.status, count, f"{self.rate:.1f} tokens/s"]
        return ", ".join(parts)


def totals(answers: Sequence[Answer], seconds: float) -> str:
    """One line about all answers together."""
    tokens = sum(answer.tokens for answer in answers)
    rate = tokens / seconds if seconds > 0 else 0.0
    return f"{len(answers)} answers, {tokens} tokens in {seconds:.1f} s: {rate:.1f} tokens/s together"


class View(Protocol):
    """Draws the answers. Used as a context manager around the time in which they grow."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def refresh(self) -> None:
        """Draw what is new since the last call."""
        ...
