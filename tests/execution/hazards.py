"""Faults planted from outside in a driven loop, each against one invariant. What holds the invariant has to find it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cbengine.cache.geometry import RESERVED_CHUNKS
from cbengine.execution.batch import FROM_DEVICE, Filled
from cbengine.execution.slots import Slot
from cbengine.outputs import FinishReason, RequestStatus
from cbengine.scheduling.base import StepPlan
from cbengine.scheduling.lifecycle import Lifecycle
from cbengine.scheduling.request import Request
from cbengine.scheduling.rows import DEAD, LEAVING, RUNNING
from tests.support.driver import Driver

Plant = Callable[[Driver, set[tuple[str, str]]], None]
"""Given the driver and the set of device calls to drop: ("wait", "inputs_ready") and the like."""


@dataclass(frozen=True)
class Hazard:
    """`breaks`: the invariant. `found_as`: a pattern of the message of the error that ends the run, in most seeds."""

    breaks: str
    plant: Plant
    found_as: str


def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    inner = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(inner, *args, **kwargs))


def _drop(kind: str, event: str) -> Plant:
    return lambda driver, dropped: dropped.add((kind, event))


# --- states and ends -----------------------------------------------------------------------------------------------


def _end_without_transition(driver: Driver, _: object) -> None:
    def end(request: Request, status: RequestStatus, reason: FinishReason, error: BaseException | None = None) -> None:
        request.status, request.finish_reason, request.error = status, reason, error
        driver.parts.outbox.event(request)

    driver.loop.end = end


def _rows_held_while_busy(driver: Driver, _: object) -> None:
    lifecycle, pipeline = driver.parts.lifecycle, driver.parts.pipeline

    def reclaim(inner: Callable[[], None]) -> None:
        if not pipeline.num_in_flight:
            inner()

    _around(lifecycle, "reclaim", reclaim)


def _early_pages(driver: Driver, _: object) -> None:
    cache = driver.parts.cache
    release = cache.release

    def retire(inner: Callable[[int], None], row: int) -> None:
        inner(row)
        release(row)

    _around(cache, "retire", retire)
    cache.release = lambda row: None


def _early_row(driver: Driver, _: object) -> None:
    rows = driver.parts.rows
    early: set[int] = set()

    def give_back(inner: Callable[..., None], request: Request, row_status: int) -> None:
        if request.row not in early:
            early.add(request.row)
            rows._free.append(request.row)
        inner(request, row_status)

    def release(inner: Callable[[int], None], row: int) -> None:
        early.discard(row)
        if row in rows._free:  # else it has a new owner
            rows._free.remove(row)
            inner(row)

    lifecycle: Lifecycle = driver.parts.lifecycle
    _around(lifecycle, "_give_back", give_back)
    _around(rows, "release", release)


def _lost_page(driver: Driver, _: object) -> None:
    cache = driver.parts.cache

    def release(inner: Callable[[int], None], row: int) -> None:
        cache.lengths[row] -= 1
        inner(row)

    _around(cache, "release", release)


def _dead_rows_commit(driver: Driver, _: object) -> None:
    status = driver.parts.rows.status

    def commit(inner: Callable[..., None], filled: Filled, ids: np.ndarray) -> None:
        dead = status == DEAD
        status[dead] = LEAVING
        inner(filled, ids)
        status[dead] = DEAD

    _around(driver.parts.committer, "commit", commit)


def _dead_rows_decode(driver: Driver, _: object) -> None:
    """The scheduler is not told of a cancel."""
    rows, scheduler = driver.parts.rows, driver.parts.scheduler

    def remove(inner: Callable[[Request], None], request: Request) -> None:
        if request.row < 0 or rows.status[request.row] == RUNNING:
            inner(request)

    _around(scheduler, "remove", remove)


def _later_limit(owner: Any, name: str, limit: np.ndarray) -> None:
    def wrapper(inner: Callable[..., Any], *args: Any) -> Any:
        limit[:] += 1
        try:
            return inner(*args)
        finally:
            limit[:] -= 1

    _around(owner, name, wrapper)


def _schedule_past_the_limit(driver: Driver, _: object) -> None:
    _later_limit(driver.parts.scheduler, "_decode_pass", driver.parts.rows.limit)


def _commit_past_the_limit(driver: Driver, _: object) -> None:
    _later_limit(driver.parts.committer, "commit", driver.parts.rows.limit)


def _computed_at_launch(driver: Driver, _: object) -> None:
    rows = driver.parts.rows

    def launch(inner: Callable[..., None], number: int, slot: Slot, filled: Filled) -> None:
        rows.computed[filled.rows] += filled.counts
        inner(number, slot, filled)

    def commit(inner: Callable[..., None], filled: Filled, ids: np.ndarray) -> None:
        rows.computed[filled.rows] -= filled.counts
        inner(filled, ids)

    _around(driver.parts.pipeline, "launch", launch)
    _around(driver.parts.committer, "commit", commit)


# --- slots and streams ---------------------------------------------------------------------------------------------


def _slots_share_inputs(driver: Driver, _: object) -> None:
    first, second = driver.parts.pipeline.slots
    for name in ("host_in", "_ints", "_floats"):
        setattr(second, name, getattr(first, name))


def _read_before_wait(driver: Driver, _: object) -> None:
    pipeline, device = driver.parts.pipeline, driver.device

    def wait(inner: Callable[[], np.ndarray]) -> np.ndarray:
        launched = pipeline.oldest()
        device.host_access(reads=(launched.slot.host_out,))
        ids = launched.slot.host_out[: launched.filled.layout.sizes.samples].numpy().copy()
        inner()
        return ids

    _around(pipeline, "wait", wait)


def _done_before_the_tokens(driver: Driver, _: object) -> None:
    """`done` is recorded between the step and the copy of its tokens."""
    device, held = driver.device, list[tuple[Any, ...]]()

    def copy(inner: Callable[..., None], stream: Any, dst: Any, src: Any) -> None:
        if stream.name == "compute":
            held.append((inner, stream, dst, src))
        else:
            inner(stream, dst, src)

    def record(inner: Callable[..., None], event: Any, stream: Any) -> None:
        inner(event, stream)
        if stream.name == "compute" and held:
            late, *args = held.pop()
            late(*args)

    _around(device, "copy", copy)
    _around(device, "record", record)


def _three_slots(driver: Driver, _: object) -> None:
    pipeline = driver.parts.pipeline
    pipeline.slots.append(Slot(driver.device, 2, len(pipeline.slots[0].host_in), len(pipeline.slots[0].host_out)))


def _steps_on_the_transfer_stream(driver: Driver, _: object) -> None:
    device, rng = driver.device, random.Random(0)

    def launch(inner: Callable[..., None], stream: Any, fn: Callable[[], Any], **options: Any) -> None:
        inner(device.stream("transfer") if rng.random() < 0.5 else stream, fn, **options)

    _around(device, "launch", launch)


def _buffer_for_each_step(driver: Driver, _: object) -> None:
    def fill(inner: Callable[..., Filled], slot: Slot, plan: StepPlan) -> Filled:
        driver.device.device_buffer((1,), torch.int32)
        return inner(slot, plan)

    _around(driver.parts.filler, "fill", fill)


# --- contents of a slot --------------------------------------------------------------------------------------------


def _after_fill(change: Callable[[Driver, Slot, Filled], None]) -> Plant:
    def plant(driver: Driver, _: object) -> None:
        def fill(inner: Callable[..., Filled], slot: Slot, plan: StepPlan) -> Filled:
            filled = inner(slot, plan)
            change(driver, slot, filled)
            return filled

        _around(driver.parts.filler, "fill", fill)

    return plant


def _next_page(driver: Driver, slot: Slot, filled: Filled) -> None:
    """One sequence writes to the page after its own."""
    page = (int(filled.host_context_lens[-1]) - 1) // driver.parts.cache.page_size
    table = filled.host_block_tables[-1]
    table[page] = RESERVED_CHUNKS + (table[page] + 1 - RESERVED_CHUNKS) % driver.parts.cache.capacity


def _stale_ids(driver: Driver, slot: Slot, filled: Filled) -> None:
    """Tokens that only the device knows yet are taken from the host's table."""
    d = filled.plan.num_decodes
    ids, rows, at = slot.ints(filled.layout, "token_ids")[:d], filled.rows[:d], filled.host_context_lens[:d] - 1
    ids[:] = np.where(ids == FROM_DEVICE, driver.parts.rows.tokens[rows, at], ids)


