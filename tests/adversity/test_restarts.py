"""Starting and stopping again and again: threads, memory and objects come back to what they were."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cbengine import AsyncEngine, EngineDeadError, EngineStoppedError
from cbengine.devices.base import DeviceLostError
from cbengine.execution.inputs import StepInputs
from cbengine.testing import FakeModel
from tests.adversity.census import PER_REQUEST, PER_RUN, Record, living, resident, threads
from tests.api.fakes import fake_engine, prompt
from tests.models.tiny import tiny
from tests.support.loops import aio, eventually

MIB = 2**20


@aio
async def test_starting_and_stopping_five_times() -> None:
    model = FakeModel()
    engine = fake_engine(model)
    expected = tuple(model.reference(prompt(9), 6, ignore_eos=True))
    before = threads()
    for _ in range(5):
        await engine.start()
        assert threads() - before == {"cbengine-engine", "cbengine-compute", "cbengine-transfer"}
        answer = await engine.generate(prompt(9), max_new_tokens=6, ignore_eos=True)
        assert answer.token_ids == expected
        assert engine.stats().requests_finished == 1  # counted from the start
        await engine.stop()
        await eventually(lambda: threads() == before)
        assert living(*PER_REQUEST) == {}
        assert living(*PER_RUN) == {"Worker": 1}  # the last run, for what can still be asked about it
    await engine.aclose()
    del engine
    assert living(*PER_RUN) == {}


@aio
async def test_engines_one_after_the_other_over_one_model() -> None:
    model = FakeModel()
    before = threads()
    for n in range(5):
        engine = fake_engine(model, page_size=4 + n)
        async with engine:
            answer = await engine.generate(prompt(9), max_new_tokens=6, ignore_eos=True)
            assert answer.token_ids == tuple(model.reference(prompt(9), 6, ignore_eos=True))
        del engine
    await eventually(lambda: threads() == before)
    assert living(*PER_REQUEST, *PER_RUN) == {}


def _large(fault: Callable[[StepInputs], None] | None = None) -> AsyncEngine:
    """Its cache has over 40 MiB, and the CPU pool for swapping 51."""
    model = FakeModel(max_model_len=2**20, fault=fault)
    return fake_engine(model, page_size=256, num_blocks=6000, cpu_offload_space=0.05)


def _fill(engine: AsyncEngine) -> list[torch.Tensor]:
    """Make the cache and the CPU pool resident; returns them."""
    assert engine._worker is not None and engine._worker.built is not None
    pools = [engine._worker.built.pool, engine._worker.built.host_pool]
    filled: list[torch.Tensor] = []
    for pool in pools:
        assert pool is not None
        pool.fill_(1)
        assert pool.nbytes > 40 * MIB
        filled.append(pool)
    return filled


def _given_back(pools: list[torch.Tensor]) -> bool:
    """Whoever still refers to them: memory that the kernel took back reads as zeros."""
    return not any(bool(pool.any()) for pool in pools)


@aio("asyncio")
async def test_the_cache_is_given_back_by_every_stop(record_property: Record) -> None:
    engine = _large()
    sizes: list[int] = []
    for _ in range(5):
        await engine.start()
        memory = _fill(engine)
        await engine.generate(prompt(9), max_new_tokens=6)
        sizes.append(resident())
        await engine.stop()
        assert _given_back(memory)
    await engine.aclose()
    record_property("resident_mib", [size // MIB for size in sizes])
    print([size // MIB for size in sizes])
    assert sizes[-1] - sizes[0] < 2 * 90 * MIB  # and not four times, as if it were kept


@aio("asyncio")
async def test_the_cache_is_given_back_by_an_engine_that_died_whoever_keeps_its_error() -> None:
    def fault(inputs: StepInputs) -> None:
        raise DeviceLostError("planted")

    engine = _large(fault)
    await engine.start()
    memory = _fill(engine)
    with pytest.raises(EngineDeadError) as caught:
        await engine.generate(prompt(9), max_new_tokens=6)
    assert engine.health().status == "dead"
    await engine.stop()  # waits until it has cleaned up
    assert _given_back(memory)
    assert caught.value.__cause__ is engine.health().error
    await engine.aclose()


@aio("asyncio")
async def test_a_callers_own_model_is_given_back_as_it_was() -> None:
    model: Any = tiny("llama")
    ids = prompt(9)

    def state() -> list[object]:
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        return [model.config._attn_implementation, model.training, hooks, sorted(vars(model))]

    def generate() -> tuple[int, ...]:
        with torch.inference_mode():
            out = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False, pad_token_id=0)
        return tuple(out[0, len(ids) :].tolist())

    before = state()
    answers = [generate()]
    for _ in range(2):
        async with AsyncEngine(model, page_size=16, num_blocks=16) as engine:
            answers.append((await engine.generate(ids, max_new_tokens=5, temperature=0)).token_ids)
        assert state() == before
        answers.append(generate())
    assert len(set(answers)) == 1


@aio
async def test_a_closed_engine_keeps_nothing_of_its_model(tmp_path: Path) -> None:
    """Whoever keeps the engine to ask how it went."""
    tiny("llama").save_pretrained(tmp_path)
    engine = AsyncEngine(tmp_path, num_blocks=16, page_size=16)
    async with engine:
        await engine.generate(prompt(5), max_new_tokens=2)
        assert engine._source.loaded is not None
        runner = weakref.ref(engine._source.loaded.runner)
    gc.collect()
    assert runner() is None and engine.stats().requests_finished == 1
    with pytest.raises(EngineStoppedError):
        engine.stream(prompt(5))
