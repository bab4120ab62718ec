"""Several answers to one prompt."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest

from cbengine import (
    AsyncEngine,
    DuplicateRequestError,
    FinishReason,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    SamplingParams,
    StreamClosedError,
    StreamError,
)
from cbengine.execution.noise import derive_seed
from cbengine.testing import FakeModel
from tests.support.leaks import idle
from tests.support.loops import aio

PROMPT = list(range(1, 20))
SETTINGS: dict[str, Any] = {"page_size": 4, "num_blocks": 256, "max_batch_tokens": 64, "max_requests_per_batch": 16}
RANDOM: Any = {"temperature": 1.0, "seed": 11, "max_new_tokens": 12}


def make(**settings: Any) -> AsyncEngine:
    return AsyncEngine(FakeModel(eos_token_ids=()), **{**SETTINGS, **settings})


@aio(trio=True)
async def test_streamed_with_their_number() -> None:
    async with make() as engine:
        alone = [(await engine.generate(PROMPT, **{**RANDOM, "seed": derive_seed(11, i)})).token_ids for i in range(4)]
        assert len(set(alone)) == 4
        before = engine.stats().prompt_tokens
        got: dict[int, list[int]] = {}
        last: dict[int, Any] = {}
        stream = engine.stream(PROMPT, n=4, **RANDOM)
        async for token in stream:
            assert token.index == len(got.setdefault(token.choice, []))
            got[token.choice].append(token.id)
            last[token.choice] = token.finish_reason
        assert [tuple(got[i]) for i in range(4)] == alone
        assert set(last.values()) == {FinishReason.LENGTH}
        assert stream.usage.prompt_tokens == len(PROMPT) and stream.usage.completion_tokens == 48
        # The prompt is computed once: the siblings share its pages.
        assert engine.stats().prompt_tokens - before < 2 * len(PROMPT)
        await idle(engine)


@aio
async def test_as_completions() -> None:
    async with make() as engine:
        alone = await engine.generate(PROMPT, **RANDOM)
        answer = await engine.generate(PROMPT, n=3, **RANDOM)
        assert answer.token_ids == alone.token_ids
        assert [choice.choice for choice in answer.choices] == [0, 1, 2]
        assert len({choice.text for choice in answer.choices}) == 3
        batch = await engine.generate_batch([PROMPT, PROMPT[:5]], n=2, **RANDOM)
        assert [len(item.choices) for item in batch] == [2, 2] and [item.index for item in batch] == [0, 1]
        assert alone.choices == ()


@aio
async def test_one_by_one() -> None:
    async with make() as engine:
        stream = engine.stream(PROMPT, n=3, **RANDOM)
        with pytest.raises(StreamError, match="mixed"):
            stream.text()
        texts = ["".join([piece async for piece in choice.text()]) for choice in stream.choices]
        assert texts == [choice.text for choice in (await stream.result()).choices]
        assert [token async for token in stream] == []


@aio(trio=True)
async def test_leaving_ends_all() -> None:
    async with AsyncEngine(FakeModel(eos_token_ids=(), delay=0.005), **SETTINGS) as engine:
        async with engine.stream(PROMPT, n=4, max_new_tokens=500) as stream:
            async for _ in stream:
                break
        await idle(engine)
        dropped = engine.stream(PROMPT, n=4, max_new_tokens=500)
        del dropped
        await idle(engine)
        cancelled = engine.stream(PROMPT, n=4, max_new_tokens=500)
        cancelled.cancel()
        assert [token async for token in cancelled] == []
        assert cancelled.finish_reason == FinishReason.CANCELLED
        await idle(engine)


@aio
async def test_all_or_none_are_let_in() -> None:
    async with make(max_queue_size=3) as engine:
        async with engine.paused():
            waiting = engine.stream(PROMPT, n=1, **RANDOM)
            with pytest.raises(QueueFullError, match="1 requests are waiting, this call adds 3"):
                engine.stream(PROMPT, n=3)
            assert engine.stats().labels == 1
            waiting.cancel()
        await idle(engine)
        # What could never get in otherwise gets in when nobody else waits.
        batch = await engine.generate_batch([PROMPT, PROMPT[:5]], n=5, **RANDOM)
        assert [len(answer.choices) for answer in batch] == [5, 5]
        with pytest.raises(InvalidRequestError, match="from 1 to 128"):
            engine.stream(PROMPT, n=0)


@aio(trio=True)
async def test_cancelling_a_result_cancels_all() -> None:
    async with AsyncEngine(FakeModel(eos_token_ids=(), delay=0.005), **SETTINGS) as engine:
        stream = engine.stream(PROMPT, n=4, max_new_tokens=500)
        with anyio.move_on_after(0.03) as scope:
            await stream.result()
        assert scope.cancelled_caught
        assert [choice.finish_reason for choice in stream.choices] == [FinishReason.CANCELLED] * 4
        await idle(engine)


@aio
async def test_an_answer_that_failed_leaves_the_others_readable() -> None:
    async with AsyncEngine(FakeModel(eos_token_ids=(), delay=0.002), **SETTINGS) as engine:
        stream = engine.stream(PROMPT, n=2, max_new_tokens=20)
        await stream.choices[0].aclose()
        with pytest.raises(StreamClosedError):
            await stream.result()
        assert len((await stream.choices[1].result()).token_ids) == 20


@aio
async def test_one_label_for_all() -> None:
    async with AsyncEngine(FakeModel(eos_token_ids=(), delay=0.002), **SETTINGS) as engine:
        stream = engine.stream(PROMPT, n=3, max_new_tokens=30, request_id="a")
        assert stream.request_id == "a" and "'a'" in repr(stream)
        assert [choice.request_id for choice in stream.choices] == ["a[0]", "a[1]", "a[2]"]
        assert engine.stats().labels == 1
        for cancelled in stream.choices[:2]:
            with pytest.raises(DuplicateRequestError, match="'a' belongs to") as caught:
                engine.stream(PROMPT, request_id="a")
            assert caught.value.request_id == "a"
            await cancelled.aclose()
        with pytest.raises(DuplicateRequestError):
            engine.stream(PROMPT, n=2, request_id="a")
        await stream.choices[2].result()
        whole = await engine.generate(PROMPT, n=2, request_id="a", **RANDOM)
        assert whole.request_id == "a" and [c.request_id for c in whole.choices] == ["a[0]", "a[1]"]


@aio
async def test_what_is_wrong_with_a_long_text_names_the_request() -> None:
    async with make() as engine:
        stream = engine.stream("x" * 50_000, n=2, request_id="long")
        for choice in stream.choices:
            with pytest.raises(PromptTooLongError) as caught:
                await choice.result()
            assert caught.value.request_id == "long"


@aio
async def test_long_text() -> None:
    model = FakeModel(eos_token_ids=(), max_model_len=8192)
    async with AsyncEngine(model, page_size=16, num_blocks=512, max_batch_tokens=2048) as engine:
        text = model.tokenizer.decode([5, 6, 7, 8] * 1100)  # tokenized elsewhere, for both at once
        answer = await engine.generate(text, n=2, max_new_tokens=3)
        assert len(answer.choices) == 2 and answer.usage.prompt_tokens == 4400
        assert answer.choices[0].token_ids == answer.choices[1].token_ids  # greedy


@pytest.mark.timeout(200)
def test_smollm2(smollm2: Path) -> None:
    async def main() -> None:
        async with AsyncEngine(str(smollm2), page_size=16, num_blocks=64) as engine:
            params = SamplingParams(temperature=0.9, max_new_tokens=8)
            prompt = "The best thing about the sea is"
            answer = await engine.generate(prompt, params, n=3, seed=5)
            for i, choice in enumerate(answer.choices):
                alone = await engine.generate(prompt, params, seed=derive_seed(5, i))
                assert alone.token_ids == choice.token_ids

    asyncio.run(main())
