"""A double-buffered loop in small: two slots, tokens that stay on the device, pages that another stream restores.

It has what the engine's loop has to get right, and nothing else. A request's page holds a running sum that starts at its
prompt; each step adds the last token to it, and the next token follows from both.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from cbengine.devices import Device

MODULUS = 97
EOS = 5
MAX_NEW = 9
ROWS = PAGES = 3  # one more of each is the dummy, for padding
PROMPTS = (11, 64, 30, 7, 85, 2, 41, 90)


@dataclass(slots=True, eq=False)
class Request:
    prompt: int
    row: int
    page: int
    answer: list[int] = field(default_factory=list[int])
    started: bool = False
    ended: bool = False


class Slot:
    """Inputs int64 [ROWS, 3] (row, page, prompt or -1), outputs int64 [ROWS]."""

    def __init__(self, device: Device) -> None:
        self.host_in = device.host_buffer((ROWS, 3), torch.int64)
        self.device_in = device.device_buffer((ROWS, 3), torch.int64)
        self.device_out = device.device_buffer((ROWS,), torch.int64)
        self.host_out = device.host_buffer((ROWS,), torch.int64)
        self.inputs_ready = device.event("inputs_ready")
        self.inputs_read = device.event("inputs_read")
        self.done = device.event("done")
        self.batch: list[Request] = []
        self.step = -1


class ToyLoop:
    """Answers `PROMPTS`. `hazard` plants a fault that no dropped call could make:

    "page returned at once": a page may be restored for the next request while launched steps still write it.
    "record too early": `done` is recorded before the copy of the outputs.
    """

    def __init__(self, device: Device, hazard: str = "") -> None:
        self.device, self.hazard = device, hazard
        self.transfer, self.compute, self.swap = (device.stream(n) for n in ("transfer", "compute", "swap"))
        self.swapped = device.event("swapped")
        self.sums = device.device_buffer((PAGES + 1,), torch.int64)
        self.last = device.device_buffer((ROWS + 1,), torch.int64)
        self.slots = [Slot(device) for _ in range(2)]
        self.waiting = deque(PROMPTS)
        self.running: list[Request] = []
        self.ended: list[Request] = []
        self.free = [(i, i) for i in range(ROWS)]  # (row, page)
        self.retired: list[tuple[int, tuple[int, int]]] = []  # (the newest step that may touch them, (row, page))

    def run(self) -> list[list[int]]:
        """The answers, in the order of `PROMPTS`."""
        step, in_flight = 0, deque[Slot]()
        while self.waiting or self.running or in_flight:
            slot = self.slots[step % 2]
            reused = len(in_flight) == 2
            self.admit()
            if reused:
                slot.inputs_read.synchronize()
            batch = self.fill(slot)
            if reused:
                self.commit(in_flight.popleft(), newest=step)
            if batch:
                slot.batch, slot.step = batch, step
                self.launch(slot)
                in_flight.append(slot)
            elif in_flight:
                self.commit(in_flight.popleft(), newest=step)
            step += 1
        answers = {r.prompt: r.answer for r in self.ended}
        return [answers[p] for p in PROMPTS]

    def admit(self) -> None:
        while self.waiting and self.free:
            row, page = self.free.pop(0)
            request = Request(self.waiting.popleft(), row, page)
            self.running.append(request)
            self.device.launch(
                self.swap,
                lambda page=page, prompt=request.prompt: self.sums[page].fill_(prompt),
                name="restore",
                writes=(("page", page),),
            )
            self.device.record(self.swapped, self.swap)

    def fill(self, slot: Slot) -> list[Request]:
        self.device.host_access(writes=(slot.host_in,))
        entries = [(r.row, r.page, -1 if r.started else r.prompt) for r in self.running]
        entries += [(ROWS, PAGES, 0)] * (ROWS - len(entries))
        for i, entry in enumerate(entries):
            for j, value in enumerate(entry):
                slot.host_in[i, j] = value
        for request in self.running:
            request.started = True
        return list(self.running)

    def launch(self, slot: Slot) -> None:
        device = self.device
        device.copy(self.transfer, slot.device_in, slot.host_in)
        device.record(slot.inputs_ready, self.transfer)
        device.wait(self.compute, slot.inputs_ready)
        device.wait(self.compute, self.swapped)
        pages = tuple(("page", r.page) for r in slot.batch)
        device.launch(
            self.compute,
            lambda: self.forward(slot),
            name="forward",
            reads=(slot.device_in, self.last),
            writes=(slot.device_out, self.last, *pages),
        )
        device.record(slot.inputs_read, self.compute)
        if self.hazard == "record too early":
            device.record(slot.done, self.compute)
        device.copy(self.compute, slot.host_out, slot.device_out)
        if self.hazard != "record too early":
            device.record(slot.done, self.compute)

    def forward(self, slot: Slot) -> None:
        rows, pages, prompts = slot.device_in.unbind(1)
        last = torch.where(prompts >= 0, prompts, self.last[rows])
        sums = self.sums[pages] + last
        tokens = (sums * 31 + last * 7 + 3) % MODULUS
        self.sums[pages] = sums
        self.last[rows] = tokens
        slot.device_out.copy_(tokens)

    def commit(self, slot: Slot, newest: int) -> None:
        """Hand out the tokens of a step. `newest`: the step that was filled last; it may touch what ends here."""
        slot.done.synchronize()
        self.device.host_access(reads=(slot.host_out,))
        for request, token in zip(slot.batch, slot.host_out.tolist(), strict=False):
            if request.ended:
                continue  # computed ahead of an end that was not known
            request.answer.append(token)
            if token == EOS or len(request.answer) == MAX_NEW:
                request.ended = True
                self.running.remove(request)
                self.ended.append(request)
                place = (request.row, request.page)
                if self.hazard == "page returned at once":
                    self.free.append(place)
                else:
                    self.retired.append((newest, place))
        self.free += [place for fence, place in self.retired if fence <= slot.step]
        self.retired = [(fence, place) for fence, place in self.retired if fence > slot.step]


def reference() -> list[list[int]]:
    """What the loop has to answer."""
    answers: list[list[int]] = []
    for prompt in PROMPTS:
        total, last, answer = prompt, prompt, list[int]()
        while not answer or (len(answer) < MAX_NEW and last != EOS):
            total += last
            last = (total * 31 + last * 7 + 3) % MODULUS
            answer.append(last)
        answers.append(answer)
    return answers
