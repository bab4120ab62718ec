"""Per-request sampling parameters."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

from cbengine.errors import InvalidRequestError
from cbengine.text.structured_spec import StructuredSpec

_MAX_SEED = 2**64 - 1
# Numbers beyond these say no more than these do (no vocabulary, answer or temperature gets there), and are stored as
# them: the engine keeps parameters in arrays of int32, int64 and float32.
_MAX_INT = 2**31 - 1
_MAX_FLOAT = 3.4e38
MAX_CHOICES = 128
"""Most answers to one prompt; the limit of the OpenAI API."""
MAX_LOGPROBS = 20
"""Most alternatives that a request may ask for at each token; the limit of the OpenAI API."""


class TokenBiases(Mapping[int, float]):
    """A mapping that stays as it is, and so may be hashed; equal to any mapping with the same items."""

    __slots__ = ("_biases",)

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._biases = dict(biases)

    def __getitem__(self, token: int) -> float:
        return self._biases[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._biases)

    def __len__(self) -> int:
        return len(self._biases)

    def __hash__(self) -> int:
        return hash(frozenset(self._biases.items()))

    def __repr__(self) -> str:
        return repr(self._biases)


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
    """Tokens that end the answer, besides the model's end-of-sequence tokens. None is taken for "none"."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens. `stop_token_ids` still end the answer."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer where they first appear in its text (one string may be given as it is). Source: the
    OpenAI API, and `stop_strings` of transformers. Not looked for in the first `min_new_tokens` tokens."""
    include_stop_str_in_output: bool = False
    """Let the stop string that ended the answer be part of its text. Source: vLLM."""
    repetition_penalty: float | None = None
    """Above 0. Logits of tokens that the prompt or the answer has: divided by it if positive, else multiplied. Default 1."""
    presence_penalty: float = 0.0
    """In [-2, 2]. Taken from the logit of each token that the answer has. Source: the OpenAI API."""
    frequency_penalty: float = 0.0
    """In [-2, 2]. Taken from the logit of a token for each time that the answer has it. Source: the OpenAI API."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of single tokens. Source: the OpenAI API."""
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    """Words (text), or token id sequences, that must not appear. A text is forbidden as it is tokenized at the beginning of
    the answer and after a blank. None is taken for "none". Source: vLLM, and `bad_words_ids` of transformers."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may be drawn (end-of-sequence tokens only if they are among them). Source: vLLM."""
    n: int = 1
    """Answers to the same prompt, at least 1. They share the prompt's pages, and each draws with a seed of its own, derived
    from `seed`; the first draws as it would alone. Source: the OpenAI API."""
    structured: StructuredSpec | None = None
    """What the text of the answer must be like: a JSON schema, a regular expression, one of several texts, or a grammar.
    Needs the extra `cbengine[structured]`."""
    logprobs: int | None = None
    """Report the log probability of each token, and of this many likeliest ones at its place, from 0 to 20."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt (all but its first). The whole prompt is computed for it, even where the prefix
    cache has some of it, in smaller pieces than usual. Source: vLLM."""

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
        put("stop_token_ids", _token_ids(self.stop_token_ids, optional=True))
        _flag("ignore_eos", self.ignore_eos)
        put("stop", _strings("stop", self.stop))
        put("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, high=None))
        if self.repetition_penalty == 0:
            raise InvalidRequestError("repetition_penalty must be above 0, got 0; 1 is no penalty")
        put("presence_penalty", _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0) or 0.0)
        put("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0) or 0.0)
        put("logit_bias", _biases(self.logit_bias))
        put("bad_words", _words(self.bad_words))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _token_ids(self.allowed_token_ids, "allowed_token_ids"))
            if not self.allowed_token_ids:
                raise InvalidRequestError(
                    "allowed_token_ids is empty, so that no token could be drawn; None allows all"
                )
        _instance("structured", self.structured, StructuredSpec)
        put("n", _integer("n", self.n, low=1, high=MAX_CHOICES))
        for name in ("logprobs", "prompt_logprobs"):
            put(name, _integer(name, getattr(self, name), high=MAX_LOGPROBS, optional=True))
        _flag("include_stop_str_in_output", self.include_stop_str_in_output)

    @property
    def has_penalties(self) -> bool:
        """Whether any of the three penalties does anything."""
        return self.repetition_penalty not in (None, 1.0) or self.presence_penalty != 0 or self.frequency_penalty != 0

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
_FALLBACKS: dict[str, float | int] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


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


def _instance(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidRequestError(f"{name} must be a {kind.__name__} or None, got {value!r:.80}")


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be True or False, got {value!r}")


def _token_ids(value: object, name: str = "stop_token_ids", *, optional: bool = False) -> tuple[int | None, ...]:
    """`value` as token ids, None as none of them if `optional`. Raises `InvalidRequestError`."""
    if value is None and optional:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} must be a sequence of token ids, got {value!r}")
    return tuple(_integer(f"every one of {name}", i) for i in cast(Iterable[object], value))


def _biases(value: object) -> Mapping[int, float] | None:
    """`value` as a read-only mapping of token ids to finite floats. Raises `InvalidRequestError`."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"logit_bias must be a mapping of token ids to numbers, or None, got {value!r}")
    biases: dict[int, float] = {}
    for token, bias in cast(Mapping[object, object], value).items():
        key = _integer("every token of logit_bias", token)
        number = _number(f"logit_bias[{key}]", bias, low=-_MAX_FLOAT, high=None)
        if key is None or number is None:
            raise InvalidRequestError(f"logit_bias[{token!r}] must be a number, got {bias!r}")
        biases[key] = number
    return TokenBiases(biases)


def _words(value: object) -> tuple[str | tuple[int | None, ...], ...]:
    """`value` as words: texts, and token id sequences, none of them empty; None as no words. Raises `InvalidRequestError`."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"bad_words must be a list of texts or of token id lists, got {value!r}")
    words: list[str | tuple[int | None, ...]] = []
    for word in cast(Iterable[object], value):
        words.append(word if isinstance(word, str) else _token_ids(word, "bad_words"))
        if not words[-1]:
            raise InvalidRequestError("bad_words has an empty word, which everything would contain")
        _check_text("bad_words", word)
    return tuple(words)


def _strings(name: str, value: object) -> tuple[str, ...]:
    """`value` as a tuple of strings, none of them empty; a string counts as one. Raises `InvalidRequestError`."""
    if isinstance(value, str):
        value = (value,)
    if value is None:
        value = ()
    strings = tuple(cast(Iterable[object], value)) if isinstance(value, (list, tuple)) else None
    if strings is None or not all(isinstance(item, str) and item for item in strings):
        raise InvalidRequestError(f"{name} must be a string or a list of strings, none of them empty, got {value!r}")
    for item in strings:
        _check_text(name, item)
    return cast(tuple[str, ...], strings)


def _check_text(name: str, value: object) -> None:
    """Refuse a text that no answer can have: answers are made of bytes in UTF-8. Raises `InvalidRequestError`."""
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} has {value!a}, with half a UTF-16 character at position {error.start}, which no answer can have; "
            "decode the input with errors='replace'"
        ) from None


def _number(name: str, value: object, *, low: float = 0.0, high: float | None) -> float | None:
    """`value` as a finite float in [low, high], None as it is. Raises `InvalidRequestError`."""
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
    if not math.isfinite(number) or number < low or (high is not None and number > high):
        allowed = f"of at least {low:g}" if high is None else f"from {low:g} to {high:g}"
        raise InvalidRequestError(f"{name} must be a finite number {allowed}, got {value!r}")
    return max(-_MAX_FLOAT, min(number, _MAX_FLOAT))
