"""What is refused, and how: a typed error at the call, and the stream beside it never notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from cbengine import (
    AsyncEngine,
    CBEngineError,
    DuplicateRequestError,
    EmptyPromptError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    SamplingParams,
    UnsupportedFeatureError,
)
from cbengine.options import RequestOptions
from cbengine.testing import FakeModel
from tests.api.fakes import Gate, prompt, running
from tests.support.leaks import idle
from tests.support.loops import aio

IDS = prompt(4)


@dataclass
class Bad:
    """A request that has to be refused with this error and these words."""

    name: str
    error: type[CBEngineError]
    words: str
    prompt: Any = None
    params: Any = None
    overrides: dict[str, Any] | None = None

    def ask(self, engine: AsyncEngine, **more: Any) -> object:
        prompt = IDS if self.prompt is None else self.prompt
        arguments: Any = {**(self.overrides or {}), **more}
        return engine.stream(prompt, self.params, **arguments)


def _param(error_words: str, **overrides: Any) -> Bad:
    name = ",".join(f"{key}={value!r}" for key, value in overrides.items())
    return Bad(name, InvalidRequestError, error_words, overrides=overrides)


class _BrokenArray:
    def __array__(self, *args: object, **kwargs: object) -> object:
        raise KeyError("broken")


PROMPTS = [
    Bad("no text", EmptyPromptError, "prompt is empty; it needs at least one character", ""),
    Bad("no ids", EmptyPromptError, "no tokens; it needs at least one", []),
    Bad("no ids in a tuple", EmptyPromptError, "no tokens", ()),
    Bad("no ids in an array", EmptyPromptError, "no tokens", np.zeros(0, np.int64)),
    Bad("id too large", InvalidRequestError, r"token id 97 is not in the vocabulary, which is 0 to 96", [5, 97]),
    Bad("id far too large", InvalidRequestError, "flat sequence of integer token ids", [5, 2**70]),
    Bad("id above int64", InvalidRequestError, "is not in the vocabulary", [2**63]),
    Bad("negative id", InvalidRequestError, r"token id -1 is not in the vocabulary", [5, -1]),
    Bad("float ids", InvalidRequestError, "integer token ids, got list .*float64", [5.0]),
    Bad("bool ids", InvalidRequestError, "integer token ids", [True, False]),
    Bad("a bool among ids", InvalidRequestError, "integer token ids, and this one has a bool", [True, 5]),
    Bad("a numpy bool among ids", InvalidRequestError, "and this one has a bool", (5, np.True_)),
    Bad("texts", InvalidRequestError, "integer token ids", ["a", "b"]),
    Bad("nested ids", InvalidRequestError, "flat sequence", [[1, 2], [3, 4]]),
    Bad("ragged ids", InvalidRequestError, "text or token ids", [[1, 2], [3]]),
    Bad("bytes", InvalidRequestError, "text or a flat sequence", b"hello"),
    Bad("a number", InvalidRequestError, "got int", 5),
    Bad("a mapping", InvalidRequestError, "got dict", {"prompt": "hello"}),
    Bad("an object", InvalidRequestError, "got object", object()),
    Bad("an object whose array is broken", InvalidRequestError, "text or token ids: 'broken'", _BrokenArray()),
    Bad("a float tensor", InvalidRequestError, "integer token ids", torch.ones(3)),
    Bad("a tensor with a gradient", InvalidRequestError, "text or token ids", torch.ones(3, requires_grad=True)),
    Bad(
        "longer than the cache",
        PromptTooLongError,
        r"has 400 tokens and the whole cache 400.* may have 399; shorten it",
        prompt(400),
    ),
]

PARAMS = [
    _param("max_new_tokens must be at least 1, got 0", max_new_tokens=0),
    _param("max_new_tokens must be at least 1", max_new_tokens=-3),
    _param("max_new_tokens must be an integer or None, got 1.5", max_new_tokens=1.5),
    _param("max_new_tokens must be an integer or None", max_new_tokens=True),
    _param("min_new_tokens must be at least 0", min_new_tokens=-1),
    _param("min_new_tokens=9 is more than max_new_tokens=3; lower", min_new_tokens=9, max_new_tokens=3),
    _param("temperature must be a finite number of at least 0", temperature=-0.1),
    _param("temperature must be a finite number", temperature=float("nan")),
    _param("temperature must be a finite number", temperature=float("inf")),
    _param("temperature must be a number or None, got 'hot'", temperature="hot"),
    _param("top_k must be at least 0", top_k=-1),
    _param("top_k must be an integer", top_k=2.5),
    _param("top_p must be a finite number from 0 to 1", top_p=1.1),
    _param("top_p must be a finite number from 0 to 1", top_p=-0.1),
    _param("min_p must be a finite number from 0 to 1", min_p=2),
    _param("seed must be from 0 to", seed=-1),
    _param("seed must be from 0 to", seed=2**64),
    _param("stop_token_ids must be a sequence of token ids, got 'stop'", stop_token_ids="stop"),
    _param("stop_token_ids must be at least 0", stop_token_ids=[-1]),
    _param("stop_token_ids has 97, but the vocabulary ends at 96", stop_token_ids=[97]),
    _param("stop_token_ids must be a sequence of token ids", stop_token_ids=7),
    _param("ignore_eos must be True or False", ignore_eos=1),
    _param("unknown sampling parameter max_tokens; known are .*max_new_tokens", max_tokens=5),
    _param("request_id must be a string that is not empty", request_id=""),
    _param("request_id must be a string", request_id=7),
    _param("request_id must be text that UTF-8 can encode", request_id="a\ud800"),
    _param("timeout must be a number of seconds above 0, or None, got 0", timeout=0),
    _param("timeout must be a number of seconds above 0", timeout=float("inf")),
    _param("queue_timeout must be a number of seconds above 0", queue_timeout="soon"),
    _param("timeout must be a number of seconds above 0", timeout=10**400),
    _param("queue_timeout must be a number of seconds above 0", queue_timeout=np.float32("nan")),
    _param("queue_timeout must be a number of seconds above 0", queue_timeout=True),
    _param("backpressure must be one of buffer, pause, abort, got 'drop'", backpressure="drop"),
    _param("stream_buffer must be an integer of at least 1", stream_buffer=0),
    _param("stream_buffer must be an integer of at least 1", stream_buffer=2.0),
    _param("stream_buffer must be an integer of at least 1 .and at most", stream_buffer=10**400),
    Bad("params of another type", InvalidRequestError, "SamplingParams or None, got dict", params={"top_k": 1}),
]


@aio("asyncio", "trio")
@pytest.mark.parametrize("bad", PROMPTS + PARAMS, ids=lambda bad: bad.name)
async def test_refused_at_the_call_beside_a_healthy_stream(bad: Bad) -> None:
    gate = Gate()
    model = FakeModel(fault=gate)
    async with running(model, num_blocks=100) as engine:
        healthy = engine.stream(IDS, max_new_tokens=8, ignore_eos=True)
        await gate.steps(2)
        with pytest.raises(bad.error, match=bad.words) as caught:
            bad.ask(engine)
        assert type(caught.value) is bad.error
        assert isinstance(caught.value, RequestError)
        stats = engine.stats()
        assert (stats.labels, stats.running, stats.waiting) == (1, 1, 0)
        gate.open()
        assert (await healthy.result()).token_ids == tuple(model.reference(IDS, 8, ignore_eos=True))


@aio(trio=True)
@pytest.mark.parametrize("bad", [PROMPTS[0], PROMPTS[4], PROMPTS[-1], PARAMS[0], PARAMS[-1]], ids=lambda bad: bad.name)
async def test_the_error_carries_the_label(bad: Bad) -> None:
    async with running(num_blocks=100) as engine:
        with pytest.raises(bad.error) as caught:
            bad.ask(engine, request_id="mine")
        assert caught.value.request_id == "mine"


@aio(trio=True)
async def test_every_way_of_asking_refuses_alike() -> None:
    async with running() as engine:
        with pytest.raises(EmptyPromptError):
            await engine.generate("")
        with pytest.raises(EmptyPromptError):
            await engine.generate_batch(["", "a"], max_new_tokens=1)
        with pytest.raises(InvalidRequestError, match="max_new_tokens"):
            engine.chat([{"role": "user", "content": "Hi"}], max_new_tokens=0)
        with pytest.raises(InvalidRequestError, match="unknown sampling parameter"):
            await engine.generate("a", top_q=1)  # type: ignore[call-arg]
        with pytest.raises(InvalidRequestError, match="unknown sampling parameter"):
            async for _ in engine.as_completed(["a"], top_q=1):  # type: ignore[call-arg]
                raise AssertionError("an answer to a wrong request")


@aio(trio=True)
async def test_longer_than_the_model() -> None:
    model = FakeModel(max_model_len=20)
    async with running(model) as engine:
        with pytest.raises(PromptTooLongError, match=r"has 20 tokens and the sequences this engine serves 20"):
            engine.stream(prompt(20))
        with pytest.raises(PromptTooLongError, match=r"has 21 tokens"):
            engine.stream("x" * 21)
        longest = await engine.generate(prompt(19), ignore_eos=True)
        assert longest.token_ids == tuple(model.reference(prompt(19), 1, ignore_eos=True))
        assert longest.finish_reason == "length"
    async with running(model, max_model_len=10) as engine:
        with pytest.raises(PromptTooLongError, match=r"has 10 tokens"):
            engine.stream(prompt(10))
        assert len((await engine.generate(prompt(4), ignore_eos=True)).token_ids) == 6  # up to the limit


@aio(trio=True)
async def test_a_request_as_large_as_the_cache_is_served() -> None:
    model = FakeModel()
    async with running(model, num_blocks=10) as engine:
        longest = prompt(39)
        others = [engine.stream(prompt(6, s), max_new_tokens=8, ignore_eos=True) for s in range(3)]
        assert (await engine.generate(longest)).token_ids == tuple(model.reference(longest, 1))
        whole = await engine.generate(prompt(2), max_new_tokens=1000, ignore_eos=True)
        assert whole.token_ids == tuple(model.reference(prompt(2), 38, ignore_eos=True))
        for seed, stream in enumerate(others):
            expected = model.reference(prompt(6, seed), 8, ignore_eos=True)
            assert (await stream.result()).token_ids == tuple(expected)


@aio(trio=True)
async def test_a_long_text_that_turns_out_too_long_fails_on_its_stream() -> None:
    model = FakeModel(max_model_len=4500)
    async with running(model, num_blocks=2000) as engine:
        healthy = engine.stream(IDS, max_new_tokens=8, ignore_eos=True)
        stream = engine.stream("x" * 5000, request_id="long")
        with pytest.raises(PromptTooLongError, match="has 5000 tokens") as caught:
            await stream.result()
        assert caught.value.request_id == "long"
        assert stream.finish_reason == "error" and stream.status == "failed"
        assert (await healthy.result()).token_ids == tuple(model.reference(IDS, 8, ignore_eos=True))


@aio(trio=True)
async def test_a_living_label_is_refused_and_a_dead_one_is_free() -> None:
    gate = Gate()
    model = FakeModel(fault=gate)
    async with running(model) as engine:
        first = engine.stream(IDS, max_new_tokens=3, ignore_eos=True, request_id="a")
        with pytest.raises(
            DuplicateRequestError, match="'a' belongs to a request that is still alive; use another"
        ) as e:
            engine.stream(prompt(6), request_id="a")
        assert e.value.request_id == "a"
        gate.open()
        assert (await first.result()).token_ids == tuple(model.reference(IDS, 3, ignore_eos=True))
        again = await engine.generate(IDS, max_new_tokens=3, ignore_eos=True, request_id="a")
        assert again.token_ids == (await first.result()).token_ids and again.request_id == "a"


@aio(trio=True)
async def test_a_label_that_looks_like_one_of_ours_gets_in_nobodys_way() -> None:
    gate = Gate()
    async with running(FakeModel(fault=gate)) as engine:
        streams = [engine.stream(IDS, max_new_tokens=1, request_id=f"request-{n}") for n in range(3, 8)]
        streams += [engine.stream(IDS, max_new_tokens=1) for _ in range(8)]
        assert len({stream.request_id for stream in streams}) == 13
        gate.open()
        for stream in streams:
            await stream.result()


@aio(trio=True)
async def test_a_queue_full_of_requests() -> None:
    gate = Gate()
    model = FakeModel(fault=gate)
    async with running(model, max_queue_size=10, max_requests_per_batch=1) as engine:
        first = engine.stream(IDS, max_new_tokens=4, ignore_eos=True)
        await gate.someone_waits()
        queued = [engine.stream(prompt(3, s), max_new_tokens=1, ignore_eos=True) for s in range(10)]
        with pytest.raises(QueueFullError, match="10 requests are waiting and max_queue_size is 10; try again") as e:
            engine.stream(prompt(3), request_id="eleventh")
        assert 0 < e.value.retry_after <= 60 and e.value.request_id == "eleventh"
        queued.pop().cancel()
        gate.let_pass(2)
        await _eventually_accepted(lambda: engine.stream(prompt(5), max_new_tokens=1, request_id="eleventh"), queued)
        gate.open()
        assert (await first.result()).token_ids == tuple(model.reference(IDS, 4, ignore_eos=True))
        for seed, stream in enumerate(queued[:9]):
            assert (await stream.result()).token_ids == tuple(model.reference(prompt(3, seed), 1, ignore_eos=True))
        await queued[9].result()
        assert engine.stats().requests_failed == 0


async def _eventually_accepted(ask: Callable[[], Any], queued: list[Any]) -> None:
    with anyio.fail_after(5):
        while True:
            try:
                queued.append(ask())
                return
            except QueueFullError:
                await anyio.sleep(0.002)


@aio(trio=True)
async def test_a_queue_full_of_tokens() -> None:
    gate = Gate()
    async with running(FakeModel(fault=gate), max_queued_tokens=50, max_requests_per_batch=1) as engine:
        first = engine.stream(prompt(120), max_new_tokens=1)  # an empty queue takes a request of any size
        await gate.someone_waits()
        queued = [engine.stream(prompt(20), max_new_tokens=1) for _ in range(2)]
        with pytest.raises(QueueFullError, match=r"40 prompt tokens are waiting, this request adds 11 and .* is 50"):
            engine.stream(prompt(11))
        queued.append(engine.stream(prompt(10), max_new_tokens=1))
        gate.open()
        for stream in [first, *queued]:
            await stream.result()
        await idle(engine)
        await engine.generate(prompt(49), max_new_tokens=1)


@aio(trio=True)
async def test_parameters_of_an_object_and_overrides_over_them() -> None:
    model = FakeModel()
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    async with running(model) as engine:
        assert len((await engine.generate(IDS, params)).token_ids) == 9
        assert len((await engine.generate(IDS, params, max_new_tokens=2)).token_ids) == 2
        assert params.max_new_tokens == 9
        numpy_ints = SamplingParams(max_new_tokens=np.int64(3), top_k=np.int32(5), seed=np.uint64(2**63))  # type: ignore[arg-type]
        array: Any = np.array(IDS, np.uint8)
        assert len((await engine.generate(array, numpy_ints, ignore_eos=True)).token_ids) == 3
        assert len((await engine.generate(torch.tensor(IDS), params)).token_ids) == 9  # type: ignore[arg-type]


@aio
async def test_options_of_numpys_kinds() -> None:
    async with running() as engine:
        completion = await engine.generate(
            IDS,
            max_new_tokens=3,
            ignore_eos=True,
            timeout=np.float32(30),  # type: ignore[arg-type]
            queue_timeout=np.int64(30),  # type: ignore[arg-type]
            backpressure="pause",
            stream_buffer=np.int32(1),  # type: ignore[arg-type]
        )
        assert len(completion.token_ids) == 3


def test_options_become_plain_python() -> None:
    options = RequestOptions(timeout=np.float64(2), queue_timeout=np.int8(3), stream_buffer=np.uint8(4))  # type: ignore[arg-type]
    assert options == RequestOptions(timeout=2.0, queue_timeout=3.0, stream_buffer=4)
    assert [type(v) for v in (options.timeout, options.queue_timeout, options.stream_buffer)] == [float, float, int]


def test_features_that_are_not_there_are_requests_that_are_wrong() -> None:
    assert issubclass(UnsupportedFeatureError, InvalidRequestError) and issubclass(InvalidRequestError, ValueError)
