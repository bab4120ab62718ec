"""One request and its state machine.

A `Request` is made by the thread that calls the engine and handed over through the inbox; from then on only the engine
thread touches it. Positions are three numbers, kept in the row table while the request has a row: `known` (tokens whose
ids are on the host), `computed` (tokens whose K and V are written and committed) and `planned` (computed, plus what is in
flight). Prefill, a chunk of it, decode and the resume after a preemption are the same rule with other numbers: a step
moves `computed` toward `known`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cbengine.cache.prefix import Chain
from cbengine.cache.swap import SwapTicket
from cbengine.outputs import FinishReason, RequestStatus
from cbengine.sampling import SamplingParams
from cbengine.scheduling.edit import LogitEdit

if TYPE_CHECKING:
    from cbengine.text.stop import StopMatcher

_S = RequestStatus
_ENDS = {_S.FINISHED, _S.CANCELLED, _S.FAILED}

LEGAL: dict[RequestStatus, set[RequestStatus]] = {
    _S.PENDING: {_S.PREFILLING, _S.CANCELLED, _S.FAILED},
    _S.PREFILLING: {_S.DECODING, _S.PREEMPTED} | _ENDS,
    _S.DECODING: {_S.PREEMPTED} | _ENDS,
    # A preempted request can finish without running again: its last launched step may have sampled its last token.
    _S.PREEMPTED: {_S.PREFILLING} | _ENDS,
    _S.FINISHED: set(),
    _S.CANCELLED: set(),
    _S.FAILED: set(),
}


@dataclass(slots=True, eq=False)
class Request:
    """Everything that one request needs."""

    id: int
    """Monotonic, never reused: also the order of arrival."""
    label: str
    """The user's `request_id`; unique among the living."""
    params: SamplingParams
    """Resolved: no sampling value is None."""
    seed: int
    reader: Any
    """Opaque address of whoever reads the answer (the outbox knows)."""
    arrival_time: float
    prompt: np.ndarray | None = None
    """int32 [prompt_len]; None while a long text is being tokenized elsewhere."""
    limit: int = 0
    """Number of tokens, prompt included, at which it ends by length."""
    stop_ids: frozenset[int] = frozenset()
    detokenizer: Any = None
    keep: frozenset[int] = frozenset()
    """Special tokens that have text in its answer."""
    edit: LogitEdit | None = None
    stops: StopMatcher | None = None
    """Finds its stop strings, if it has any."""

    status: RequestStatus = RequestStatus.PENDING
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    row: int = -1
    """Its place in the row table, -1 while it waits."""
    saved: np.ndarray | None = None
    """int32: the known tokens of a preempted request, prompt and answer, while it has no row."""
    first_scheduled_time: float | None = None
    preemptions: int = 0
    timeout: float | None = None
    """Seconds from arrival in which it must be finished."""
    queue_timeout: float | None = None
    """Seconds from arrival in which it must be scheduled for the first time."""
    backpressure: str = "buffer"
    stream_buffer: int = 0
    """Unread tokens from which on backpressure "pause" or "abort" acts."""
    scored: int = 0
    """Prompt tokens whose logprobs have been asked of the device (the first has none): they are not asked for again."""
    held: bool = False
    """Not scheduled because its reader is too far behind."""
    cache_salt: str | None = None
    """Only requests with the same salt share pages."""
    chain: Chain | None = None
    """Keys of its complete pages, made when it is first looked at."""
    cached_tokens: int = 0
    """Prompt tokens that were there already when it was first scheduled."""
    ticket: SwapTicket | None = None
    """Where its pages are, while it waits after a preemption that swapped them out."""
    parent: Request | None = None
    """An elder sibling with the same prompt, whose pages it begins with if they are there in time."""

    @property
    def prompt_len(self) -> int:
        return 0 if self.prompt is None else len(self.prompt)

    @property
    def tokens(self) -> np.ndarray:
        """The tokens to start from when it gets a row: the prompt, or what was saved at a preemption."""
        if self.saved is not None:
            return self.saved
        assert self.prompt is not None, "a request without a tokenized prompt is never given a row"
        return self.prompt

    def __repr__(self) -> str:
        return f"<Request {self.id} {self.label!r} {self.status.value} row={self.row}>"
