"""Starting and stopping again and again: threads, memory and objects come back to what they were."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbengine import AsyncEngine, EngineDeadError
from cbengine.devices.base import DeviceLostError
from cbengine.execution.inputs import StepInputs
from cbengine.testing import FakeModel
from tests.adversity.census import PER_REQUEST, PER_RUN, living, resident, threads
from tests.api.fakes import fake_engine, prompt
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
        async with fake_engine(model, page_size=4 + n) as engine:
            answer = await engine.generate(prompt(9), max_new_tokens=6, ignore_eos=True)
            assert answer.token_ids == tuple(model.reference(prompt(9), 6, ignore_eos=True))
    del engine
    await eventually(lambda: threads() == before)
    assert living(*PER_REQUEST, *PER_RUN) == {}


def _large() -> AsyncEngine:
    return fake_engine(FakeModel(max_model_len=2**20), page_size=256, num_blocks=6000)


def _fill_pool(engine: AsyncEngine) -> weakref.ref[Any]:
    """Make the cache resident; returns a weak reference to it."""
    assert engine._worker is not None and engine._worker.built is not None
    pool = engine._worker.built.pool
    pool.fill_(1)
    assert pool.nbytes > 40 * MIB
    return weakref.ref(pool)


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Inside, memory goes with the last reference or not at all."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@aio("asyncio")
async def test_the_cache_is_given_back_by_every_stop(record_property: pytest.RecordProperty) -> None:
    engine = _large()
    sizes: list[int] = []
    for _ in range(5):
        await engine.start()
        pool = _fill_pool(engine)
        await engine.generate(prompt(9), max_new_tokens=6)
        sizes.append(resident())
        with _no_collector():
            await engine.stop()
            await eventually(lambda pool=pool: pool() is None)
    await engine.aclose()
    record_property("resident_mib", [size // MIB for size in sizes])
    print([size // MIB for size in sizes])
    assert sizes[-1] - sizes[0] < 4 * 40 * MIB  # as it would be if they were kept


@aio("asyncio")
async def test_the_cache_is_given_back_by_an_engine_that_died_whoever_keeps_its_error() -> None:
    engine = _large()

    def fault(inputs: StepInputs) -> None:
        raise DeviceLostError("planted")

    await engine.start()
    pool = _fill_pool(engine)
    engine._model.fault = fault
    with _no_collector():
        with pytest.raises(EngineDeadError) as caught:
            await engine.generate(prompt(9), max_new_tokens=6)
        await eventually(lambda: engine.health().status == "dead")
        await eventually(lambda: pool() is None)
    assert caught.value.__cause__ is engine.health().error
    assert caught.value.__cause__.__traceback__ is not None
    await engine.aclose()


@aio("asyncio")
async def test_a_callers_own_model_is_given_back_as_it_was(smollm2: Path, encode: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    ids = encode("The capital of France is")
    attention = model.config._attn_implementation
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    answers: list[tuple[int, ...]] = []
    for _ in range(2):
        async with AsyncEngine(model, page_size=16, num_blocks=16) as engine:
            answers.append((await engine.generate(ids, max_new_tokens=3, temperature=0)).token_ids)
        assert model.config._attn_implementation == attention
        assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
        with torch.inference_mode():
            out = model.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False, pad_token_id=0)
        answers.append(tuple(out[0, len(ids) :].tolist()))
    assert len(set(answers)) == 1