def _noise_of_a_neighbour(driver: Driver, slot: Slot, filled: Filled) -> None:
    uniform = slot.floats(filled.layout, "uniform")
    uniform[:] = np.roll(uniform, 1)


HAZARDS: dict[str, Hazard] = {
    "a cancel goes past the transition": Hazard(
        "I2", _end_without_transition, "without a transition|after its end|cannot"
    ),
    "rows are held until the engine is idle": Hazard("I3", _rows_held_while_busy, "^I3: row"),
    "an ended request goes on being scheduled": Hazard("I4", _dead_rows_decode, "^I4|none can be scheduled"),
    "a speculated token is emitted": Hazard("I4", _dead_rows_commit, "after its end|cannot become"),
    "a request is scheduled past its limit": Hazard("I4", _schedule_past_the_limit, "^I4: .* past"),
    "a token is counted past the limit": Hazard("I4", _commit_past_the_limit, "none can be scheduled"),
    "a slot is refilled while it is in flight": Hazard("I6", _slots_share_inputs, "race .* transfer and the host"),
    "the wait for done is left out": Hazard("I6", _drop("synchronize", "done"), "race .* and the host|^I8"),
    "compute does not wait for its inputs": Hazard("I7", _drop("wait", "inputs_ready"), "race .* transfer and step"),
    "ids are not taken from the device": Hazard("I7", _after_fill(_stale_ids), "^I7"),
    "no wait before outputs are read": Hazard("I8", _read_before_wait, "race .* compute and the host"),
    "done is recorded before the tokens are copied": Hazard(
        "I8", _done_before_the_tokens, "race .* compute and the host"
    ),
    "three steps in flight": Hazard("I9", _three_slots, "^I9"),
    "steps run on either stream": Hazard("I10", _steps_on_the_transfer_stream, "race .* step on"),
    "pages come back at once": Hazard("I11", _early_pages, "race on .'block'"),
    "rows come back at once": Hazard("I11", _early_row, "race on .'row'|^I11: row"),
    "what is computed is counted at launch": Hazard("I12", _computed_at_launch, "^I12"),
    "a buffer is made for each step": Hazard("I13", _buffer_for_each_step, "^I13"),
    "a page is off by one": Hazard("C6", _after_fill(_next_page), "^C6|race on .'block'|said"),
    "a page is lost at each end": Hazard("C6", _lost_page, ""),
    "noise of a neighbour": Hazard("E2", _after_fill(_noise_of_a_neighbour), "^I7|said"),
}
