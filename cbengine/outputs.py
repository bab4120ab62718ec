"""What comes out of a generation: immutable values, safe to keep and to pass between threads."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from cbengine.text.parts import Part, ReasoningPart, TextPart, ToolCallPart


class FinishReason(str, enum.Enum):
    """Why a generation ended. A `str`, so that `reason == "stop"` holds and JSON needs no help."""

    STOP = "stop"  # an end-of-sequence or stop token was sampled
    LENGTH = "length"  # max_new_tokens, the model's context or the cache's capacity was reached
    CANCELLED = "cancelled"  # the reader left, or cancel() was called
    TIMEOUT = "timeout"  # the request's deadline passed
    ERROR = "error"  # the request failed, or the engine did

    __str__ = str.__str__


class RequestStatus(str, enum.Enum):
    """Where a request is in its life (the states of the engine's state machine)."""

    PENDING = "pending"  # accepted, waiting for its first step
    PREFILLING = "prefilling"  # its prompt is being computed
    DECODING = "decoding"  # it produces tokens
    PREEMPTED = "preempted"  # gave its pages back for a while; waits with everything it has said
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    __str__ = str.__str__

    @property
    def ended(self) -> bool:
        """True in the three states that a request never leaves."""
        return self in (RequestStatus.FINISHED, RequestStatus.CANCELLED, RequestStatus.FAILED)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model thought of one token at its place."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest (token id, log probability) pairs, likeliest first, as many as were asked for."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `str(token)` is its text.

    `text` may be empty: special tokens have no text, and a character whose bytes are spread over several tokens comes
    whole with its last one. `text`, `id` and `logprob` always belong together.
    """

    text: str
    id: int
    index: int
    """Position in the answer, from 0."""
    logprob: float | None = None
    """Log probability under the model's own distribution (before temperature, penalties and filters), if asked for."""
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    """The likeliest (token id, log probability) pairs, likeliest first, as many as were asked for."""
    finish_reason: FinishReason | None = None
    """Set on the last token of an answer that ended by itself (stop, length), None on all others."""
    choice: int = 0
    """Which of the `n` answers it belongs to."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not computed because their pages were already in the cache."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Timings of one request, in seconds of `time.monotonic()`, taken where the engine hands the tokens over."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    token_times: Sequence[float] = field(default=())
    """One entry a token."""
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def queue_time(self) -> float | None:
        """From the call to the first step that computed something for it."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def ttft(self) -> float | None:
        """Time to first token, from the call."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def mean_itl(self) -> float | None:
        """Mean inter-token latency; None below two tokens."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool."""

    id: str
    name: str
    arguments: str
    """JSON text as the model wrote it, which need not be valid."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    metrics: RequestMetrics
    index: int = 0
    """Place of its prompt in a batch (`generate_batch`, `as_completed`)."""
    choice: int = 0
    """Which of the `n` answers it is."""
    choices: tuple[Completion, ...] = ()
    """With `n > 1` all answers, this one first."""
    logprobs: tuple[float, ...] | None = None
    """One a token, if they were asked for."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """For each token the likeliest (token id, logprob) pairs, if logprobs were asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One a token of the prompt, None for its first, if they were asked for."""
    parts: tuple[Part, ...] = ()
    """Of an answer in a chat: its text, reasoning and tool calls told apart, in order. `text` has all of it as it came."""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of an answer in a chat, whole."""
        names = {p.index: p for p in self.parts if isinstance(p, ToolCallPart) and p.name is not None}
        return tuple(
            ToolCall(
                head.id or "",
                head.name or "",
                "".join(p.arguments_delta for p in self.parts if isinstance(p, ToolCallPart) and p.index == index),
            )
            for index, head in names.items()
        )

    @property
    def content(self) -> str:
        """The text without reasoning and tool calls; all of it for what was no chat."""
        if not self.parts:
            return self.text
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def reasoning(self) -> str:
        """The reasoning of an answer in a chat."""
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    def __str__(self) -> str:
        return self.text
