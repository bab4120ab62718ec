"""What an engine says about itself: `stats`, `health`, `config`, `memory_plan`, `tokenizer`."""

from __future__ import annotations

import threading
from dataclasses import FrozenInstanceError
from typing import Any

import anyio
import pytest

from cbengine import AsyncEngine, EngineNotStartedError, EngineStats, RequestFailedError, UnsupportedFeatureError
from cbengine.testing import FakeModel
from tests.api.fakes import Gate, fake_engine, prompt, running
from tests.support.leaks import idle
from tests.support.loops import aio, eventually


@aio(trio=True)
async def test_counts_while_running() -> None:
    gate = Gate()
    async with running(FakeModel(fault=gate), max_requests_per_batch=2, num_blocks=20) as engine:
        stats = engine.stats()
        assert (stats.pages_total, stats.pages_used, stats.pages_free, stats.pages_reserved) == (22, 0, 20, 2)
        assert (stats.running, stats.waiting, stats.steps, stats.labels) == (0, 0, 0, 0)
        async with engine.paused():
            streams = [engine.stream(prompt(9, s), max_new_tokens=6, ignore_eos=True) for s in range(4)]
        await eventually(lambda: engine.stats().steps == 2)
        stats = engine.stats()
        assert stats.labels == 4
        assert stats.running == stats.rows_used == 2 and stats.waiting == 2
        assert stats.pages_used == 6  # two prompts of nine tokens and the next one: three pages each
        assert stats.pages_used + stats.pages_free + stats.pages_cached + stats.pages_reserved == stats.pages_total
        assert stats.steps_in_flight == 2
        gate.open()
        for stream in streams:
            await stream.result()
        await idle(engine)
        stats = engine.stats()
        assert (stats.generated_tokens, stats.prompt_tokens, stats.requests_finished) == (24, 36, 4)
        assert (stats.requests_cancelled, stats.requests_failed, stats.preemptions) == (0, 0, 0)
        assert stats.tokens_per_second > 0 and stats.host_seconds > 0 and stats.uptime > stats.host_seconds
        assert stats.pages_free + stats.pages_cached == 20 and stats.steps_in_flight == 0
        with pytest.raises(FrozenInstanceError):
            setattr(stats, "steps", 0)  # noqa: B010 - a plain assignment is an error to the type checker too


@aio(trio=True)
async def test_every_request_is_counted_once_however_it_ends() -> None:
    gate = Gate()
    model = FakeModel(fault=gate)
    async with running(model) as engine:
        gate.open()
        await engine.generate(prompt(4), max_new_tokens=2, ignore_eos=True)
        gate.close()
        cancelled = engine.stream(prompt(5), max_new_tokens=100, ignore_eos=True)
        cancelled.cancel()
        gate.open()
        await cancelled.aclose()

        def fault(inputs: Any) -> None:
            raise ValueError("planted")

        model.fault = fault
        with pytest.raises(RequestFailedError):
            await engine.generate(prompt(6), max_new_tokens=2)
        stats = engine.stats()
        assert (stats.requests_finished, stats.requests_cancelled, stats.requests_failed) == (1, 1, 1)


def test_an_engine_that_was_never_started() -> None:
    engine = fake_engine()
    assert engine.stats() == EngineStats()
    assert engine.health().status == "new" and not engine.health() and engine.health().error is None
    assert engine.config.page_size == 4 and engine.config.max_model_len is None
    for use in (lambda: engine.memory_plan, lambda: engine.tokenizer):
        with pytest.raises(EngineNotStartedError, match="start"):
            use()


