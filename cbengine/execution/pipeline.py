"""Two slots, two streams: launching steps and waiting for them. Engine thread only.

`transfer` carries the inputs to the device; `compute` runs the forward, the sampling and the copy of the tokens back to
the host as its tail (on `transfer` that copy would hold back the inputs of the next step).

    I7 Compute waits for `inputs_ready`.      I9 At most two launched steps.
    I10 Every KV write is on `compute`.       I13 Outputs are read through a slot's host buffer only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from cbengine.cache.geometry import CacheGeometry, block_views
from cbengine.cache.manager import block_tag
from cbengine.devices.base import Device, DeviceLostError, Stream
from cbengine.execution import logprobs
from cbengine.execution.batch import Filled, device_inputs, processor_inputs, sampling_inputs
from cbengine.execution.graphs import GRAPHS, GraphSet
from cbengine.execution.inputs import SamplingInputs, StepInputs
from cbengine.execution.processors import PenaltyTables, process
from cbengine.execution.sampler import sample
from cbengine.execution.slots import Layout, Slot, SlotState, StepSizes
from cbengine.execution.swapping import copy_blocks
from cbengine.models.base import ModelRunner
from cbengine.observe.timeline import STEP, Timeline

PENALTIES = "penalty tables"
"""The race check's name for them."""

Sampler = Callable[..., torch.Tensor]


@dataclass(slots=True)
class Launched:
    """A step in flight."""

    step: int
    slot: Slot
    filled: Filled
    at: float
    """When, by `time.perf_counter()`."""
    error: Exception | None = None
    """What queueing it raised, if it did."""


