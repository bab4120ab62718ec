"""An exception in a step, in the tokenizer, or in a consumer: the documented party fails, and nobody else."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from cbengine import FinishReason, RequestFailedError, RequestStatus
from cbengine.execution.inputs import StepInputs
from cbengine.execution.sampler import sample
from cbengine.execution.worker import Worker
from cbengine.testing import FakeModel, FakeTokenizer
from tests.api.fakes import Gate, prompt, read, read_some, running
from tests.support.loops import aio, eventually

PROMPTS = [prompt(3 + 7 * n, n) for n in range(6)]
NEW = 8


class Planted(Exception):
    """What the tests plant."""


class FailsAt:
    """A fault, or a sampler, that raises in its k-th step, and in this one only."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.calls = 0
        self.raised = False

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == self.k + 1:
            self.raised = True
            raise Planted(f"step {self.k}")
        return None if isinstance(arguments[0], StepInputs) else sample(*arguments)


@aio("asyncio", "trio")
@pytest.mark.parametrize("where", ["forward", "sampler"])
@pytest.mark.parametrize("asynchronous", [True, False], ids=["two slots", "one slot"])
async def test_a_step_that_raises_fails_its_requests_and_no_others(
    where: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [tuple(FakeModel().reference(p, NEW, ignore_eos=True)) for p in PROMPTS]
    failures = 0
    k = 0
    while True:
        fails = FailsAt(k)
        model = FakeModel(fault=fails if where == "forward" else None)
        if where == "sampler":
            monkeypatch.setattr("cbengine.engine.Worker", functools.partial(Worker, sampler=fails))
        settings = {"max_requests_per_batch": 2, "max_batch_tokens": 16, "use_async_batching": asynchronous}
        async with running(model, **settings) as engine:
            streams = [engine.stream(p, max_new_tokens=NEW, ignore_eos=True) for p in PROMPTS]
            failed = 0
            for stream, tokens in zip(streams, expected, strict=True):
                await eventually(lambda stream=stream: stream.status.ended)
                if stream.status is RequestStatus.FINISHED:
                    assert (await stream.result()).token_ids == tokens
                    continue
                failed += 1
                with pytest.raises(RequestFailedError, match=f"Planted: step {k}") as caught:
                    await stream.result()
                assert isinstance(caught.value.__cause__, Planted)
                assert caught.value.request_id == stream.request_id
                assert stream.finish_reason is FinishReason.ERROR and stream.status is RequestStatus.FAILED
                assert stream.token_ids == tokens[: len(stream.token_ids)]  # what it had said stays
            # Afterwards the engine is as good as new.
            raised, fails.k = fails.raised, -1
            assert engine.health()
            again = await engine.generate(PROMPTS[3], max_new_tokens=NEW, ignore_eos=True)
            assert again.token_ids == expected[3]
        if not raised:
            assert failed == 0
            break
        # Two run at a time. A step may also hold nobody but those whose end was found after its launch.
        assert failed <= 2
        failures += failed
        k += 3
    assert failures >= 8


@aio(trio=True)
async def test_a_stream_that_fails_raises_once_after_its_tokens() -> None:
    gate = Gate()
    model = FakeModel(fault=gate)
    async with running(model) as engine:
        stream = engine.stream(PROMPTS[0], max_new_tokens=50, ignore_eos=True)
        gate.open()
        first = [token.id for token in await read_some(stream, 3)]

        def fault(inputs: StepInputs) -> None:
            raise Planted

        model.fault = fault
        rest: list[int] = []
        with pytest.raises(RequestFailedError):
            async for token in stream:
                rest.append(token.id)
        assert first + rest == list(stream.token_ids) == model.reference(PROMPTS[0], len(stream.token_ids))
        assert await read_some(stream, 1) == []  # once
        for _ in range(2):
            with pytest.raises(RequestFailedError):  # result() as often as it is asked
                await stream.result()
        model.fault = None


@aio(trio=True)
async def test_a_model_that_always_raises_fails_everybody_and_lives_on() -> None:
    def fault(inputs: StepInputs) -> None:
        raise Planted

    model = FakeModel(fault=fault)
    async with running(model, max_requests_per_batch=3) as engine:
        answers = await engine.generate_batch(PROMPTS * 4, max_new_tokens=NEW, return_exceptions=True)
        assert [type(a) for a in answers] == [RequestFailedError] * 24
        assert len({id(a) for a in answers}) == 24  # each has an error of its own
        model.fault = None
        completion = await engine.generate(PROMPTS[1], max_new_tokens=NEW, ignore_eos=True)
        assert completion.token_ids == tuple(model.reference(PROMPTS[1], NEW, ignore_eos=True))
        stats = engine.stats()
        assert (stats.requests_failed, stats.requests_finished) == (24, 1)


class BadTokenizer(FakeTokenizer):
    """Breaks on texts and answers with a mark in them."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark
        self.broken_detokenizers = 0
        self.fails_in = ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self.mark in text:
            raise Planted("encode")
        return super().encode(text)

    def detokenizer(self, *arguments: Any, **options: Any) -> Any:
        if self.broken_detokenizers:
            self.broken_detokenizers -= 1
            return self._broken()
        return super().detokenizer(*arguments, **options)

    def _broken(self) -> Any:
        if self.fails_in == "make":
            raise Planted("make")
        whole, fails_in = super().detokenizer(), self.fails_in

        class Broken:
            pushed = 0

            def push(self, token_id: int) -> str:
                self.pushed += 1
                if fails_in == "push" and self.pushed == 4:
                    raise Planted("push")
                return whole.push(token_id)

            def flush(self) -> str:
                if fails_in == "flush":
                    raise Planted("flush")
                return whole.flush()

        return Broken()


@aio(trio=True)
@pytest.mark.parametrize("fails_in", ["make", "push", "flush"])
async def test_a_detokenizer_that_raises_fails_the_request_it_was_made_for(fails_in: str) -> None:
    model = FakeModel()
    tokenizer = BadTokenizer("~")
    async with running(model, tokenizer=tokenizer) as engine:
        tokenizer.fails_in = fails_in
        async with engine.paused():
            healthy = engine.stream(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True)
        await healthy.__anext__()  # it has its detokenizer
        tokenizer.broken_detokenizers = 1
        bad = engine.stream(PROMPTS[1], max_new_tokens=NEW, ignore_eos=True)
        with pytest.raises(RequestFailedError, match=f"Planted: {fails_in}") as caught:
            await bad.result()
        assert isinstance(caught.value.__cause__, Planted)
        good = {"make": 0, "push": 3, "flush": NEW - 1}[fails_in]
        assert bad.token_ids == tuple(model.reference(PROMPTS[1], NEW, ignore_eos=True)[:good])
        assert (await healthy.result()).token_ids == tuple(model.reference(PROMPTS[0], NEW, ignore_eos=True))
        assert (await engine.generate(PROMPTS[1], max_new_tokens=2, ignore_eos=True)).usage.completion_tokens == 2


@aio(trio=True)
async def test_a_tokenizer_that_raises_fails_the_call_or_the_stream_of_a_long_text() -> None:
    model = FakeModel(max_model_len=8192)
    async with running(model, tokenizer=BadTokenizer("~"), num_blocks=2000) as engine:
        healthy = engine.stream("hello", max_new_tokens=NEW, ignore_eos=True)
        with pytest.raises(RequestFailedError, match=r"'mine' failed: .* Planted: encode") as caught:
            engine.stream("bad ~", request_id="mine")
        assert isinstance(caught.value.__cause__, Planted) and caught.value.request_id == "mine"
        long = engine.stream("bad ~" * 1000, request_id="mine")
        with pytest.raises(RequestFailedError, match="Planted: encode"):
            await read(long)
        assert long.finish_reason is FinishReason.ERROR
        expected = tuple(model.reference(model.tokenizer.encode("hello"), NEW, ignore_eos=True))
        assert (await healthy.result()).token_ids == expected


class Panic(BaseException):
    """As a panic in a library in Rust arrives in Python: it is no Exception."""


class PanickingTokenizer(FakeTokenizer):
    """Fails for texts with "~", in its second detokenizer at the fourth token, and when it is asked for a third one."""

    detokenizers = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if "~" in text:
            raise Panic("encode")
        return super().encode(text)

    def detokenizer(self, keep: frozenset[int] = frozenset()) -> Any:
        self.detokenizers += 1
        if self.detokenizers == 3:
            raise Panic("detokenizer")
        whole = super().detokenizer()
        if self.detokenizers != 2:
            return whole
        pushes = itertools.count()

        class Broken:
            flush = whole.flush

            def push(self, token_id: int) -> str:
                if next(pushes) == 3:
                    raise Panic("push")
                return whole.push(token_id)

        return Broken()


@aio
async def test_a_panic_of_a_tokenizer_fails_its_request_and_no_other() -> None:
    model = FakeModel(max_model_len=8192)
    async with running(model, tokenizer=PanickingTokenizer(), num_blocks=2000) as engine:
        healthy = engine.stream("hello", max_new_tokens=NEW, ignore_eos=True)
        bad = engine.stream(PROMPTS[1], max_new_tokens=NEW, ignore_eos=True)
        with pytest.raises(RequestFailedError, match="Panic: push"):
            await bad.result()
        assert len(bad.token_ids) == 3
        with pytest.raises(RequestFailedError, match="Panic: detokenizer"):
            await engine.stream(PROMPTS[1]).result()
        with pytest.raises(RequestFailedError, match="Panic: encode"):
            engine.stream("bad ~")
        with pytest.raises(RequestFailedError, match="Panic: encode"):
            await engine.stream("bad ~" * 1000).result()  # on a thread of its own
        expected = tuple(model.reference(model.tokenizer.encode("hello"), NEW, ignore_eos=True))
        assert (await healthy.result()).token_ids == expected


@aio(trio=True)
@pytest.mark.parametrize("ids", [[5, -1], [5, 97], [], "text", None, [[1, 2]]], ids=repr)
async def test_a_tokenizer_that_answers_nonsense_is_refused_like_bad_ids(ids: Any) -> None:
    class Nonsense(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
            return ids

    async with running(FakeModel(), tokenizer=Nonsense()) as engine:
        with pytest.raises(ValueError):
            engine.stream("hello")
        assert engine.stats().labels == 0


@aio(trio=True)
async def test_a_consumer_that_raises_takes_nobody_with_it() -> None:
    model = FakeModel(delay=0.001)
    errors: list[BaseException] = []
    answers: dict[int, Sequence[int]] = {}

    async with running(model) as engine:

        async def good(number: int) -> None:
            answers[number] = [token.id async for token in engine.stream(prompt(5, number), max_new_tokens=NEW)]

        async def bad(number: int) -> None:
            try:
                async for token in engine.stream(prompt(5, number), max_new_tokens=500, ignore_eos=True):
                    if token.index == number % 5:
                        raise Planted(number)
            except Planted as error:
                errors.append(error)

        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(bad if number % 2 else good, number)
        assert len(errors) == 8
        errors.clear()  # and with them the frames that hold the streams
    assert answers == {n: model.reference(prompt(5, n), NEW) for n in range(0, 16, 2)}
