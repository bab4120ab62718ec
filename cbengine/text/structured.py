"""Structured output: from what is asked for to the tokens that may come next.

A spec is compiled into a `Grammar` off the event loop (milliseconds, seconds for huge schemas), once for equal specs. Each
answer has a `GrammarState`, which says what tokens may come next. The work is done by llguidance (Earley parsing over a
trie of all tokens; about 0.1 ms a mask). What this module adds: the tokens' bytes come from the detokenizer's table, so
that what the grammar reads is what the answer shows, and a short token list or wide logits are no problem.

Masks are llguidance's own format: int32 words, bit i of word w stands for token 32 * w + i, 1 = allowed.
"""

from __future__ import annotations

import importlib.util
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from cbengine.errors import InvalidRequestError, RequestFailedError, UnsupportedFeatureError
from cbengine.text.grammar_tokens import GrammarTokens
from cbengine.text.json_schema import check_finite
from cbengine.text.reasoning_grammar import with_reasoning
from cbengine.text.structured_spec import StructuredSpec
from cbengine.text.tokenize import TextTokenizer

if TYPE_CHECKING:
    import llguidance

__all__ = [
    "Grammar",
    "GrammarCompiler",
    "GrammarState",
    "MaskFiller",
    "StructuredSpec",
    "compile_grammar",
    "prepare_ahead",
    "prepare_tokenizer",
]

# One blank, or a line break and an indentation. JSON allows any number of blanks, which small models go on with for ever.
_WHITESPACE = r"\x20|\x0D?\x0A[\x20\x09]{0,32}"
_MOST_GRAMMARS = 128


def compile_grammar(
    spec: StructuredSpec,
    tokenizer: TextTokenizer,
    vocab_size_of_logits: int,
    *,
    eos_token_ids: Sequence[int] | None = None,
) -> Grammar:
    """The grammar of a spec for one model. Any thread but those of event loops and engines: it may take seconds.

    Equal specs give the same grammar, the last 128 of a tokenizer being remembered; callers at the same time wait for
    one compilation. The first call for a tokenizer prepares it (see `prepare_tokenizer`).

    Args:
        vocab_size_of_logits: width of the logits, and of the masks. Ids that the tokenizer has not are never allowed.
        eos_token_ids: tokens that end an answer where the grammar may end. Default: the tokenizer's own.

    Raises:
        InvalidRequestError: the schema, expression or grammar is wrong or impossible; the message has the reason.
        UnsupportedFeatureError: llguidance is not installed, or the tokenizer is of a kind that has no token table.
    """
    return prepare_tokenizer(tokenizer, vocab_size_of_logits, eos_token_ids=eos_token_ids).compile(spec)


def prepare_tokenizer(
    tokenizer: TextTokenizer, vocab_size_of_logits: int, *, eos_token_ids: Sequence[int] | None = None
) -> GrammarCompiler:
    """What `compile_grammar` needs of a tokenizer, made once. Holds the GIL nearly all the time that it takes.

    That is 0.1 s of CPU for 49k tokens and 1 s for 262k, so an engine has it done while it loads the model
    (`cbengine.loading`). Compiling a grammar lets go of the GIL. Raises `UnsupportedFeatureError` as `compile_grammar` does.
    """
    ids = eos_token_ids if eos_token_ids is not None else [tokenizer.eos_token_id]
    eos = tuple(dict.fromkeys(i for i in ids if i is not None and 0 <= i < vocab_size_of_logits))
    with _lock:
        made = _compilers.setdefault(tokenizer, {})
        compiler = made.get((vocab_size_of_logits, eos))
        if compiler is None:
            compiler = GrammarCompiler(tokenizer, vocab_size_of_logits, eos)
            made[vocab_size_of_logits, eos] = compiler
        return compiler


def prepare_ahead(tokenizer: object, vocab_size_of_logits: int, eos_token_ids: Sequence[int]) -> None:
    """`prepare_tokenizer` for an engine that is being loaded, where the library is installed and the tokenizer is of use.

    It is about a fifth of what loading the model takes, and would keep every stream waiting with the first request.
    """
    if importlib.util.find_spec("llguidance") is None or not isinstance(tokenizer, TextTokenizer):
        return
    if tokenizer.table is not None and eos_token_ids:
        prepare_tokenizer(tokenizer, vocab_size_of_logits, eos_token_ids=eos_token_ids)


