"""Many prompts at once: `generate`, `generate_batch`, `as_completed`, `chat`."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator

import anyio
import pytest
from anyio.lowlevel import checkpoint

from cbengine import (
    Completion,
    EmptyPromptError,
    EngineStoppedError,
    InvalidRequestError,
    PromptTooLongError,
    RequestFailedError,
)
from cbengine.batching import MAX_OUTSTANDING, CompletionIterator
from cbengine.execution.inputs import StepInputs
from cbengine.testing import FakeModel, FakeTokenizer
from tests.api.fakes import Gate, prompt, running
from tests.support.guard import LoopGuard
from tests.support.leaks import idle
from tests.support.loops import aio, eventually


@aio(trio=True)
async def test_answers_come_in_the_order_of_the_prompts() -> None:
    model = FakeModel()
    # The first asks for most, so it ends last.
    prompts = [prompt(30 - seed, seed) for seed in range(20)]
    async with running(model) as engine:
        completions = await engine.generate_batch(prompts, max_new_tokens=10, ignore_eos=True)
    assert [c.index for c in completions] == list(range(20))
    assert [c.token_ids for c in completions] == [tuple(model.reference(p, 10, ignore_eos=True)) for p in prompts]
    assert len({c.request_id for c in completions}) == 20


@aio(trio=True)
async def test_as_completed_yields_the_first_to_end_first() -> None:
    model = FakeModel(eos_token_ids=(0, 7, 21, 40, 63))
    prompts = [prompt(4, seed) for seed in range(7)]
    lengths = [len(model.reference(p, 100)) for p in prompts]
    assert len(set(lengths)) > 3
    async with running(model) as engine:
        async with engine.paused():
            iterator = engine.as_completed(prompts, max_new_tokens=100)  # all of them begin in one step
        answered = [completion.index async for completion in iterator]
    assert [lengths[index] for index in answered] == sorted(lengths)


@aio(trio=True)
async def test_a_batch_may_be_any_iterable_and_may_be_empty() -> None:
    model = FakeModel()

    def prompts() -> Iterator[list[int]]:
        for seed in range(3):
            yield prompt(4, seed)

    async with running(model) as engine:
        completions = await engine.generate_batch(prompts(), max_new_tokens=3, ignore_eos=True)
        assert [c.token_ids for c in completions] == [tuple(model.reference(p, 3, ignore_eos=True)) for p in prompts()]
        assert await engine.generate_batch([]) == []
        assert [c async for c in engine.as_completed([])] == []
        with pytest.raises(TypeError, match="got one text"):
            await engine.generate_batch("hello")
        for wrong in (None, 5):
            with pytest.raises(TypeError, match=r"a batch is a sequence of prompts, got (NoneType|int)"):
                await engine.generate_batch(wrong)  # type: ignore[arg-type]


@aio(trio=True)
async def test_a_batch_larger_than_the_queue_waits_on_the_callers_side() -> None:
    model = FakeModel()
    prompts = [prompt(6, seed) for seed in range(40)]
    async with running(model, max_queue_size=3, max_requests_per_batch=4) as engine:
        completions = await engine.generate_batch(prompts, max_new_tokens=5, ignore_eos=True)
    assert [c.token_ids for c in completions] == [tuple(model.reference(p, 5, ignore_eos=True)) for p in prompts]


@aio(trio=True)
async def test_a_batch_waits_for_a_queue_that_others_have_filled() -> None:
    gate = Gate()
    model = FakeModel(fault=gate)
    async with running(model, max_queue_size=1, max_requests_per_batch=1) as engine:
        running_one = engine.stream(prompt(3), max_new_tokens=3, ignore_eos=True)
        await gate.someone_waits()
        queued = engine.stream(prompt(4), max_new_tokens=3, ignore_eos=True)
        answers: list[tuple[int, ...]] = []

        async def batch() -> None:
            answers.extend(c.token_ids for c in await engine.generate_batch([prompt(5), prompt(7)], max_new_tokens=2))

        async with anyio.create_task_group() as group:
            group.start_soon(batch)
            await anyio.sleep(0.02)
            assert answers == []
            gate.open()
        assert answers == [tuple(model.reference(prompt(n), 2)) for n in (5, 7)]
        await running_one.result()
        await queued.result()


@aio(trio=True)
async def test_an_error_in_a_batch_is_raised_and_the_rest_is_cancelled() -> None:
    gate = Gate()
    async with running(FakeModel(fault=gate)) as engine:
        gate.open()
        with pytest.raises(EmptyPromptError):
            await engine.generate_batch([prompt(5), [], prompt(6)], max_new_tokens=300, ignore_eos=True)
        await idle(engine)
        stats = engine.stats()
        assert stats.requests_finished == 0 and stats.requests_cancelled == 2


@aio(trio=True)
async def test_errors_in_a_batch_in_their_places() -> None:
    model = FakeModel()
    async with running(model) as engine:
        answers = await engine.generate_batch(
            [prompt(5), [], prompt(7), [97], prompt(5000)], max_new_tokens=3, ignore_eos=True, return_exceptions=True
        )
    assert [type(a).__name__ for a in answers] == [
        "Completion",
        "EmptyPromptError",
        "Completion",
        "InvalidRequestError",
        "PromptTooLongError",
    ]
    assert answers[2].token_ids == tuple(model.reference(prompt(7), 3, ignore_eos=True))
    assert isinstance(answers[4], PromptTooLongError)


@aio(trio=True)
async def test_as_completed_goes_on_after_an_error() -> None:
    async with running() as engine:
        iterator = engine.as_completed([prompt(5), [], prompt(7)], max_new_tokens=3, ignore_eos=True)
        seen: list[object] = []
        while True:
            try:
                seen.append((await iterator.__anext__()).index)
            except StopAsyncIteration:
                break
            except InvalidRequestError as error:
                seen.append(type(error))
    assert sorted(map(str, seen)) == sorted(map(str, [0, 2, EmptyPromptError]))


@aio(trio=True)
async def test_a_step_that_breaks_fails_its_part_of_the_batch() -> None:
    marked = prompt(6, 5)

    def fault(inputs: StepInputs) -> None:
        if marked[0] == inputs.token_ids[0] and inputs.num_tokens == 6:
            raise ValueError("planted")

    model = FakeModel(fault=fault)
    async with running(model, max_requests_per_batch=1) as engine:
        answers = await engine.generate_batch([prompt(4), marked, prompt(9)], max_new_tokens=3, return_exceptions=True)
    assert isinstance(answers[1], RequestFailedError) and isinstance(answers[1].__cause__, ValueError)
    assert answers[0].token_ids == tuple(model.reference(prompt(4), 3))
    assert answers[2].token_ids == tuple(model.reference(prompt(9), 3))


@aio(trio=True)
async def test_dropping_the_iterator_cancels_what_is_unfinished() -> None:
    gate = Gate()
    model = FakeModel(fault=gate)
    async with running(model) as engine:
        gate.open()
        async for completion in engine.as_completed([prompt(5, s) for s in range(8)] + [[2]], max_new_tokens=400):
            assert completion.token_ids
            break
        gc.collect()
        gate.open()
        await idle(engine)
        stats = engine.stats()
        assert stats.requests_cancelled + stats.requests_finished == 9 and stats.requests_cancelled > 0


@aio(trio=True)
async def test_cancelling_a_batch_cancels_all_of_it() -> None:
    gate = Gate()
    async with running(FakeModel(fault=gate)) as engine:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.generate_batch, [prompt(5, s) for s in range(8)])
            await gate.someone_waits()
            group.cancel_scope.cancel()
            gate.open()
        await idle(engine)
        assert engine.stats().requests_cancelled == 8


@aio(trio=True)
async def test_stopping_the_engine_fails_a_batch_that_is_half_queued() -> None:
    gate = Gate()
    async with running(FakeModel(fault=gate), max_queue_size=2, max_requests_per_batch=1) as engine:
        errors: list[Exception] = []

        async def batch() -> None:
            try:
                await engine.generate_batch([prompt(5, s) for s in range(8)], max_new_tokens=3)
            except EngineStoppedError as error:
                errors.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(batch)
            await gate.someone_waits()
            gate.open()
            await engine.stop(hard=True)
        assert len(errors) == 1


async def _take_all(iterator: CompletionIterator, taken: list[int]) -> None:
    async for completion in iterator:
        taken.append(completion.index)
        await checkpoint()


@aio(trio=True)
async def test_several_tasks_share_an_iterator() -> None:
    gate = Gate()
    async with running(FakeModel(fault=gate)) as engine:
        iterator = engine.as_completed([prompt(4, seed) for seed in range(20)], max_new_tokens=4)
        taken: list[list[int]] = [[], [], []]
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for mine in taken:
                    group.start_soon(_take_all, iterator, mine)
                await gate.someone_waits()  # all of them wait by now
                gate.open()
        assert sorted(itertools.chain(*taken)) == list(range(20))


@aio(trio=True)
async def test_closing_wakes_whoever_waits() -> None:
    gate = Gate()
    async with running(FakeModel(fault=gate)) as engine:
        iterator = engine.as_completed([prompt(4, seed) for seed in range(3)], max_new_tokens=400, ignore_eos=True)
        taken: list[list[int]] = [[], []]
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for mine in taken:
                    group.start_soon(_take_all, iterator, mine)
                await gate.someone_waits()
                gate.open()
                await iterator.aclose()
        assert taken == [[], []]
        assert [c async for c in iterator] == []
        await idle(engine)
        assert engine.stats().requests_cancelled == 3


def _broken_prompts() -> Iterator[list[int]]:
    yield prompt(4, 0)
    yield prompt(4, 1)
    raise KeyError("the caller's own")


@aio(trio=True)
async def test_prompts_that_raise_start_nothing_twice() -> None:
    """They fail while the two before, which the full queue has held up, are being started."""
    gate = Gate()
    async with running(FakeModel(fault=gate), max_queue_size=1, max_requests_per_batch=1) as engine:
        first = engine.stream(prompt(3), max_new_tokens=1)
        await gate.someone_waits()
        blocking = engine.stream(prompt(3, 1), max_new_tokens=1)
        iterator = engine.as_completed(_broken_prompts(), max_new_tokens=2, ignore_eos=True)  # the queue is full
        gate.open()
        seen: list[object] = []
        while True:
            try:
                seen.append((await iterator.__anext__()).index)
            except StopAsyncIteration:
                break
            except KeyError as error:
                seen.append(error.args[0])
        assert sorted(map(str, seen)) == ["0", "1", "the caller's own"]
        await first.result()
        await blocking.result()
        await idle(engine)
        assert engine.stats().requests_finished == 4
        with pytest.raises(KeyError, match="the caller's own"):
            await engine.generate_batch(_broken_prompts(), max_new_tokens=400)
        await idle(engine)


@aio(trio=True)
async def test_prompts_without_end() -> None:
    made = 0

    def endless() -> Iterator[list[int]]:
        nonlocal made
        while True:
            made += 1
            yield [5]

    async with running(max_requests_per_batch=4) as engine:
        taken: list[Completion] = []
        async for completion in engine.as_completed(endless(), max_new_tokens=1):
            taken.append(completion)
            assert made <= MAX_OUTSTANDING + len(taken) + 1
            if len(taken) == 30:
                break
        assert sorted({c.index for c in taken}) == sorted(c.index for c in taken)


@aio(trio=True)
async def test_wrong_prompts_without_end_leave_the_loop_to_others() -> None:
    async with running() as engine:
        with anyio.move_on_after(0.05) as scope:
            await engine.generate_batch(itertools.repeat([]), return_exceptions=True)
        assert scope.cancelled_caught


@aio(trio=True)
async def test_dropping_the_iterator_after_an_error_needs_no_collector() -> None:
    gate = Gate()
    async with running(FakeModel(fault=gate)) as engine:
        gc.disable()
        try:
            iterator = engine.as_completed([[], prompt(4), prompt(5)], max_new_tokens=400, ignore_eos=True)
            with pytest.raises(EmptyPromptError):
                await iterator.__anext__()
            del iterator
            gate.open()
            await idle(engine)
            assert engine.stats().requests_cancelled == 2
        finally:
            gc.enable()


@aio
async def test_progress_shows_a_bar_of_the_right_length(capsys: pytest.CaptureFixture[str]) -> None:
    async with running() as engine:
        await engine.generate_batch([prompt(5, s) for s in range(7)], max_new_tokens=2, progress=True)
    assert "7/7" in capsys.readouterr().err


@aio(trio=True)
async def test_chat_is_a_stream_over_the_template() -> None:
    model = FakeModel()
    messages = [{"role": "user", "content": "Hi"}]
    async with running(model) as engine:
        stream = engine.chat(messages, max_new_tokens=6, ignore_eos=True, request_id="talk")
        assert stream.request_id == "talk"
        completion = await stream.result()
        text = model.tokenizer.apply_chat_template(messages)
        assert completion.token_ids == tuple(model.reference(model.tokenizer.encode(text), 6, ignore_eos=True))


@aio
async def test_concurrent_calls_share_steps() -> None:
    model = FakeModel()
    async with running(model) as engine:
        async with anyio.create_task_group() as group:
            for seed in range(10):
                group.start_soon(lambda seed=seed: engine.generate(prompt(2, seed), max_new_tokens=20, ignore_eos=True))
        assert engine.stats().generated_tokens == 200
        assert engine.stats().steps < 60
    await eventually(lambda: not engine.health())


class SlowTokenizer(FakeTokenizer):
    """Computes for 1 ms at each text, as a real one does at a long one."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        end = time.thread_time() + 0.001
        while time.thread_time() < end:
            pass
        return super().encode(text)


