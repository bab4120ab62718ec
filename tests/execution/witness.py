"""Watches a driven loop from outside and holds it to the invariants, with books of its own.

It wraps methods of the parts, so that it hears of every launch, wait, change of state and release, and reads the inputs
at the head of every forward. What it finds is raised at the end of the turn, as a `Violation` that begins with the number
of the invariant. The rest is held elsewhere: I6, I7, I8 and I10 by the race check of the device too, I1 and I4 by the
reader's side too (`DirectPort`), I14 by its own tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils._python_dispatch import _disable_current_modes

from cbengine.cache.geometry import RESERVED_CHUNKS
from cbengine.execution.batch import Filled
from cbengine.execution.inputs import StepInputs
from cbengine.execution.slots import Slot
from cbengine.outputs import RequestStatus
from cbengine.scheduling.request import Request
from cbengine.scheduling.rows import DEAD, LEAVING
from tests.support.driver import Driver


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class _Step:
    """What a launched step is about, as it was at launch."""

    number: int
    slot: int
    filled: Filled
    requests: list[Request]
    ends: list[int]
    blocks: set[int] = field(default_factory=set)


class Witness:
    """Attach it to a driver before the first turn; then turn the driver as before."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.parts = driver.parts
        self.violations: list[str] = []
        self.launched = 0
        self.finished = 0
        self.speculated = 0
        """Tokens sampled for requests that had ended by then."""
        self._flight: deque[_Step] = deque()  # launched and not waited for
        self._to_run: deque[_Step] = deque()  # launched, and their forward has not run
        self._inside = 0  # in `transition` or `step_committed`
        self._status: dict[int, RequestStatus] = {}
        self._ends: dict[int, int] = {}
        self._fences: dict[int, int] = {}  # row on its way back -> the newest step launched when it was given up
        self._last_step: dict[int, int] = {}  # row -> the newest step that names it
        self._computed: dict[int, int] = {}  # row -> tokens computed by steps that have committed
        self._tables: dict[int, list[int]] = {}  # row -> its block table at the last launch
        self._growing = False  # in `Slot.reserve`
        self._growths = 0
        parts, device = self.parts, driver.device
        self._around(parts.lifecycle, "transition", self._transition)
        self._around(parts.lifecycle, "step_committed", self._given_back)
        self._around(parts.lifecycle, "wait_for_transfers", self._given_back)
        self._around(parts.rows, "assign", self._assign)
        self._around(parts.rows, "release", self._release_row)
        self._around(parts.cache, "_grow", self._grow)
        self._around(parts.cache, "admit", self._admit)
        self._around(parts.cache, "retire", self._retire)
        self._around(parts.cache, "release", self._release_pages)
        self._around(parts.registry, "ended", self._label_freed)
        self._around(parts.pipeline, "launch", self._launch)
        self._around(parts.pipeline, "wait", self._wait)
        for slot in parts.pipeline.slots:
            self._around(slot, "reserve", self._reserve_slot)
        self._around(device, "launch", self._queue)
        self._around(device, "device_buffer", self._allocate)
        self._around(device, "host_buffer", self._allocate)
        self._around(driver, "turn", self._turn)
        driver.model.fault = self._forward

    @staticmethod
    def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        inner = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: wrapper(inner, *args, **kwargs))

    def _check(self, holds: bool, invariant: str, what: str) -> None:
        if not holds:
            self.violations.append(f"{invariant}: {what}")

    # --- states ----------------------------------------------------------------------------------------------------

    def _transition(self, inner: Callable[..., None], request: Request, to: RequestStatus, *rest: Any) -> None:
        row = request.row
        if row >= 0 and (to.ended or to is RequestStatus.PREEMPTED):
            self._fences.setdefault(row, self.launched)
        self._status[request.id] = to
        if to.ended:
            self._ends[request.id] = self._ends.get(request.id, 0) + 1
            self._check(self._ends[request.id] == 1, "I1", f"{request!r} ends a second time")
        self._inside += 1
        inner(request, to, *rest)
        self._inside -= 1

    def _given_back(self, inner: Callable[..., Any], *args: Any) -> Any:
        self._inside += 1
        result = inner(*args)
        self._inside -= 1
        return result

    # --- rows, pages, labels ---------------------------------------------------------------------------------------

    def _assign(self, inner: Callable[[Request], int], request: Request) -> int:
        row = inner(request)
        self._check(row not in self._fences, "I11", f"row {row} has a new owner before it came back")
        self._check(all(row not in step.filled.rows for step in self._flight), "I11", f"row {row} is in flight")
        self._computed[row] = 0
        self._tables[row] = []
        return row

    def _grow(self, inner: Callable[[int, int, int], list[int]], group: int, row: int, pages: int) -> list[int]:
        taken = inner(group, row, pages)
        for block in taken if group == 0 else ():
            self._check(block >= RESERVED_CHUNKS, "C1", f"reserved block {block} was handed out")
            in_flight = any(block in step.blocks for step in self._flight)
            self._check(not in_flight, "I11", f"block {block} has a new owner while a step in flight uses it")
        return taken

    def _admit(self, inner: Callable[..., int], row: int, *args: Any, **options: Any) -> int:
        self._computed[row] = inner(row, *args, **options)
        return self._computed[row]

    def _retire(self, inner: Callable[[int], None], row: int) -> None:
        self._check(self._inside > 0, "I2", f"pages of row {row} were given up outside of a transition")
        inner(row)

    def _release_pages(self, inner: Callable[[int], None], row: int) -> None:
        self._returns(row, "pages of row")
        inner(row)

    def _release_row(self, inner: Callable[[int], None], row: int) -> None:
        self._returns(row, "row")
        self._fences.pop(row, None)
        inner(row)

    def _returns(self, row: int, what: str) -> None:
        fence = self._fences.get(row)
        self._check(self._inside > 0 and fence is not None, "I2", f"{what} {row} came back without a transition")
        if fence is not None:
            self._check(fence <= self.finished, "I11", f"{what} {row} came back before step {fence} was done")
        last = self._last_step.get(row, 0)
        self._check(last <= self.finished, "I3", f"{what} {row} came back before its last step {last} was done")

    def _label_freed(self, inner: Callable[..., None], request_id: int) -> None:
        self._check(self._inside > 0, "I2", f"the label of request {request_id} was freed outside of a transition")
        inner(request_id)

    # --- steps -----------------------------------------------------------------------------------------------------

    def _launch(self, inner: Callable[..., None], number: int, slot: Slot, filled: Filled) -> None:
        self.launched += 1
        self._check(not self.driver.paused, "A10", "a step was launched during a pause")
        in_flight = self.launched - self.finished
        self._check(in_flight <= 2, "I9", f"{in_flight} steps are in flight")
        self._check(all(s.slot != slot.index for s in self._flight), "I6", f"slot {slot.index} is in flight already")
        owners = [self.parts.rows.requests[row] for row in filled.rows.tolist()]
        requests = [request for request in owners if request is not None]
        self._check(len(requests) == len(owners), "I11", "a row without a request was launched")
        step = _Step(number, slot.index, filled, requests, filled.host_context_lens.tolist())
        self._check_plan(step)
        self._check_tables(step)
        self._flight.append(step)
        self._to_run.append(step)
        inner(number, slot, filled)

    def _check_plan(self, step: _Step) -> None:
        filled, config = step.filled, self.driver.built.config
        assert config.max_batch_tokens is not None and config.max_requests_per_batch is not None
        self._check(int(filled.counts.sum()) <= config.max_batch_tokens, "B3", "too many tokens in a step")
        self._check(len(filled.rows) <= config.max_requests_per_batch, "B3", "too many requests in a step")
        for request, row, end in zip(step.requests, filled.rows.tolist(), step.ends, strict=True):
            self._last_step[row] = self.launched
            # Computing position p gives token p + 1; the last token of an answer by length stands at limit - 1.
            self._check(end <= request.limit - 1, "I4", f"{request!r} is computed to {end}, past {request.limit} - 1")
            self._check(not request.status.ended, "I4", f"{request!r} was scheduled after its end")

    def _check_tables(self, step: _Step) -> None:
        """Each sequence writes its own pages, and its table only ever grows at the end.

        With a prefix cache, complete pages may be those of others too, and may be changed for theirs.
        """
        filled, size, sharing = step.filled, self.parts.cache.page_size, self.parts.cache.sharing is not None
        written: set[int] = set()
        for row, end, count, table in zip(
            filled.rows.tolist(), step.ends, filled.counts.tolist(), filled.host_block_tables.tolist(), strict=True
        ):
            pages = table[: -(-end // size)]
            own = (end - count) // size if sharing else 0
            before = self._tables[row]
            held = pages[own : len(before)] == before[own : len(pages)]
            self._check(held, "C6", f"the pages of row {row} were {before} and are {pages}")
            fresh = min(pages, default=0) >= RESERVED_CHUNKS and not step.blocks.intersection(pages[own:])
            fresh &= not written.intersection(pages)
            self._check(fresh, "C6", f"row {row} was given pages {pages}, which are reserved or another's")
            self._tables[row] = pages if len(pages) >= len(before) else before
            step.blocks.update(pages)
            written.update(pages[own:])

    def _queue(self, inner: Callable[..., None], stream: Any, fn: Callable[[], Any], **options: Any) -> None:
        what = options.get("name")  # on some devices a copy is launched like a step
        self._check(
            stream.name == "compute" or what in ("copy", "swap in", "swap out"),
            "I10",
            f"{what!r} was put on stream {stream.name}",
        )
        inner(stream, fn, **options)

    def _reserve_slot(self, inner: Callable[..., None], *sizes: int) -> None:
        """A slot doubles when a step holds more than it was made for: rare, and never often."""
        self._growing = True
        inner(*sizes)
        self._growing = False

    def _allocate(self, inner: Callable[..., Any], *args: Any) -> Any:
        self._growths += self._growing
        self._check(self._growing and self._growths <= 16, "I13", "a buffer was allocated while running")
        return inner(*args)

    def _forward(self, inputs: StepInputs) -> None:
        """At the head of the forward: the inputs are those of the step, and every token is the right one."""
        with _disable_current_modes():  # looking at them is no part of the step
            self._check_inputs(inputs)

    def _check_inputs(self, inputs: StepInputs) -> None:
        if not self._to_run:
            self._check(False, "I10", "a forward runs that was not launched")
            return
        step = self._to_run.popleft()
        filled = step.filled
        for name in ("query_starts", "context_lens", "block_tables"):
            given, meant = getattr(inputs, name).numpy(), getattr(filled, f"host_{name}")
            if filled.bucket is not None:  # the rest is padding
                given = given[: len(meant)]
            self._check(
                np.array_equal(given, meant), "I7", f"the {name} of step {step.number} are not those it was given"
            )
        ids, at = inputs.token_ids.tolist(), 0
        for request, end, count in zip(step.requests, step.ends, filled.counts.tolist(), strict=True):
            driven = self.driver.driven[request.id]
            known = [*request.prompt.tolist(), *driven.expected] if request.prompt is not None else []
            computed, meant = ids[at : at + count], known[end - count : end]
            self._check(computed == meant, "I7", f"step {step.number} computes {computed} for {request!r}, not {meant}")
            at += count

    def _wait(self, inner: Callable[[], np.ndarray]) -> np.ndarray:
        step = self._flight[0]
        try:
            ids = inner()
        finally:
            self._flight.popleft()
            self.finished += 1
        if step in self._to_run:
            self._to_run.remove(step)
            self._check(False, "I8", f"step {step.number} was waited for and has not run")
        status = self.parts.rows.status
        self.speculated += int((status[step.filled.sample_rows] == DEAD).sum())
        for row, count in zip(step.filled.rows.tolist(), step.filled.counts.tolist(), strict=True):
            self._computed[row] += count
        return ids

    # --- after each turn -------------------------------------------------------------------------------------------

    def _turn(self, inner: Callable[[], bool]) -> bool:
        self.raise_first()
        busy = inner()
        self._look_around()
        self.raise_first()
        return busy

    def _look_around(self) -> None:
        parts, rows = self.parts, self.parts.rows
        parts.cache.check()
        for request in parts.requests.values():
            known = self._status.get(request.id, RequestStatus.PENDING)
            self._check(request.status is known, "I2", f"{request!r} changed its state without a transition")
        for row, request in enumerate(rows.requests):
            if request is None:
                continue
            if rows.status[row] in (LEAVING, DEAD):
                copied = any(e.request is request and e.transfer is not None for e in parts.lifecycle._returning)
                late = self._fences.get(row, self.finished) <= self.finished and not copied
                self._check(not late, "I3", f"row {row} of {request!r} is held for longer than its last step")
            computed, planned = int(rows.computed[row]), int(rows.planned[row])
            exact = computed == self._computed[row] and computed <= min(planned, int(rows.known[row]))
            self._check(exact, "I12", f"row {row} counts {computed} tokens as computed, {self._computed[row]} are")
            self._check(rows.known[row] <= request.limit, "I4", f"{request!r} is longer than its limit")

    def raise_first(self) -> None:
        if self.violations:
            raise Violation(self.violations[0])