class GrammarCompiler:
    """Compiles the grammars of one tokenizer and remembers the last ones. Any thread, several at a time."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._library = _load_library()
        self.vocab_size = vocab_size
        tokens = GrammarTokens(tokenizer, vocab_size, eos_token_ids)
        self._tokenizer = self._library.LLTokenizer(tokens, eos_token=list(eos_token_ids))
        self._special = dict(tokenizer.special_tokens)
        self._lock = threading.Lock()
        self._grammars: OrderedDict[StructuredSpec, Future[Grammar]] = OrderedDict()

    def compile(self, spec: StructuredSpec) -> Grammar:
        """See `compile_grammar`."""
        with self._lock:
            future = self._grammars.get(spec)
            mine = future is None or (future.done() and future.result().spent)
            if future is None or mine:
                future = self._grammars[spec] = Future()
                if len(self._grammars) > _MOST_GRAMMARS:
                    self._grammars.popitem(last=False)
            self._grammars.move_to_end(spec)
        if mine:
            self._compile_into(future, spec)
        try:
            return future.result()
        except InvalidRequestError as error:  # several callers may get it, and each adds its own traceback
            raise type(error)(str(error)) from error

    def _compile_into(self, future: Future[Grammar], spec: StructuredSpec) -> None:
        try:
            grammar = self._compile(spec)
        except BaseException as error:
            with self._lock:
                if self._grammars.get(spec) is future:
                    del self._grammars[spec]
            future.set_exception(error)
        else:
            future.set_result(grammar)

    def _compile(self, spec: StructuredSpec) -> Grammar:
        library = self._library
        limits = library.LLParserLimits(verbose_errors=False)
        try:
            matcher = library.LLMatcher(self._tokenizer, self._source(spec), log_level=0, limits=limits)
        except (ValueError, RecursionError) as error:  # text that is no Unicode, a schema nested too deeply
            if isinstance(error, InvalidRequestError):
                raise
            raise InvalidRequestError(_refused(spec, str(error))) from error
        if matcher.is_error():
            raise InvalidRequestError(_refused(spec, matcher.get_error()))
        grammar = Grammar(matcher, self.vocab_size, frozenset(self._tokenizer.eos_tokens))
        probe = matcher.deep_copy()
        probe.compute_bitmask()  # also fills the caches that all answers of this grammar share
        if probe.is_error():
            reason = probe.get_error().partition("\n")[0]
            if reason.startswith("NoExtension"):
                reason = "no text at all fulfils it"
            raise InvalidRequestError(_refused(spec, reason))
        return grammar

    def _source(self, spec: StructuredSpec) -> str:
        """The spec in the library's language. Raises ValueError if it has something that cannot be written there."""
        answer = _answer_source(spec, self._library)
        return with_reasoning(answer, spec, self._special) if spec.leaves_reasoning else answer