@aio(trio=True)
async def test_health_in_every_state() -> None:
    gate = Gate()
    loading = threading.Event()

    class SlowToLoad(FakeModel):
        def bind(self, kv: Any, page_size: int) -> None:
            loading.wait(10)
            super().bind(kv, page_size)

    engine = fake_engine(SlowToLoad(fault=gate))
    assert (engine.health().status, bool(engine.health())) == ("new", False)
    seen: list[str] = []

    async def start() -> None:
        await engine.start()
        seen.append(engine.health().status)

    async with anyio.create_task_group() as group:
        group.start_soon(start)
        await eventually(lambda: engine.health().status != "new")
        seen.append(engine.health().status)
        loading.set()
    assert seen == ["starting", "running"]
    assert engine.health() and engine.health().error is None

    stream = engine.stream(prompt(4), max_new_tokens=3, ignore_eos=True)
    await gate.someone_waits()
    async with anyio.create_task_group() as group:
        group.start_soon(engine.stop)
        await eventually(lambda: engine.health().status == "stopping")
        assert not engine.health()  # it takes no requests any more
        gate.open()
    assert len((await stream.result()).token_ids) == 3
    assert (engine.health().status, bool(engine.health())) == ("stopped", False)
    await engine.start()
    assert engine.health().status == "running"
    await engine.aclose()
    assert (engine.health().status, bool(engine.health())) == ("closed", False)


@aio(trio=True)
async def test_closing_an_engine_that_never_started() -> None:
    engine = fake_engine()
    await engine.stop()
    assert engine.health().status == "new"
    await engine.aclose()
    await engine.aclose()
    assert engine.health().status == "closed"


@aio(trio=True)
async def test_the_config_is_filled_in_at_start() -> None:
    engine = AsyncEngine(FakeModel(max_model_len=500), page_size=8)
    assert engine.config.num_blocks is engine.config.max_model_len is engine.config.use_async_batching is None
    async with engine:
        config = engine.config
        assert config.max_model_len == 500
        assert config.num_blocks is not None and config.num_blocks > 0
        assert config.max_batch_tokens == 512 and config.max_requests_per_batch == 256
        assert config.use_async_batching is True and config.device == "cpu" and config.safety_margin == 0.15
        assert config.page_size == 8


@aio(trio=True)
async def test_the_memory_plan_says_what_was_allocated() -> None:
    async with running(num_blocks=20, max_batch_tokens=64) as engine:
        plan = engine.memory_plan
        assert (plan.num_blocks, plan.page_size, plan.capacity_tokens) == (20, 4, 80)
        assert (plan.max_batch_tokens, plan.max_requests, plan.max_model_len) == (64, 16, 4096)
        # Two layers, one head of two float32 for K and as much for V, and two reserved blocks.
        assert plan.kv_bytes == 22 * 4 * 2 * 2 * 2 * 4
        beside = ("weights", "CPU pool")
        assert plan.total_bytes == sum(size for name, size in plan.parts().items() if name not in beside)
        assert min(plan.kv_bytes, plan.activation_bytes, plan.logits_bytes, plan.slot_bytes) > 0
        assert "20 blocks" in str(plan) and "80 tokens" in str(plan)
    assert engine.memory_plan is plan  # readable after the end


@aio(trio=True)
async def test_an_engine_without_a_tokenizer_serves_ids() -> None:
    model = FakeModel()
    expected = model.reference(prompt(4), 3, ignore_eos=True)
    model.tokenizer = None  # type: ignore[assignment]
    async with running(model) as engine:
        completion = await engine.generate(prompt(4), max_new_tokens=3, ignore_eos=True)
        assert completion.token_ids == tuple(expected) and completion.text == ""
        for use in (
            lambda: engine.tokenizer,
            lambda: engine.stream("text"),
            lambda: engine.chat([{"role": "user", "content": "Hi"}]),
        ):
            with pytest.raises(UnsupportedFeatureError, match="no tokenizer"):
                use()


@aio(trio=True)
async def test_a_tokenizer_of_ones_own() -> None:
    model = FakeModel()

    class Shouting:
        vocab_size = 97

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return model.tokenizer.encode(text.upper())

        def decode(self, ids: Any) -> str:
            return model.tokenizer.decode(ids)

        def detokenizer(self) -> Any:
            return model.tokenizer.detokenizer()

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return "chat"

    own = Shouting()
    async with running(model, tokenizer=own) as engine:
        assert engine.tokenizer is own
        completion = await engine.generate("abc", max_new_tokens=4, ignore_eos=True)
        assert completion.token_ids == tuple(model.reference(model.tokenizer.encode("ABC"), 4, ignore_eos=True))
