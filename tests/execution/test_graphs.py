"""Steps that are replayed from graphs: the invariants hold, the tokens are right, and what would go wrong is found."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from cbengine.config import EngineConfig
from cbengine.devices import Device, InlineDevice, ThreadedDevice
from cbengine.devices.baked import BakedValueError
from cbengine.devices.cuda import CudaDevice
from cbengine.errors import UnsupportedFeatureError
from cbengine.execution import batch
from cbengine.execution.batch import Filled
from cbengine.execution.buckets import Bucket, pad
from cbengine.execution.graphs import GraphPaths, GraphSet
from cbengine.execution.inputs import StepInputs
from cbengine.execution.slots import Slot
from cbengine.testing import FakeModel, SimDevice
from tests.devices.fake_cuda import FakeCuda
from tests.execution.witness import Witness
from tests.execution.workload import MEMORY, Workload, make_config, make_driver, make_model
from tests.support.driver import Driver

SEEDS = range(70)


@dataclass
class Counts:
    """How a run's steps were computed."""

    replayed: int = 0
    eager: int = 0
    captures: int = 0


def _count(driver: Driver) -> Counts:
    counts, pipeline, device = Counts(), driver.parts.pipeline, driver.device
    run, forward, capture = pipeline.graphs.run, pipeline._forward, device.capture

    def counted_run(bucket: Bucket, inputs: torch.Tensor) -> torch.Tensor:
        counts.replayed += 1
        return run(bucket, inputs)

    def counted_forward(inputs: StepInputs) -> torch.Tensor:
        counts.eager += 1
        return forward(inputs)

    def counted_capture(key: Any, fn: Callable[[], Any]) -> Callable[[], Any]:
        counts.captures += 1
        return capture(key, fn)

    pipeline.graphs.run, pipeline._forward, device.capture = counted_run, counted_forward, counted_capture
    return counts


def _run(device: Device, seed: int, stop: str = "", **overrides: object) -> tuple[Witness, Counts]:
    driver = make_driver(device, seed, **{"use_cuda_graph": True, **overrides})
    witness, counts = Witness(driver), _count(driver)
    try:
        Workload(driver, seed, stop=stop).run()
        witness.raise_first()
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    return witness, counts


