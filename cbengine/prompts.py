"""Reading what a caller asks for: prompt, parameters, label. Checked at the call, before anything is registered."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cbengine.bridge.inbox import Tokenized
from cbengine.errors import (
    CBEngineError,
    EmptyPromptError,
    EngineStoppedError,
    InvalidRequestError,
    PromptTooLongError,
    UnsupportedFeatureError,
)
from cbengine.execution.commit import failure
from cbengine.sampling import SamplingParams
from cbengine.scheduling.edit import LogitEdit, pack_mask

if TYPE_CHECKING:
    from cbengine.execution.worker import Worker

Prompt = str | Sequence[int]
"""Text, or token ids (a list, tuple, or one-dimensional integer array or tensor)."""

INLINE_CHARACTERS = 4096
"""A text up to this long is tokenized at the call (about a millisecond), a longer one on a thread of its own."""

_CHARACTERS_A_TOKEN = 4  # what a long text counts for in the queue until it is tokenized


@dataclass(slots=True)
class Parsed:
    """A checked prompt. Either `ids` (int32) and `limit`, or a `text` that is yet to be tokenized."""

    tokens: int
    """What it counts for in the queue."""
    ids: np.ndarray | None = None
    limit: int = 0
    text: str | None = None


class PromptReader:
    """Checks requests for one run of the engine. Any thread."""

    def __init__(self, worker: Worker) -> None:
        loaded = worker.loaded
        if loaded is None:  # another thread has closed the engine a moment ago
            raise EngineStoppedError("the engine was closed; make a new one")
        assert worker.memory is not None, "made for a worker that runs"
        self.worker = worker
        self._tokenizer = loaded.tokenizer
        self._spec = loaded.runner.spec
        self._max_len = worker.memory.max_model_len
        self._capacity = worker.memory.capacity_tokens
        self._return_logprobs = worker.config.return_logprobs

    def resolve(self, params: SamplingParams | None, overrides: Mapping[str, Any]) -> SamplingParams:
        """The parameters with overrides and the model's defaults filled in."""
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"params must be a SamplingParams or None, got {type(params).__name__}")
        resolved = (params or _NO_PARAMS).merged(**overrides).resolved(self._spec.generation_defaults)
        if self._return_logprobs and resolved.logprobs is None:
            resolved = replace(resolved, logprobs=0)
        for token in resolved.stop_token_ids:
            if token >= self._spec.vocab_size:
                raise InvalidRequestError(
                    f"stop_token_ids has {token}, but the vocabulary ends at {self._spec.vocab_size - 1}"
                )
        for name, tokens in (("logit_bias", resolved.logit_bias), ("allowed_token_ids", resolved.allowed_token_ids)):
            beyond = max(tokens or (0,))
            if beyond >= self._spec.vocab_size:
                raise InvalidRequestError(
                    f"{name} has {beyond}, but the vocabulary ends at {self._spec.vocab_size - 1}"
                )
        if resolved.structured is not None:
            self._check_structured()
        if resolved.stop and self._tokenizer is None:
            raise UnsupportedFeatureError(
                "stop strings need text, and this engine has no tokenizer: use stop_token_ids, or make it with `tokenizer=`"
            )
        return resolved

    def edit(self, params: SamplingParams) -> LogitEdit | None:
        """What the parameters want changed in the logits, as the batch takes it."""
        biases: dict[int, float] = dict(params.logit_bias or {})
        sequences: list[tuple[int, ...]] = []
        for word in params.bad_words:
            for ids in self._as_tokens(word):
                if len(ids) == 1:
                    biases[ids[0]] = float("-inf")
                else:
                    sequences.append(ids)
        mask = None
        if params.allowed_token_ids is not None:
            mask = pack_mask(params.allowed_token_ids, self._spec.vocab_size)
        if not biases and not sequences and mask is None:
            return None
        self._check_something_left(params, biases)
        tokens = np.fromiter(biases, np.int32, len(biases))
        return LogitEdit(tokens, np.fromiter(biases.values(), np.float32, len(biases)), tuple(sequences), mask)

    def _check_something_left(self, params: SamplingParams, biases: Mapping[int, float]) -> None:
        """Refuse what forbids every token, or every one but the end where the answer may not end yet."""
        forbidden = {token for token, bias in biases.items() if bias == float("-inf")}
        if params.min_new_tokens:
            forbidden.update(params.stop_token_ids)
            forbidden.update(() if params.ignore_eos else self._spec.eos_token_ids)
        allowed = params.allowed_token_ids
        left = len(set(allowed) - forbidden) if allowed is not None else self._spec.vocab_size - len(forbidden)
        if left <= 0:
            raise InvalidRequestError(
                "allowed_token_ids, bad_words and min_new_tokens together leave no token that may be drawn; an answer that "
                "may not end yet needs one that is no end"
            )

    def _as_tokens(self, word: str | tuple[int, ...]) -> set[tuple[int, ...]]:
        """The token sequences that a forbidden word may appear as."""
        if not isinstance(word, str):
            if max(word) >= self._spec.vocab_size:
                raise InvalidRequestError(
                    f"bad_words has token {max(word)}, but the vocabulary ends at {self._spec.vocab_size - 1}"
                )
            return {word}
        if self._tokenizer is None:
            raise UnsupportedFeatureError(
                "bad_words as text need a tokenizer, and this engine has none: give token ids, or make it with `tokenizer=`"
            )
        bare = word.lstrip(" ")
        forms = [tuple(self._tokenizer.encode(form, add_special_tokens=False)) for form in (bare, " " + bare)]
        return {form for form in forms if form}

    def label(self, given: str | None, number: int) -> str:
        """The request's label: the caller's, or one made from its number."""
        if given is None:
            label = f"request-{number}"
            while self.worker.registry.is_alive(label):  # a caller's own label may look like one of ours
                label += "'"
            return label
        if not isinstance(given, str) or not given:
            raise InvalidRequestError(f"request_id must be a string that is not empty, or None, got {given!r}")
        try:
            given.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(f"request_id must be text that UTF-8 can encode, got {given!r}") from None
        return given

    def read(self, prompt: Prompt, params: SamplingParams, label: str, *, add_special_tokens: bool) -> Parsed:
        """Check `prompt`. Raises what `AsyncEngine.stream` says."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise UnsupportedFeatureError(
                    "this engine has no tokenizer: pass token ids, or make the engine with `tokenizer=`",
                    request_id=label,
                )
            if not prompt:
                raise EmptyPromptError("the prompt is empty; it needs at least one character", request_id=label)
            if len(prompt) > INLINE_CHARACTERS:
                return Parsed(max(1, len(prompt) // _CHARACTERS_A_TOKEN), text=prompt)
            ids = self._encode(prompt, label, add_special_tokens)
        else:
            ids = self._check_ids(prompt, label)
        return Parsed(len(ids), ids, self._limit(ids, params, label))

    def prepare_later(
        self,
        numbers: Sequence[int],
        parsed: Parsed,
        params: SamplingParams,
        label: str,
        *,
        add_special_tokens: bool,
    ) -> None:
        """Do what takes too long for an event loop on the tokenizer thread: a long text, a grammar.

        The engine thread hears of it by a `Tokenized` for each request.
        """

        def job() -> None:
            try:
                ids, limit = parsed.ids, parsed.limit
                if ids is None:
                    assert parsed.text is not None
                    ids = self._encode(parsed.text, label, add_special_tokens)
                    limit = self._limit(ids, params, label)
                commands = [Tokenized(number, ids, limit, edit=self._constrained(params)) for number in numbers]
            except BaseException as caught:  # a panic in Rust is no Exception, and the request must hear of it too
                error = caught if isinstance(caught, CBEngineError) else failure(label, caught)
                error.request_id = error.request_id or label
                commands = [Tokenized(number, None, 0, error) for number in numbers]
            for command in commands:
                self.worker.inbox.put(command)

        self.worker.background.submit(job)

    def _constrained(self, params: SamplingParams) -> LogitEdit | None:
        """The edit of one answer with a grammar; None if it has none. Slow the first time."""
        if params.structured is None:
            return None
        from cbengine.text.structured import compile_grammar
        from cbengine.text.tokenize import TextTokenizer

        assert isinstance(self._tokenizer, TextTokenizer)
        spec = self._spec
        grammar = compile_grammar(params.structured, self._tokenizer, spec.vocab_size, eos_token_ids=spec.eos_token_ids)
        edit = self.edit(params) or LogitEdit(np.zeros(0, np.int32), np.zeros(0, np.float32))
        edit.follow(grammar.start(), grammar.words)
        return edit

    def _check_structured(self) -> None:
        """Refuse a grammar at once where there can be none."""
        from cbengine.text.grammar_tokens import check_usable
        from cbengine.text.tokenize import TextTokenizer

        if importlib.util.find_spec("llguidance") is None:
            raise UnsupportedFeatureError("structured output needs llguidance: pip install 'cbengine[structured]'")
        if not isinstance(self._tokenizer, TextTokenizer):
            raise UnsupportedFeatureError("structured output needs the model's own tokenizer, and this engine has none")
        check_usable(self._tokenizer, self._spec.eos_token_ids)

    def _encode(self, text: str, label: str, add_special_tokens: bool) -> np.ndarray:
        assert self._tokenizer is not None
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except InvalidRequestError:
            raise
        except (KeyboardInterrupt, SystemExit):
            raise  # the caller's own: this is the caller's thread
        except BaseException as error:  # a panic in Rust is no Exception
            raise failure(label, error) from error
        return self._check_ids(ids, label)

    def _check_ids(self, prompt: Sequence[int], label: str) -> np.ndarray:
        try:
            ids = np.asarray(prompt)
            # Among integers numpy takes a bool for one.
            bools = isinstance(prompt, Sequence) and not {bool, np.bool_}.isdisjoint(map(type, prompt))
        except Exception as error:  # a ragged list, a tensor that is part of a graph, whatever an object's author made
            raise InvalidRequestError(f"a prompt is text or token ids: {error}", request_id=label) from None
        if ids.ndim == 1 and not len(ids):
            raise EmptyPromptError("the prompt has no tokens; it needs at least one", request_id=label)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidRequestError(
                f"a prompt is text or a flat sequence of integer token ids, got {type(prompt).__name__} "
                f"(as an array: {ids.dtype}, shape {ids.shape})",
                request_id=label,
            )
        if bools:
            raise InvalidRequestError(
                "a prompt is text or integer token ids, and this one has a bool", request_id=label
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._spec.vocab_size:
            raise InvalidRequestError(
                f"token id {low if low < 0 else high} is not in the vocabulary, which is 0 to {self._spec.vocab_size - 1}",
                request_id=label,
            )
        return ids.astype(np.int32)

    def _limit(self, ids: np.ndarray, params: SamplingParams, label: str) -> int:
        """Length at which the request ends, prompt included: what was asked for, within the model and the cache."""
        room = min(self._max_len, self._capacity)
        if len(ids) >= room:
            what = "the sequences this engine serves" if self._max_len <= self._capacity else "the whole cache"
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens and {what} {room}, so that a prompt may have {room - 1}; shorten it, or "
                "raise max_model_len (up to the model's own limit), num_blocks or max_memory_percent",
                request_id=label,
            )
        if params.max_new_tokens is None:
            return room
        return min(len(ids) + params.max_new_tokens, room)


_NO_PARAMS = SamplingParams()
