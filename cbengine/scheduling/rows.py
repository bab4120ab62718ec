"""The row table: the state of all running requests as arrays, one row each.

This is what lets a step cost numpy work over the batch plus Python work for what changed, and nothing per token. Engine
thread only. The arrays outlive no row: a row goes back when the newest step that may name it has committed (I11), so at
commit a row still means the request that it meant at launch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cbengine.scheduling.request import Request

FREE, RUNNING, LEAVING, DEAD = 0, 1, 2, 3
"""FREE: nobody's. RUNNING: scheduled. LEAVING: preempted, tokens of launched steps still count. DEAD: ended, they don't."""


_INT32_MAX = 2**31 - 1


class RowTable:
    """`capacity` rows, each holding up to `max_len` tokens.

    Row `capacity` (one past the last) exists as well: the dummy that padded sequences belong to. `on_assign("row", [row])`
    hears of every row that gets an owner (see `CacheManager`).
    """

    def __init__(self, capacity: int, max_len: int, on_assign: Callable[[str, list[int]], None] | None = None) -> None:
        self.capacity = capacity
        self.max_len = max_len
        self._on_assign = on_assign
        n = capacity + 1
        self.requests: list[Request | None] = [None] * n
        self.status = np.zeros(n, np.uint8)
        self.known = np.zeros(n, np.int64)
        self.computed = np.zeros(n, np.int64)
        self.planned = np.zeros(n, np.int64)
        self.limit = np.zeros(n, np.int64)
        self.prompt_len = np.zeros(n, np.int64)
        self.min_len = np.zeros(n, np.int64)
        """Length, prompt included, below which no stop token may be sampled."""
        self.ignore_eos = np.zeros(n, bool)
        self.own_stops = np.zeros(n, bool)
        self.watched = np.zeros(n, bool)
        """How far its reader is behind matters (backpressure "pause" or "abort")."""
        self.held = np.zeros(n, bool)
        """Not scheduled until its reader has read on."""
        self.seed = np.zeros(n, np.uint64)
        self.temperature = np.zeros(n, np.float32)
        self.top_k = np.zeros(n, np.int32)
        self.top_p = np.ones(n, np.float32)
        self.min_p = np.zeros(n, np.float32)
        self.repetition = np.ones(n, np.float32)
        self.presence = np.zeros(n, np.float32)
        self.frequency = np.zeros(n, np.float32)
        self.penalty_place = np.full(n, -1, np.int32)
        """Place in the device's penalty tables, -1 without penalties."""
        self.edited = np.zeros(n, bool)
        """Its request has a `LogitEdit`."""
        self.lockstep = np.zeros(n, bool)
        """Its next logits depend on tokens that the host must know first: never scheduled ahead of them."""
        self.logprobs = np.full(n, -1, np.int32)
        """Alternatives that it wants with each token's logprob, -1 for no logprobs."""
        self.prompt_logprobs = np.full(n, -1, np.int32)
        """Likewise for the tokens of its prompt."""
        self.penalty_loads: list[tuple[int, np.ndarray, np.ndarray]] = []
        """Rows with penalties that joined since the last step: place, prompt, answer so far."""
        self._free_places: list[int] = []
        self._places = 0
        # Grown by doubling, up to max_len, as longer sequences come: rows x the model's context would be far too much.
        self.tokens = np.zeros((n, min(max_len, 1024)), np.int32)
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def dummy(self) -> int:
        return self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in vars(self).values() if isinstance(array, np.ndarray))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    @property
    def num_held(self) -> int:
        """Running rows that wait for their reader."""
        return int((self.held & (self.status == RUNNING)).sum())

    def assign(self, request: Request) -> int:
        """Give `request` a free row and load it with what is known of it."""
        row = self._free.pop()
        if self._on_assign is not None:
            self._on_assign("row", [row])
        tokens, params = request.tokens, request.params
        known = len(tokens)
        self._reserve(known + 1)
        self.requests[row] = request
        request.row = row
        request.saved = None
        self.tokens[row, :known] = tokens
        self.status[row] = RUNNING
        self.known[row] = known
        self.computed[row] = 0
        self.planned[row] = 0
        self.limit[row] = request.limit
        self.prompt_len[row] = request.prompt_len
        self.min_len[row] = request.prompt_len + params.min_new_tokens
        self.ignore_eos[row] = params.ignore_eos
        self.own_stops[row] = bool(request.stop_ids)
        self.watched[row] = request.backpressure != "buffer"
        self.held[row] = request.held
        self.seed[row] = request.seed
        self.temperature[row] = params.temperature
        self.top_k[row] = min(params.top_k or 0, _INT32_MAX)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.edited[row] = request.edit is not None
        self.lockstep[row] = request.edit is not None and request.edit.lockstep
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.prompt_logprobs[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self._assign_penalties(row, request)
        return row

    def _assign_penalties(self, row: int, request: Request) -> None:
        params = request.params
        if not params.has_penalties:
            return
        if not self._free_places:
            self._free_places.append(self._places)
            self._places += 1
        place = self._free_places.pop()
        self.penalty_place[row] = place
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        tokens = self.tokens[row, : self.known[row]].copy()
        self.penalty_loads.append((place, tokens[: request.prompt_len], tokens[request.prompt_len :]))

    def save(self, request: Request) -> None:
        """Keep the known tokens of a request that is about to lose its row."""
        row = request.row
        request.saved = self.tokens[row, : self.known[row]].copy()

    def release(self, row: int) -> None:
        """The row is nobody's again. Only for rows that no launched step names."""
        request = self.requests[row]
        assert request is not None and self.status[row] in (LEAVING, DEAD)
        request.row = -1
        self.requests[row] = None
        place = int(self.penalty_place[row])
        if place >= 0:
            self._free_places.append(place)
            self.penalty_place[row] = -1
            self.penalty_loads = [load for load in self.penalty_loads if load[0] != place]
        self.status[row] = FREE
        self._free.append(row)

    def append(self, rows: np.ndarray, ids: np.ndarray) -> None:
        """Add one sampled token to each of `rows`."""
        position = self.known[rows]
        if len(rows):
            self._reserve(int(position.max()) + 1)
        self.tokens[rows, position] = ids
        self.known[rows] = position + 1

    def _reserve(self, length: int) -> None:
        width = self.tokens.shape[1]
        if length > width:
            grown = np.zeros((len(self.tokens), max(length, min(2 * width, self.max_len))), np.int32)
            grown[:, :width] = self.tokens
            self.tokens = grown