def test_the_invariants_hold_with_graphs() -> None:
    """Of each seed's steps those with prompts, those without, or all are replayed; some contexts are too long for a graph."""
    total = Counts()
    for seed in SEEDS:
        device = SimDevice(seed, memory=MEMORY)
        paths = ((True, True), (True, False), (False, True))[seed % 3]
        few = {"kv_padding_interval_size": 8, "max_cached_graphs": 3} if seed % 4 == 0 else {}
        # Decode batches of 3 and of 5 are padded where there may be 6.
        rows = (3, 6)[seed // 2 % 2]
        _, counts = _run(
            device, seed, ("", "hard", "drain")[seed % 3], use_cuda_graph=paths, max_requests_per_batch=rows, **few
        )
        total = Counts(*(a + b for a, b in zip(_values(total), _values(counts), strict=True)))
    assert total.replayed > 280 and total.eager > 110
    assert total.captures == 0  # under load nothing is captured


def _values(counts: Counts) -> tuple[int, int, int]:
    return counts.replayed, counts.eager, counts.captures


@pytest.mark.parametrize("make", [InlineDevice, ThreadedDevice])
def test_the_invariants_hold_on_the_other_devices(make: Callable[[], Device]) -> None:
    for seed in range(8):
        device = make()
        device.attach()
        _, counts = _run(device, seed)
        assert counts.replayed > 0 and counts.eager == 0
        device.close()


# --- hazards -------------------------------------------------------------------------------------------------------


def _inputs_on_the_transfer_stream(driver: Driver, _: pytest.MonkeyPatch) -> None:
    """The graphs' inputs are filled while the replay before may still read them."""
    device, pipeline = driver.device, driver.parts.pipeline
    graphs, launch = pipeline.graphs, pipeline.launch

    def early(step: int, slot: Slot, filled: Filled) -> None:
        words = filled.layout.model_words
        if filled.bucket is not None:
            device.copy(device.stream("transfer"), graphs.inputs[:words], slot.host_in[:words])
        launch(step, slot, filled)

    def run(bucket: Bucket, inputs: torch.Tensor) -> torch.Tensor:
        graphs._replays[bucket]()
        return graphs.logits[: bucket.seqs]

    pipeline.launch, graphs.run = early, run


def _a_compute_stream_for_each_slot(driver: Driver, _: pytest.MonkeyPatch) -> None:
    """Two replays at a time on one set of graphs: they share inputs, intermediate results and logits."""
    device, queue = driver.device, driver.parts.pipeline._queue

    def on_its_own(slot: Slot, filled: Filled) -> None:
        compute = driver.parts.pipeline._compute
        driver.parts.pipeline._compute = device.stream(f"compute {slot.index}")
        try:
            queue(slot, filled)
        finally:
            driver.parts.pipeline._compute = compute

    driver.parts.pipeline._queue = on_its_own


def _a_number_of_the_host(driver: Driver, _: pytest.MonkeyPatch) -> None:
    """The model cuts something at the batch's real size. (Every graph has been captured with another one.)"""
    model, number = driver.model, [0]
    forward, fill = model.forward, driver.parts.filler.fill

    def filling(slot: Slot, plan: Any) -> Filled:
        filled = fill(slot, plan)
        number[0] = len(filled.rows)
        return filled

    def cutting(inputs: StepInputs) -> torch.Tensor:
        inputs.context_lens[: number[0]].sum()
        return forward(inputs)

    model.forward, driver.parts.filler.fill = cutting, filling


def _inputs_moved_after_capture(driver: Driver, _: pytest.MonkeyPatch) -> None:
    graphs = driver.parts.pipeline.graphs
    graphs.inputs = driver.device.device_buffer((len(graphs.inputs),), torch.int32)


def _stale_padding(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded sequences keep the block tables of whoever stood in the slot before, and write to their pages."""

    def careless(section: Callable[[str], np.ndarray], bucket: Bucket, **sizes: int) -> None:
        tables = section("block_tables").copy()
        pad(section, bucket, **sizes)
        if bucket.decode:
            section("block_tables")[:] = tables

    monkeypatch.setattr(batch, "pad", careless)


def _logits_read_late(driver: Driver, _: pytest.MonkeyPatch) -> None:
    """A step's logits are looked at after the next replay (pytorch #166975): what graphs leave behind lives until then."""
    pipeline = driver.parts.pipeline
    run, kept = pipeline.graphs.run, list[torch.Tensor]()

    def late(bucket: Bucket, inputs: torch.Tensor) -> torch.Tensor:
        logits = run(bucket, inputs)
        kept.append(logits.clone())
        return kept[-2][: len(logits)] if len(kept) > 1 and len(kept[-2]) >= len(logits) else logits

    pipeline.graphs.run = late


def _captured_under_load(driver: Driver, _: pytest.MonkeyPatch) -> None:
    """A shape that is missing is captured when it comes. (It waits for the device: the loop must never.)"""
    graphs, find = driver.parts.pipeline.graphs, driver.parts.pipeline.graphs.find

    def lazily(*, decode: bool, tokens: int, seqs: int, width: int) -> Bucket | None:
        found = find(decode=decode, tokens=tokens, seqs=seqs, width=width)
        if found is None or found.tokens != tokens:
            host = driver.device.host_buffer((len(graphs.inputs),), torch.int32)
            found = Bucket(decode, tokens, max(seqs, 1), found.width if found else width)
            graphs._replays[found] = graphs._capture(found, host)
        return found

    graphs.find = lazily


HAZARDS: dict[str, tuple[Callable[[Driver, pytest.MonkeyPatch], None], str]] = {
    "inputs are copied on the transfer stream": (_inputs_on_the_transfer_stream, "race"),
    "two replays at a time": (_a_compute_stream_for_each_slot, "race|I10"),
    "a number of the host is frozen": (_a_number_of_the_host, "BakedValueError"),
    "inputs moved after the capture": (_inputs_moved_after_capture, "I7|said"),
    "padding writes to somebody's page": (_stale_padding, "said|I7"),
    "logits are read after the next replay": (_logits_read_late, "said|I7"),
    "a shape is captured when it comes": (_captured_under_load, "I13|I10|race"),
}


@pytest.mark.parametrize("name", list(HAZARDS))
def test_a_hazard_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, found_as = HAZARDS[name]
    found: list[str] = []
    for seed in range(1, 40):
        settings = {"use_cuda_graph": True, "use_async_batching": True, "max_requests_per_batch": 6}
        driver = make_driver(SimDevice(seed, memory=MEMORY), seed, **settings)
        with monkeypatch.context() as patch:
            plant(driver, patch)
            # A step that fails is enough where a value was frozen; the witness would find what follows from it first.
            witness = None if "frozen" in name else Witness(driver)
            try:
                Workload(driver, seed, requests=10).run()
                if witness is not None:
                    witness.raise_first()
            except Exception as error:  # whatever it is
                found.append(repr(error) + repr(error.__cause__))
        if len(found) == 5:
            break
    as_meant = [error for error in found if any(word in error for word in found_as.split("|"))]
    assert len(found) == 5 and len(as_meant) > 2, found


# --- which steps, and what if it cannot be -------------------------------------------------------------------------


class _Reader(FakeModel):
    """Looks at a value on the device, as models with dynamic rope scaling do."""

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        if int(inputs.positions.max()) >= 0:
            return super().forward(inputs)
        raise AssertionError


class _Uncapturable(FakeModel):
    capturable = False


class _GraphDevice(InlineDevice):
    graphs = True


@pytest.mark.parametrize(
    ("settings", "device", "paths"),
    [
        ({}, InlineDevice, (False, False)),
        ({}, _GraphDevice, (True, True)),
        ({"use_cuda_graph": False}, _GraphDevice, (False, False)),
        ({"use_cuda_graph": (False, True)}, _GraphDevice, (False, True)),
        ({"use_cuda_graph": (True, False)}, InlineDevice, (True, False)),
        ({"q_padding_interval_size": 32}, InlineDevice, (True, True)),
        ({"kv_padding_interval_size": 1024}, InlineDevice, (True, True)),
        ({"use_cuda_graph": False, "kv_padding_interval_size": 1024}, _GraphDevice, (False, False)),
    ],
)
def test_which_steps_use_graphs(
    settings: dict[str, Any], device: Callable[[], Device], paths: tuple[bool, bool]
) -> None:
    found = GraphPaths.of(EngineConfig(**settings), device(), FakeModel())
    assert (found.varlen, found.decode) == paths


def test_a_model_that_cannot_be_captured() -> None:
    assert GraphPaths.of(EngineConfig(), _GraphDevice(), _Uncapturable()) == GraphPaths(False, False, False)
    with pytest.raises(UnsupportedFeatureError, match="use_cuda_graph=True: fake cannot be captured"):
        GraphPaths.of(EngineConfig(use_cuda_graph=True), _GraphDevice(), _Uncapturable())
    with pytest.raises(UnsupportedFeatureError, match=r"q_padding_interval_size=16: fake .* leave q_padd"):
        GraphPaths.of(EngineConfig(q_padding_interval_size=16), _GraphDevice(), _Uncapturable())


def test_a_model_that_reads_the_device_goes_on_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "cbengine")
    driver = Driver(_Reader(max_model_len=64), _GraphDevice(), make_config(1))
    assert "no graphs on the decode path: aten" in caplog.text and "makes the host wait" in caplog.text
    assert len(driver.parts.pipeline.graphs) == 0
    asked = driver.submit([2, 3, 4], max_new_tokens=5)
    driver.run()
    driver.check()
    assert asked.buffer.ids


def test_graphs_that_were_asked_for_and_cannot_be() -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"\(varlen path\): aten.*leaves it out"):
        Driver(_Reader(max_model_len=64), _GraphDevice(), make_config(1, use_cuda_graph=True))


