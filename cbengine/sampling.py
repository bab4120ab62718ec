"""Per-request sampling parameters."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

from cbengine.errors import InvalidRequestError

_MAX_SEED = 2**64 - 1
# Numbers beyond these say no more than these do (no vocabulary, answer or temperature gets there), and are stored as
# them: the engine keeps parameters in arrays of int32, int64 and float32.
_MAX_INT = 2**31 - 1
_MAX_FLOAT = 3.4e38


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Every field is per request and may differ between requests of one batch.

    `None` means "the default": the model's own `generation_config` where it has one, else the value named below. Meanings
    are those of `transformers.GenerationConfig` except where said.

    Raises:
        InvalidRequestError: a value is outside what its field allows.
    """

    max_new_tokens: int | None = None
    """Most tokens to generate, at least 1. Default: what the model's context and the cache leave room for."""
    min_new_tokens: int = 0
    """No stop or end-of-sequence token is sampled before this many tokens were."""
    temperature: float | None = None
    """0 = greedy (always the most likely token). Default 1.0, or 0 where the model's config says `do_sample=False`."""
    top_k: int | None = None
    """Keep the k most likely tokens (ties with the last one stay); 0 = all. Default 0."""
    top_p: float | None = None
    """Keep the smallest set of most likely tokens whose probability reaches p, in [0, 1], at least one. Default 1.0."""
    min_p: float | None = None
    """Drop tokens less likely than `min_p` times the most likely one, in [0, 1]. Default 0.0."""
    seed: int | None = None
    """Same seed, same tokens, whatever else is in the batch. In [0, 2**64). Default: a fresh one for each request."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, besides the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens. `stop_token_ids` still end the answer."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer where they first appear in its text (one string may be given as it is). Source: the
    OpenAI API, and `stop_strings` of transformers. Not looked for in the first `min_new_tokens` tokens."""
    include_stop_str_in_output: bool = False
    """Let the stop string that ended the answer be part of its text. Source: vLLM."""

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        put("max_new_tokens", _integer("max_new_tokens", self.max_new_tokens, low=1, optional=True))
        put("min_new_tokens", _integer("min_new_tokens", self.min_new_tokens))
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequestError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}; "
                "lower the first or raise the second"
            )
        put("min_new_tokens", min(self.min_new_tokens, _MAX_INT))
        put("temperature", _number("temperature", self.temperature, high=None))
        put("top_k", _integer("top_k", self.top_k, optional=True))
        if self.top_k is not None:
            put("top_k", min(self.top_k, _MAX_INT))
        put("top_p", _number("top_p", self.top_p, high=1.0))
        put("min_p", _number("min_p", self.min_p, high=1.0))
        put("seed", _integer("seed", self.seed, high=_MAX_SEED, optional=True))
        put("stop_token_ids", _token_ids(self.stop_token_ids))
        _flag("ignore_eos", self.ignore_eos)
        put("stop", _strings("stop", self.stop))
        _flag("include_stop_str_in_output", self.include_stop_str_in_output)

    def merged(self, **overrides: Any) -> SamplingParams:
        """A copy with some fields replaced. Raises `InvalidRequestError` for a field that does not exist."""
        if not overrides:
            return self
        unknown = sorted(set(overrides) - _NAMES)
        if unknown:
            raise InvalidRequestError(
                f"unknown sampling parameter {', '.join(unknown)}; known are {', '.join(sorted(_NAMES))}"
            )
        return replace(self, **overrides)

    def resolved(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """A copy in which every `None` but `max_new_tokens` and `seed` has a value: the model's default, else ours."""
        values: dict[str, Any] = {}
        for name, fallback in _FALLBACKS.items():
            if getattr(self, name) is None:
                default = defaults.get(name)
                values[name] = fallback if default is None else default
        if self.max_new_tokens is None and defaults.get("max_new_tokens") is not None:
            values["max_new_tokens"] = max(defaults["max_new_tokens"], self.min_new_tokens)
        return replace(self, **values) if values else self


_NAMES = {f.name for f in fields(SamplingParams)}
_FALLBACKS: dict[str, float | int] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def _integer(name: str, value: object, *, low: int = 0, high: int | None = None, optional: bool = False) -> int | None:
    """`value` as an int in [low, high]. Raises `InvalidRequestError`."""
    if value is None and optional:
        return None
    # Whatever Python would index a list with (numpy's integers too) is an integer; a bool does not count as one.
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise InvalidRequestError(f"{name} must be an integer{' or None' if optional else ''}, got {value!r}")
    if number < low or (high is not None and number > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequestError(f"{name} must be {allowed}, got {value!r}")
    return number


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be True or False, got {value!r}")


def _token_ids(value: object) -> tuple[int | None, ...]:
    """`value` as token ids. Raises `InvalidRequestError`."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"stop_token_ids must be a sequence of token ids, got {value!r}")
    return tuple(_integer("every one of stop_token_ids", i) for i in cast(Iterable[object], value))


def _strings(name: str, value: object) -> tuple[str, ...]:
    """`value` as a tuple of strings, none of them empty; a string counts as one. Raises `InvalidRequestError`."""
    if isinstance(value, str):
        value = (value,)
    if value is None:
        value = ()
    strings = tuple(cast(Iterable[object], value)) if isinstance(value, (list, tuple)) else None
    if strings is None or not all(isinstance(item, str) and item for item in strings):
        raise InvalidRequestError(f"{name} must be a string or a list of strings, none of them empty, got {value!r}")
    return cast(tuple[str, ...], strings)


def _number(name: str, value: object, *, high: float | None) -> float | None:
    """`value` as a finite float in [0, high], None as it is. Raises `InvalidRequestError`."""
    if value is None:
        return None
    try:
        # Text is no number, though float() would read it.
        number = None if isinstance(value, (bool, str, bytes, bytearray)) else float(value)  # type: ignore[arg-type]
    except OverflowError:  # an int beyond all floats
        number = math.inf
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
        number = None
    if number is None:
        raise InvalidRequestError(f"{name} must be a number or None, got {value!r}")
    if not math.isfinite(number) or number < 0.0 or (high is not None and number > high):
        allowed = "of at least 0" if high is None else f"from 0 to {high:g}"
        raise InvalidRequestError(f"{name} must be a finite number {allowed}, got {value!r}")
    return min(number, _MAX_FLOAT)
