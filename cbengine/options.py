"""What a caller may say about one request besides how it is sampled, and the keyword arguments of every way to ask."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from cbengine.config import BACKPRESSURE, EngineConfig
from cbengine.errors import InvalidRequestError
from cbengine.text.structured_spec import StructuredSpec


class RequestArguments(TypedDict, total=False):
    """Keyword arguments of `stream`, `chat`, `generate`, `generate_batch` and `as_completed`.

    The first group overrides single fields of `SamplingParams`, which documents them; the second is `RequestOptions`.
    """

    max_new_tokens: int | None
    min_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop_token_ids: tuple[int, ...] | list[int] | None
    ignore_eos: bool
    stop: str | tuple[str, ...] | list[str]
    include_stop_str_in_output: bool
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str | Sequence[int]] | None
    allowed_token_ids: Sequence[int] | None
    n: int
    structured: StructuredSpec | None
    logprobs: int | None
    prompt_logprobs: int | None

    timeout: float | None
    queue_timeout: float | None
    backpressure: str | None
    stream_buffer: int | None
    cache_salt: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Deadlines, backpressure and privacy of one request. `None`: no deadline, and the engine's own setting.

    Raises:
        InvalidRequestError: a value is outside what its field allows.
    """

    timeout: float | None = None
    """Seconds from the call in which the request must be finished, else `RequestTimeoutError`. Held by the engine thread;
    the tokens made so far stay readable."""
    queue_timeout: float | None = None
    """Seconds from the call in which it must have been scheduled for the first time."""
    backpressure: str | None = None
    """"buffer", "pause" or "abort": see `EngineConfig.backpressure`."""
    stream_buffer: int | None = None
    """See `EngineConfig.stream_buffer`."""
    cache_salt: str | None = None
    """Only requests with the same salt use each other's cached pages: a salt for each tenant keeps the time to the first
    token from telling one what another has asked."""

    def __post_init__(self) -> None:
        for name in ("timeout", "queue_timeout"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _seconds(name, getattr(self, name)))
        if self.backpressure not in (None, *BACKPRESSURE):
            raise InvalidRequestError(
                f"backpressure must be one of {', '.join(BACKPRESSURE)}, got {self.backpressure!r}"
            )
        if self.stream_buffer is not None:
            object.__setattr__(self, "stream_buffer", _tokens("stream_buffer", self.stream_buffer))
        if not isinstance(self.cache_salt, (str, type(None))):
            raise InvalidRequestError(f"cache_salt must be a string or None, got {self.cache_salt!r}")

    def resolved(self, config: EngineConfig) -> RequestOptions:
        """A copy with the engine's settings where nothing was said."""
        return RequestOptions(
            timeout=self.timeout,
            queue_timeout=self.queue_timeout,
            backpressure=self.backpressure or config.backpressure,
            stream_buffer=self.stream_buffer or config.stream_buffer,
            cache_salt=self.cache_salt,
        )


def _seconds(name: str, value: object) -> float:
    """`value`, a number of any kind (numpy's too), as a float above 0. Raises `InvalidRequestError`."""
    try:
        number = math.nan if isinstance(value, (bool, str, bytes, bytearray)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):  # OverflowError: an int beyond all floats
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidRequestError(f"{name} must be a number of seconds above 0, or None, got {value!r}")
    return number


def _tokens(name: str, value: object) -> int:
    """`value`, an integer of any kind (numpy's too), as an int of at least 1. Raises `InvalidRequestError`."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if not 1 <= number <= sys.maxsize:
        raise InvalidRequestError(
            f"{name} must be an integer of at least 1 (and at most {sys.maxsize}), or None, got {value!r}"
        )
    return number


_OPTIONS = {f.name for f in fields(RequestOptions)}


def split(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], RequestOptions]:
    """Sampling overrides, and the rest. Unknown names stay among the first, where they are refused."""
    sampling = {name: value for name, value in arguments.items() if name not in _OPTIONS}
    return sampling, RequestOptions(**{name: value for name, value in arguments.items() if name in _OPTIONS})