class Grammar:
    """A compiled spec. `start` may be called from any thread."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher  # never advanced; its copies share the lexer's caches with it
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.words = -(-vocab_size // 32)
        """Length of a mask, in int32 words."""
        self.spent = False
        """True once the shared caches have hit a limit: the compiler makes a new grammar for the next request."""

    def start(self) -> GrammarState:
        """The state of one new answer. Takes microseconds."""
        return GrammarState(self)


class GrammarState:
    """Where one answer is in its grammar. Engine thread only."""

    __slots__ = ("_grammar", "_matcher")

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar._matcher.deep_copy()

    def fill_mask(self, out: np.ndarray) -> None:
        """Write which tokens may come next into `out`, int32 [ceil(vocab / 32)], contiguous (format: see the module).

        The end-of-sequence tokens are among them where the grammar may end, and alone where it must. Where bytes are
        certain, only the tokenizer's own way to write them is allowed. Lets go of the GIL.

        Raises:
            RequestFailedError: the grammar has become too complex to go on with. `out` then allows the end only.
        """
        assert out.dtype == np.int32 and out.shape == (self._grammar.words,) and out.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        if (error := self.error) is not None:
            raise error

    def accept(self, token_id: int) -> None:
        """The answer goes on with this token, which the last mask allowed.

        Raises:
            RequestFailedError: the grammar does not allow it. The state is as before.
        """
        matcher, grammar = self._matcher, self._grammar
        if matcher.is_stopped():
            allowed = token_id in grammar.eos_token_ids and not matcher.is_error()
        else:
            allowed = 0 <= token_id < grammar.vocab_size and matcher.try_consume_tokens([token_id]) == 1
        if not allowed:
            raise self.error or RequestFailedError(f"token {token_id} is not allowed here by the answer's grammar")

    @property
    def finished(self) -> bool:
        """Nothing but the end is left: the answer ends here, with reason "stop" (an end token needs not be sampled)."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        """The text so far is complete, though it may go on."""
        return self._matcher.is_accepting() or self.finished

    @property
    def error(self) -> RequestFailedError | None:
        """Why this grammar cannot go on (a limit of llguidance was hit), or None."""
        if not self._matcher.is_error():
            return None
        self._grammar.spent = True
        reason = self._matcher.get_error().partition("\n")[0]
        return RequestFailedError(f"the answer's grammar cannot go on: {reason}")


class MaskFiller:
    """Fills the masks of many answers at a time, on llguidance's own threads. One engine thread at a time.

    Answers that share a grammar take turns at its caches; those of different grammars run side by side. `threads`:
    default 80 % of the cores, at most 32. They start with the first call that has several answers.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads
        self._executor: llguidance.LLExecutor | None = None

    def fill(self, rows: Sequence[tuple[int, GrammarState]], out: np.ndarray) -> list[tuple[int, RequestFailedError]]:
        """Write the mask of each state to its row of `out`, int32 [rows, ceil(vocab / 32)], contiguous.

        Rows not named stay as they are. Returns the rows whose grammar cannot go on, with the reason; their masks allow
        the end only. Lets go of the GIL.
        """
        if not rows:
            return []
        words = rows[0][1]._grammar.words
        assert out.dtype == np.int32 and out.ndim == 2 and out.shape[1] == words and out.flags.c_contiguous
        if len(rows) == 1:
            row, state = rows[0]
            state._matcher.unsafe_compute_mask_ptr(out[row].ctypes.data, out[row].nbytes)
        else:
            executor = self._executor
            if executor is None:
                executor = self._executor = _load_library().LLExecutor(self._threads)
            matchers = [(state._matcher, row) for row, state in rows]
            executor.unsafe_compute_mask_ptr(matchers, out.ctypes.data, words * 4, len(out))
        return [(row, error) for row, state in rows if (error := state.error) is not None]


def _load_library() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise UnsupportedFeatureError(
            f"structured output needs llguidance: pip install 'cbengine[structured]' ({error})"
        ) from error
    return llguidance


def _answer_source(spec: StructuredSpec, library: ModuleType) -> str:
    """What the answer must be like, reasoning aside, in llguidance's language."""
    matcher = library.LLMatcher
    if spec.json_object:
        return matcher.grammar_from_json_schema({"type": "object"}, {"whitespace_pattern": _WHITESPACE})
    if isinstance(spec.json_schema, str):
        schema = json.loads(spec.json_schema)
        check_finite(schema)
        own = {"whitespace_pattern": _WHITESPACE} if "x-guidance" not in schema else None
        return matcher.grammar_from_json_schema(schema, own)
    if spec.choice is not None:
        return "start: " + " | ".join(map(json.dumps, spec.choice))
    return matcher.grammar_from_regex(spec.regex) if spec.regex is not None else spec.grammar or ""


def _refused(spec: StructuredSpec, reason: str) -> str:
    return f"the {spec.kind} of structured output cannot be used: {reason.strip():.1000}"


_lock = threading.Lock()
_compilers: weakref.WeakKeyDictionary[TextTokenizer, dict[tuple[int, tuple[int, ...]], GrammarCompiler]]
_compilers = weakref.WeakKeyDictionary()
