"""The values that an answer consists of."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from cbengine import Completion, FinishReason, RequestMetrics, RequestStatus, Token, Usage
from cbengine.testing import FakeModel
from tests.api.fakes import Gate, prompt, read, read_some, running
from tests.support.loops import aio, eventually


def test_a_token_is_its_text_and_does_not_change() -> None:
    token = Token("hi", 7, 3)
    assert str(token) == f"{token}" == "hi"
    assert (token.id, token.index, token.logprob, token.top_logprobs, token.finish_reason) == (7, 3, None, None, None)
    assert token == Token("hi", 7, 3) and hash(token) == hash(Token("hi", 7, 3))
    for name in ("text", "id", "logprob"):
        with pytest.raises(FrozenInstanceError):
            setattr(token, name, "x")


def test_reasons_and_states_are_plain_strings() -> None:
    assert FinishReason.CANCELLED == "cancelled" and f"{FinishReason.LENGTH}" == str(FinishReason.LENGTH) == "length"
    assert {reason.value for reason in FinishReason} == {"stop", "length", "cancelled", "timeout", "error"}
    assert [status.value for status in RequestStatus if status.ended] == ["finished", "cancelled", "failed"]
    assert str(RequestStatus.DECODING) == "decoding"


def test_usage_adds_up() -> None:
    usage = Usage(prompt_tokens=5, completion_tokens=3)
    assert (usage.total_tokens, usage.cached_tokens) == (8, 0)


def test_metrics_of_an_answer_that_has_not_begun() -> None:
    metrics = RequestMetrics(arrival_time=10.0)
    assert (metrics.queue_time, metrics.ttft, metrics.mean_itl) == (None, None, None)


def test_metrics_are_differences_of_times() -> None:
    metrics = RequestMetrics(
        arrival_time=10.0,
        first_scheduled_time=10.5,
        first_token_time=11.0,
        last_token_time=13.0,
        token_times=(11.0, 12.5, 13.0),
    )
    assert (metrics.queue_time, metrics.ttft, metrics.mean_itl) == (0.5, 1.0, 1.0)


@aio(trio=True)
async def test_a_completion_holds_the_whole_answer() -> None:
    model = FakeModel()
    async with running(model) as engine:
        completion = await engine.generate("hello", max_new_tokens=7, ignore_eos=True, request_id="mine")
    expected = model.reference(model.tokenizer.encode("hello"), 7, ignore_eos=True)
    assert completion == Completion(
        request_id="mine",
        text=model.tokenizer.decode(expected),
        token_ids=tuple(expected),
        finish_reason=FinishReason.LENGTH,
        usage=Usage(prompt_tokens=5, completion_tokens=7),
        metrics=completion.metrics,
    )
    assert str(completion) == completion.text
    with pytest.raises(FrozenInstanceError):
        setattr(completion, "text", "x")  # noqa: B010 - a plain assignment is an error to the type checker too


@aio(trio=True)
async def test_times_are_in_order_and_one_for_each_token() -> None:
    model = FakeModel(delay=0.002)
    async with running(model) as engine:
        completion = await engine.generate(prompt(70), max_new_tokens=9, ignore_eos=True)
    metrics = completion.metrics
    assert len(metrics.token_times) == 9
    assert list(metrics.token_times) == sorted(metrics.token_times)
    assert metrics.first_scheduled_time is not None and metrics.queue_time is not None and metrics.ttft is not None
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.token_times[0]
    assert (metrics.first_token_time, metrics.last_token_time) == (metrics.token_times[0], metrics.token_times[-1])
    # 70 tokens in steps of 32 are three steps, and no step takes less than the delay.
    assert 0 <= metrics.queue_time <= metrics.ttft and metrics.ttft >= 3 * 0.002
    assert metrics.mean_itl is not None and metrics.mean_itl > 0
    assert (metrics.cached_tokens, metrics.preemptions) == (0, 0)


@aio(trio=True)
async def test_usage_status_and_metrics_grow_with_the_answer() -> None:
    gate = Gate()
    async with running(FakeModel(fault=gate), max_requests_per_batch=1) as engine:
        first = engine.stream(prompt(40), max_new_tokens=4, ignore_eos=True)
        second = engine.stream(prompt(3), max_new_tokens=2, ignore_eos=True)
        assert (first.status, first.finish_reason) == (RequestStatus.PENDING, None)
        assert first.usage == Usage(prompt_tokens=40)
        assert first.metrics.queue_time is None and first.metrics.ttft is None
        await eventually(lambda: first.status is RequestStatus.PREFILLING)
        assert first.metrics.queue_time is not None and first.metrics.ttft is None
        await gate.steps(2)  # 40 tokens are two chunks
        await read_some(first, 1)
        assert first.status is RequestStatus.DECODING
        assert first.usage == Usage(40, 1) and first.metrics.ttft is not None
        assert second.status is RequestStatus.PENDING  # one at a time
        gate.open()
        await read(first)
        await read(second)
        assert first.status is second.status is RequestStatus.FINISHED
        assert first.usage.total_tokens == 44
        assert second.metrics.queue_time is not None and first.metrics.queue_time is not None
        assert second.metrics.queue_time > first.metrics.queue_time
        assert first.metrics == (await first.result()).metrics


@aio(trio=True)
async def test_preemptions_are_counted_and_change_nothing() -> None:
    model = FakeModel()
    prompts = [prompt(8, seed) for seed in range(6)]
    async with running(model, num_blocks=10) as engine:
        completions = await engine.generate_batch(prompts, max_new_tokens=20, ignore_eos=True)
        assert engine.stats().preemptions == sum(c.metrics.preemptions for c in completions) > 0
    for ids, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == tuple(model.reference(ids, 20, ignore_eos=True))
        assert len(completion.metrics.token_times) == 20
        assert completion.usage == Usage(8, 20)


@aio(trio=True)
async def test_the_length_of_a_long_text_is_known_once_it_is_tokenized() -> None:
    model = FakeModel(max_model_len=8192)
    text = "z" * 5000
    async with running(model, num_blocks=2000, max_batch_tokens=2048) as engine:
        stream = engine.stream(text, max_new_tokens=2, ignore_eos=True)
        completion = await stream.result()
        assert completion.usage == Usage(5000, 2)
        assert completion.token_ids == tuple(model.reference(model.tokenizer.encode(text), 2, ignore_eos=True))
        short = engine.stream("z" * 100, max_new_tokens=1)
        assert short.usage.prompt_tokens == 100  # tokenized at the call
        await short.result()
