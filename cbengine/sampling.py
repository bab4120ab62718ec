"""Per-request sampling parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from cbengine.errors import InvalidRequestError

_MAX_SEED = 2**64


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

    def __post_init__(self) -> None:
        _integer("max_new_tokens", self.max_new_tokens, low=1, optional=True)
        _integer("min_new_tokens", self.min_new_tokens, low=0)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequestError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}; "
                "lower the first or raise the second"
            )
        _number("temperature", self.temperature, 0.0, None)
        _integer("top_k", self.top_k, low=0, optional=True)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("seed", self.seed, low=0, high=_MAX_SEED - 1, optional=True)
        if isinstance(self.stop_token_ids, (str, bytes)) or not isinstance(self.stop_token_ids, Iterable):
            raise InvalidRequestError(f"stop_token_ids must be token ids, got {self.stop_token_ids!r}")
        ids = tuple(self.stop_token_ids)
        for i in ids:
            _integer("stop_token_ids", i, low=0)
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in ids))
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")

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
                values[name] = defaults.get(name, fallback)
        if self.max_new_tokens is None and defaults.get("max_new_tokens") is not None:
            values["max_new_tokens"] = max(defaults["max_new_tokens"], self.min_new_tokens)
        return replace(self, **values) if values else self


_NAMES = {f.name for f in fields(SamplingParams)}
_FALLBACKS: dict[str, float | int] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def _integer(name: str, value: object, *, low: int, high: int | None = None, optional: bool = False) -> None:
    if value is None and optional:
        return
    # Anything with __index__ (numpy integers) counts as an integer; a bool does not.
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidRequestError(f"{name} must be an integer{' or None' if optional else ''}, got {value!r}")
    if int(value) < low or (high is not None and int(value) > high):  # type: ignore[call-overload]
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequestError(f"{name} must be {allowed}, got {value!r}")


def _number(name: str, value: object, low: float, high: float | None) -> None:
    if value is None:
        return
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InvalidRequestError(f"{name} must be a number or None, got {value!r}") from None
    if isinstance(value, (bool, str)):
        raise InvalidRequestError(f"{name} must be a number or None, got {value!r}")
    if not math.isfinite(number) or number < low or (high is not None and number > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequestError(f"{name} must be a finite number {allowed}, got {value!r}")