class Pipeline:
    """The device side of the step loop."""

    def __init__(
        self,
        device: Device,
        runner: ModelRunner,
        *,
        depth: int,
        rows: int,
        max_tokens: int,
        max_seqs: int,
        width: int,
        geometry: CacheGeometry,
        pool: torch.Tensor,
        vocab_size: int,
        sampler: Sampler = sample,
    ) -> None:
        self._device = device
        self._runner = runner
        self._sampler = sampler
        self._geometry = geometry
        self.penalties = PenaltyTables(device, vocab_size)
        self._blocks = block_views(pool, geometry)
        self._transfer = device.stream("transfer")
        self._compute = device.stream("compute")
        # last_token[row]: the id that was sampled last for the row. Written by sampling, read by the next step's
        # forward, both on `compute`, so that ids flow from step N to N + 1 without the host. The last row is the dummy.
        self.last_token = device.device_buffer((rows + 1,), torch.int32)
        words = Layout.of(StepSizes(max_tokens, max_seqs, width, max_seqs, max_seqs, len(geometry.groups))).words
        self.slots = [Slot(device, i, words, max_seqs) for i in range(depth)]
        self.graphs = GraphSet(
            device, runner, self.last_token, groups=len(geometry.groups), page_size=geometry.page_size
        )
        self._in_flight: deque[Launched] = deque()
        self.timeline: Timeline | None = None
        """Where the device's side of steps is recorded."""

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def full(self) -> bool:
        return len(self._in_flight) == len(self.slots)

    def free_slot(self) -> Slot:
        """The slot to fill next; there is one unless `full`. Its inputs may be written from here on."""
        slot = next(s for s in self.slots if s.state is SlotState.FREE)
        if self._device.checks:
            self._device.host_access(writes=(slot.host_in,))
        return slot

    def launch(self, step: int, slot: Slot, filled: Filled) -> None:
        """Queue the whole step: inputs to the device, forward and sampling, tokens to the host.

        Raises nothing: a step that could not be queued is in flight all the same, and `wait` raises what it met.
        """
        assert slot.state is SlotState.FILLED and not self.full
        slot.state = SlotState.LAUNCHED
        launched = Launched(step, slot, filled, time.perf_counter())
        self._in_flight.append(launched)
        try:
            self._queue(slot, filled)
        except Exception as error:
            launched.error = error

    def _queue(self, slot: Slot, filled: Filled) -> None:
        device, words, out_words = self._device, filled.layout.words, filled.out_words
        self._move(self._transfer, slot.device_in[:words], slot.host_in[:words], "copy inputs")
        device.record(slot.inputs_ready, self._transfer)
        device.wait(self._compute, slot.inputs_ready)
        inputs = device_inputs(slot, filled) if filled.bucket is None else None
        if any(filled.copies):
            self._copy(filled.copies)
        if filled.loads:
            load = partial(self.penalties.load, filled.loads)
            device.launch(self._compute, load, name="load penalties", writes=(PENALTIES,))
        reads, writes = self._touched(slot, filled) if device.checks else ((), ())
        run, timeline = partial(self._run, slot, inputs, sampling_inputs(slot, filled), filled), self.timeline
        if timeline is not None:
            prompts = filled.num_tokens - filled.plan.num_decodes
            run = timeline.timed(STEP, run, decodes=filled.plan.num_decodes, prompt_tokens=prompts)
        device.launch(self._compute, run, name="step", reads=reads, writes=writes)
        if out_words:
            self._move(self._compute, slot.host_out[:out_words], slot.device_out[:out_words], "copy tokens")
        device.record(slot.done, self._compute)

    def _move(self, stream: Stream, to: torch.Tensor, source: torch.Tensor, name: str) -> None:
        """Queue a copy; as an operation of its own kind where it is recorded."""
        if self.timeline is None:
            self._device.copy(stream, to, source)
        else:
            copy = self.timeline.timed(name, partial(to.copy_, source, non_blocking=True))
            self._device.launch(stream, copy, name=name, reads=(source,), writes=(to,))

    def _run(self, slot: Slot, inputs: StepInputs | None, sampling: SamplingInputs, filled: Filled) -> None:
        """On `compute`: the step itself. `inputs` is None where a graph has its own."""
        timeline, start = self.timeline, time.perf_counter()
        if inputs is None:
            assert filled.bucket is not None
            logits = self.graphs.run(filled.bucket, slot.device_in)
        else:
            logits = self._forward(inputs)
        if timeline is not None:
            timeline.add("forward", start)
        start = time.perf_counter()
        samples = filled.layout.sizes.samples
        if samples:
            self._sample(slot, logits[:samples], sampling, filled)
        if timeline is not None:
            timeline.add("sample", start)
        if filled.edits.scores:
            top = filled.edits.score_top
            out = slot.device_out[filled.out_words - logprobs.words(filled.edits.num_scores, top) : filled.out_words]
            logprobs.write(out, logits[samples:], slot.tensor(filled.layout, "score_tokens"), top)

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        """On `compute`: the model, with the tokens that only the device knows yet."""
        d = inputs.num_decodes
        if d:
            ids = inputs.token_ids[:d]
            last = self.last_token[inputs.rows[:d].long()]
            ids.copy_(torch.where(ids < 0, last, ids))
        return self._runner.forward(inputs)

    def _sample(self, slot: Slot, logits: torch.Tensor, sampling: SamplingInputs, filled: Filled) -> None:
        samples, edits = len(logits), filled.edits
        changes = processor_inputs(slot, filled)
        processed = process(logits, changes, self.penalties) if changes else logits
        tokens = self._sampler(processed, sampling)
        slot.device_out[:samples] = tokens
        self.last_token[slot.tensor(filled.layout, "sample_rows").long()] = tokens
        if len(changes.penalty_samples):
            self.penalties.count(tokens, changes)
        if len(edits.logprob_samples):
            wanted = slot.tensor(filled.layout, "logprob_samples").long()
            out = slot.device_out[samples : samples + logprobs.words(len(wanted), edits.top)]
            logprobs.write(out, logits[wanted], tokens[wanted], edits.top)

    def _copy(self, copies: list[list[tuple[int, int]]]) -> None:
        """Blocks that two sequences shared and that one of them is about to write."""
        pairs = [(block_tag(g), pair) for g, group in enumerate(copies) for pair in group]
        self._device.launch(
            self._compute,
            partial(copy_blocks, self._blocks, copies),
            name="copy blocks",
            reads=[(tag, source) for tag, (source, _) in pairs],
            writes=[(tag, to) for tag, (_, to) in pairs],
        )

    def _touched(self, slot: Slot, filled: Filled) -> tuple[list[Hashable], list[Hashable]]:
        """Tags of what the step reads and writes, for devices that check: pages inside windows only."""
        page, rows = self._geometry.page_size, [("row", row) for row in filled.rows.tolist()]
        penalties = (PENALTIES,) if len(filled.edits.penalty_samples) else ()
        reads: list[Hashable] = [slot.device_in, *rows, *penalties]
        writes: list[Hashable] = [slot.device_out, *rows, *penalties]
        if filled.bucket is not None:
            writes += [GRAPHS, self.graphs.inputs, self.graphs.logits]
        ends = filled.host_context_lens.astype(np.int64)
        for index, (group, tables) in enumerate(zip(self._geometry.groups, filled.host_tables, strict=True)):
            tag = block_tag(index)
            for table, end, count in zip(tables.tolist(), ends.tolist(), filled.counts.tolist(), strict=True):
                low = 0 if group.window is None else max(0, end - count - group.window + 1)
                reads += [(tag, b) for b in table[low // page : -(-end // page)]]
                writes += [(tag, b) for b in table[(end - count) // page : -(-end // page)]]
        return reads, writes

    def oldest(self) -> Launched:
        return self._in_flight[0]

    def doze(self, deadline: float) -> None:
        """Sleep until the oldest step is through, or until `deadline` (`time.perf_counter()`). May return early."""
        launched = self._in_flight[0]
        if launched.error is None:
            launched.slot.done.wait_until(deadline)

    def wait(self) -> np.ndarray:
        """Wait for the oldest step; returns its outputs, int32 [out_words]. Its slot is FREE afterwards.

        Raises what the step raised; the step has left the pipeline then too. Raises `DeviceLostError` if the device is
        gone, or did not get the inputs.
        """
        launched = self._in_flight[0]
        slot = launched.slot
        try:
            if launched.error is not None:
                self._device.synchronize()  # part of it may be queued
                raise launched.error
            self._check_inputs(slot)
            slot.done.synchronize()
            if self._device.checks:
                self._device.host_access(reads=(slot.host_out,))
            # A copy: the slot is refilled, and may be overwritten, before this step's tokens are all delivered.
            outputs = slot.host_out[: launched.filled.out_words].numpy().copy()
        finally:
            self._in_flight.popleft()
            slot.state = SlotState.FREE
        return outputs

    @staticmethod
    def _check_inputs(slot: Slot) -> None:
        """A step whose inputs did not arrive has run with old ones, and may have written to anybody's pages."""
        try:
            slot.inputs_ready.synchronize()
        except DeviceLostError:
            raise
        except Exception as error:
            raise DeviceLostError(f"the inputs of a step did not reach the device: {error}") from error

    def drain(self) -> None:
        """Wait until nothing is in flight, whatever the steps raise. The last thing before the buffers go."""
        self._device.synchronize()
        for launched in self._in_flight:
            launched.slot.state = SlotState.FREE
        self._in_flight.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of slots and per-row device state."""
        return sum(slot.nbytes for slot in self.slots) + 4 * len(self.last_token)
