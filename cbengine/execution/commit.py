"""Commit: what a finished step means for its requests. Engine thread only.

I4 Speculated tokens (after an end that was not known at launch) are dropped here, nowhere else: never emitted, hashed
   or counted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from cbengine.errors import RequestFailedError
from cbengine.execution.batch import Filled
from cbengine.execution.edits import Edits
from cbengine.execution.logprobs import read as read_logprobs
from cbengine.execution.logprobs import words
from cbengine.observe.timeline import Timeline
from cbengine.outputs import FinishReason, RequestStatus, TokenLogprobs
from cbengine.scheduling.lifecycle import Lifecycle
from cbengine.scheduling.request import Request
from cbengine.scheduling.rows import DEAD, RowTable


class TokenSink(Protocol):
    """Where tokens go (the outbox)."""

    def token(self, reader: Any, token_id: int, text: str, logprobs: TokenLogprobs | None) -> None: ...

    def prompt(self, reader: Any, logprobs: list[TokenLogprobs]) -> None: ...


class Committer:
    """Appends sampled tokens, finds the ends, turns ids into text and hands everything on."""

    def __init__(
        self, rows: RowTable, lifecycle: Lifecycle, sink: TokenSink, eos_token_ids: Sequence[int], vocab_size: int
    ) -> None:
        self._rows = rows
        self._lifecycle = lifecycle
        self._sink = sink
        self._is_eos = np.zeros(vocab_size, bool)
        self._is_eos[[i for i in eos_token_ids if i < vocab_size]] = True
        self.watch_readers = True
        """Whether backpressure acts."""
        self.tokens = 0
        """Tokens sampled and kept so far."""
        self.prompt_tokens = 0
        """Prompt tokens computed so far, what was computed again after a preemption included."""
        self.timeline: Timeline | None = None
        """Where the making of text is recorded."""

    def commit(self, filled: Filled, outputs: np.ndarray) -> None:
        """The step computed `filled`; `outputs` are the sampled ids, int32 [N], and the logprob reports behind them."""
        table = self._rows
        ids = outputs[: len(filled.sample_rows)]
        num_words = words(len(filled.edits.logprob_samples), filled.edits.top)
        reports = self._reports(filled, outputs[len(ids) : len(ids) + num_words])
        if filled.edits.scores:
            self._score_prompts(filled.edits, outputs[len(ids) + num_words :])
        table.computed[filled.rows] += filled.counts
        self._lifecycle.advance(filled.rows)
        self.prompt_tokens += int(filled.counts[filled.plan.num_decodes :].sum())
        alive = table.status[filled.sample_rows] != DEAD
        rows, ids = filled.sample_rows[alive], ids[alive]
        if reports is not None:
            reports = [report for report, keep in zip(reports, alive.tolist(), strict=True) if keep]
        if not len(rows):
            return
        table.append(rows, ids)
        self.tokens += len(rows)
        stops = self._is_eos[ids] & ~table.ignore_eos[rows]
        own = table.own_stops[rows]
        if own.any():
            for i in np.flatnonzero(own).tolist():
                stops[i] |= int(ids[i]) in self._request(rows[i]).stop_ids
        ended = stops | (table.known[rows] >= table.limit[rows])
        self._emit(rows, ids, stops, ended, reports or itertools.repeat(None, len(rows)))
        watched = table.watched[rows] & (table.status[rows] != DEAD)
        if self.watch_readers and watched.any():
            for row in rows[watched].tolist():
                self._check_reader(self._request(row))

    def _reports(self, filled: Filled, outputs: np.ndarray) -> list[TokenLogprobs | None] | None:
        """The logprob report of each sample; None if nobody asked for any."""
        asked = filled.edits.logprob_samples
        if not len(asked):
            return None
        reports: list[TokenLogprobs | None] = [None] * len(filled.sample_rows)
        found = read_logprobs(outputs, filled.edits.top, self._rows.logprobs[filled.sample_rows[asked]])
        for sample, report in zip(asked.tolist(), found, strict=True):
            reports[sample] = report
        return reports

    def _score_prompts(self, edits: Edits, outputs: np.ndarray) -> None:
        """Hand on the logprobs of prompt tokens."""
        wanted = [np.full(count, self._rows.prompt_logprobs[row]) for row, _, count in edits.scores]
        found = read_logprobs(outputs, edits.score_top, np.concatenate(wanted))
        at = 0
        for row, _, count in edits.scores:
            if self._rows.status[row] != DEAD:
                self._sink.prompt(self._request(row).reader, found[at : at + count])
            at += count

    def _emit(
        self,
        rows: np.ndarray,
        ids: np.ndarray,
        stops: np.ndarray,
        ended: np.ndarray,
        reports: Iterable[TokenLogprobs | None],
    ) -> None:
        requests, sink, timeline = self._rows.requests, self._sink, self.timeline
        columns = (rows.tolist(), ids.tolist(), ended.tolist(), stops.tolist(), reports)
        for row, token_id, end, stop, report in zip(*columns, strict=True):
            request = requests[row]
            assert request is not None
            start = 0.0 if timeline is None else time.perf_counter()
            try:
                text, hit = self._text(request, token_id, end)
                if request.edit is not None and request.edit.grammar is not None:
                    hit |= request.edit.advance(token_id)
            except BaseException as error:  # a panic in Rust too: only the request that the tokenizer works for fails
                self._fail(request, error)
                continue
            if timeline is not None:
                timeline.add("text", start)
            sink.token(request.reader, token_id, text, report)
            if end or hit:
                reason = FinishReason.STOP if stop or hit else FinishReason.LENGTH
                self._lifecycle.transition(request, RequestStatus.FINISHED, reason)

    @staticmethod
    def _text(request: Request, token_id: int, last: bool) -> tuple[str, bool]:
        """The text that this token makes certain, and whether a stop string is complete in it."""
        detokenizer, stops = request.detokenizer, request.stops
        if detokenizer is None:
            return "", False
        text = detokenizer.push(token_id)
        if last:
            text += detokenizer.flush()
        if stops is None:
            return text, False
        text, hit = stops.push(text)
        return (text + stops.flush() if last and not hit else text), hit

    def unread(self, request: Request) -> int:
        """Tokens of a request that its reader has not taken. `reader.read` is the reader's own count, one int."""
        made = len(request.saved) if request.row < 0 and request.saved is not None else self._rows.known[request.row]
        return int(made) - request.prompt_len - request.reader.read

    def _check_reader(self, request: Request) -> None:
        """Backpressure: hold or end a request whose reader is too far behind."""
        behind = self.unread(request)
        if behind < request.stream_buffer:
            return
        if request.backpressure == "pause":
            request.held = True
            self._rows.held[request.row] = True
            return
        error = RequestFailedError(
            f"request {request.label!r} was aborted: its reader left {behind} tokens unread, and with backpressure='abort' "
            f"stream_buffer={request.stream_buffer} are allowed",
            request_id=request.label,
        )
        self._lifecycle.transition(request, RequestStatus.FAILED, FinishReason.ERROR, error)

    def fail(self, rows: np.ndarray, error: BaseException) -> None:
        """A step raised: the requests of `rows`, which it was computing, fail, and everyone else goes on (I14)."""
        for row in rows.tolist():
            request = self._request(row)
            if not request.status.ended:
                self._fail(request, error)

    def _fail(self, request: Request, error: BaseException) -> None:
        wrapped = failure(request.label, error)
        self._lifecycle.transition(request, RequestStatus.FAILED, FinishReason.ERROR, wrapped)

    def _request(self, row: int) -> Request:
        request = self._rows.requests[row]
        assert request is not None, "a row in flight has a request"
        return request


def failure(label: str, error: BaseException) -> RequestFailedError:
    """The error that the reader of a failed request gets."""
    failed = RequestFailedError(
        f"request {label!r} failed: computing it raised {type(error).__name__}: {error}", request_id=label
    )
    failed.__cause__ = error
    return failed