@aio
async def test_a_large_batch_leaves_the_loop_to_others(loop_guard: LoopGuard) -> None:
    """Texts that take 0.15 s to tokenize are started by many callbacks, none of which the guard finds too long."""
    started = 0

    def texts() -> Iterator[str]:
        nonlocal started
        while started < 150:
            started += 1
            yield "abc"

    async with running(FakeModel(), tokenizer=SlowTokenizer()) as engine:
        answers = engine.as_completed(texts(), max_new_tokens=1)
        assert started < 60
        await eventually(lambda: started == 150)  # though nobody reads
        assert len([answer async for answer in answers]) == 150
    assert loop_guard.calls > 20


@aio(trio=True)
async def test_whoever_waits_hears_of_the_portions_after_the_first() -> None:
    """The first prompts are held up by a gate; those that are wrong come in a later portion, and are told at once."""
    gate = Gate()
    async with running(FakeModel(fault=gate), tokenizer=SlowTokenizer()) as engine:
        answers = engine.as_completed(["abc"] * 12 + [""], max_new_tokens=1)
        with anyio.fail_after(20), pytest.raises(EmptyPromptError):
            await answers.__anext__()
        gate.open()
        assert len([answer async for answer in answers]) == 12


@aio
async def test_a_large_batch_beside_others_in_a_full_queue(loop_guard: LoopGuard) -> None:
    async with running(FakeModel(), tokenizer=SlowTokenizer(), max_queue_size=9) as engine:
        batch = engine.generate_batch(["abc"] * 60, max_new_tokens=2)
        assert len(await batch) == 60