def test_a_capture_that_fails_ends_the_captures_of_its_path(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cbengine")
    runtime = FakeCuda()
    runtime.break_capture = RuntimeError("operation not permitted when stream is capturing")
    driver = make_driver(CudaDevice(runtime=runtime), 1)
    assert len(runtime.captures) == 2 and len(driver.parts.pipeline.graphs) == 0  # one for each path
    assert caplog.text.count("operation not permitted") == 2
    Workload(driver, 1).run()


def test_captures_are_few_and_the_largest_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cbengine")
    runtime = FakeCuda()
    config = EngineConfig(num_blocks=8, max_requests_per_batch=20, max_batch_tokens=100, max_cached_graphs=5)
    driver = Driver(make_model(), CudaDevice(runtime=runtime), config)
    graphs = driver.parts.pipeline.graphs
    assert len(graphs) == len(runtime.captures) == 5
    sizes = [bucket.tokens for bucket in graphs._replays]
    assert sizes == sorted(sizes, reverse=True)
    assert "captured 5 graphs in" in caplog.text
    assert driver.built.config.use_cuda_graph == (True, True)
    assert driver.parts.pipeline.slots[0].device_in is not graphs.inputs  # one set, which belongs to no slot


def test_the_numbers_of_a_captured_step_are_its_shapes() -> None:
    """What a graph freezes has to hold for every step that is padded up to it: lengths that are too small lose queries without
    a word, and a window that is compared with a short context is gone for long ones too."""
    seen: list[StepInputs] = []
    model = make_model()
    model.fault = seen.append
    config = EngineConfig(num_blocks=8, page_size=8, max_requests_per_batch=4, max_batch_tokens=32)
    driver = Driver(model, CudaDevice(runtime=FakeCuda()), config)
    width = driver.parts.cache.tables.shape[1]
    for bucket in driver.parts.pipeline.graphs._replays:
        numbers = (bucket.tokens, bucket.seqs, bucket.seqs if bucket.decode else 0, bucket.seqs)
        alike = [
            inputs
            for inputs in seen
            if (inputs.num_tokens, inputs.num_seqs, inputs.num_decodes, inputs.num_samples) == numbers
        ]
        assert len(alike) >= 2  # once to warm up, once to be captured
        for inputs in alike:
            assert inputs.max_query_len == (1 if bucket.decode else bucket.tokens)
            assert inputs.max_context_len == width * 8
            assert inputs.block_tables.shape == (bucket.seqs, width)
            assert inputs.host_context_lens.size == inputs.host_query_starts.size == inputs.host_block_tables.size == 0


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 16])
def test_every_edge_of_the_decode_shapes(count: int) -> None:
    device = CudaDevice(runtime=FakeCuda())
    config = EngineConfig(
        page_size=16, num_blocks=40, max_requests_per_batch=16, max_batch_tokens=64, safety_margin=0.0
    )
    driver = Driver(make_model(), device, config)
    counts = _count(driver)
    for index in range(count):
        driver.submit([2 + index, 3, 4][: 1 + index % 3], max_new_tokens=4, ignore_eos=True)
    driver.run()
    driver.check()
    assert counts.replayed >= 4 and counts.eager == 0


def test_scored_prompts_run_eagerly() -> None:
    graphs = make_driver(CudaDevice(runtime=FakeCuda()), 1).parts.pipeline.graphs
    assert graphs.find(decode=True, tokens=1, seqs=1, width=1) is not None
    assert graphs.find(decode=True, tokens=4, seqs=4, width=1) is None  # more than the three requests of a batch


def test_a_baked_value_fails_its_step_alone() -> None:
    driver = make_driver(InlineDevice(), 1, use_cuda_graph=True)
    graphs: GraphSet = driver.parts.pipeline.graphs
    bucket = next(bucket for bucket in graphs._replays if bucket.decode)
    broken = partial(_raise, BakedValueError("a replay differs"))
    first = driver.submit([2, 3, 4], max_new_tokens=4, ignore_eos=True)
    replays = dict(graphs._replays)
    graphs._replays = {key: broken if key.decode else replay for key, replay in replays.items()}
    driver.run()
    assert "a replay differs" in str(first.buffer.error)
    graphs._replays = replays
    second = driver.submit([2, 3, 4], max_new_tokens=4, ignore_eos=True)
    driver.run()
    assert second.buffer.ids == second.expected and bucket in graphs._replays


def _raise(error: Exception) -> None:
    raise error
