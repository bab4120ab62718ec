"""The engine as its callers see it: lifecycle, admission, and the ways to ask for text."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Unpack

import anyio

from cbengine.asking import Ask, Desk
from cbengine.batching import CompletionIterator
from cbengine.bridge.inbox import Pause, Resume, Stop
from cbengine.bridge.ports import Ports
from cbengine.bridge.reply import Reply
from cbengine.cache.sizing import MemoryPlan, plan_memory
from cbengine.config import EngineConfig
from cbengine.errors import (
    CBEngineError,
    EngineError,
    EngineNotStartedError,
    EngineStoppedError,
    UnsupportedFeatureError,
)
from cbengine.execution.noise import derive_seed
from cbengine.execution.worker import Worker, WorkerState, dead_error
from cbengine.loading import Source, check_kinds, inspect
from cbengine.observe.counters import EngineStats
from cbengine.observe.health import EngineHealth
from cbengine.observe.timeline import Timeline
from cbengine.options import RequestArguments
from cbengine.outputs import Completion
from cbengine.prompts import Prompt, PromptReader
from cbengine.sampling import SamplingParams
from cbengine.stream import TokenStream
from cbengine.text.answer_format import AnswerFormat, answer_format
from cbengine.text.base import Tokenizer


class AsyncEngine:
    """Streams tokens from one model to many callers at once.

        async with AsyncEngine.from_pretrained("Qwen/Qwen3-4B") as engine:
            async for token in engine.stream("Tell me a story"):
                print(token, end="", flush=True)

    May be used from several event loops and threads at once. Nothing is loaded until `start()` or `async with`.

    Args:
        model: a hub id, a local folder, a GGUF file, an already built `transformers` model, or anything with the methods
            of `cbengine.models.base.ModelRunner` (`cbengine.testing.FakeModel`).
        config: settings; keyword arguments override single ones.
        tokenizer: replaces the one that comes with the model. A `transformers` tokenizer, or anything with the methods of
            `cbengine.text.base.Tokenizer`.
        load_options: passed on to `from_pretrained` of the model (`revision`, `trust_remote_code`, …).

    Raises:
        TypeError, ValueError: a setting does not exist, or its value is not allowed; an argument is of another kind.
    """

    def __init__(
        self,
        model: Any,
        *,
        config: EngineConfig | None = None,
        tokenizer: Any = None,
        load_options: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> None:
        check_kinds(config, load_options, tokenizer)
        self._config = (config or EngineConfig()).merged(overrides)
        self._source = Source(model, self._config, tokenizer, dict(load_options or {}))
        self._worker: Worker | None = None
        self._closed = False
        self._start_lock = threading.Lock()
        self._ids = itertools.count()
        self._ports = Ports()
        self._open_desk: Desk | None = None

    @classmethod
    def from_pretrained(
        cls,
        model: Any,
        *,
        config: EngineConfig | None = None,
        tokenizer: Any = None,
        load_options: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> AsyncEngine:
        """The usual way to make an engine. Cheap: loading happens in `start()`. See the class for the arguments."""
        return cls(model, config=config, tokenizer=tokenizer, load_options=load_options, **overrides)

    # --- lifecycle -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model (the first time) and begin to serve. Off the event loop; returns once requests are taken.

        Does nothing when the engine runs already; waits with whoever else is starting it. May be called again after a
        stop (one that is still under way is waited for) and after the engine died.

        Raises:
            EngineStoppedError: the engine was closed (`aclose`), which is final.
            UnsupportedFeatureError: the model's attention, or the device, is not served.
            OSError, ValueError: whatever loading the model raised.
        """
        while True:
            worker = self._current_run()
            reply = Reply(self._ports.current())
            failed = (
                worker.fault is not None and worker.memory is None
            )  # it never served: say why, and not "start again"
            if worker.stopping and not failed:
                worker.when_ended(reply.set)
                await reply.wait()
                continue
            worker.when_ready(reply.set)
            await reply.wait()
            return

    def _current_run(self) -> Worker:
        """The worker of the run that goes on or is ending, else of one that begins now."""
        with self._start_lock:  # whoever starts the engine from several threads at once starts it once
            if self._closed:
                raise EngineStoppedError("the engine was closed, which is final; make a new one")
            worker = self._worker
            if worker is None or worker.state is WorkerState.ENDED:
                worker = Worker(self._config, self._source.load, self._source.make_device)
                worker.start()
                self._worker = worker
                # An engine that is dropped ends: the worker does not refer to it.
                weakref.finalize(self, worker.inbox.put, Stop(drain=False)).atexit = False
            self._check_process(worker)
            return worker

    @staticmethod
    def _check_process(worker: Worker) -> None:
        if worker.process != os.getpid():
            raise EngineStoppedError(
                "the engine was started in another process, and its threads did not come along with the fork; make a new "
                "engine in this process"
            )

    async def stop(self, drain: bool = True, timeout: float | None = None, *, hard: bool = False) -> None:
        """End the serving, so that it can be started again; the model stays loaded.

        Args:
            drain: finish what is queued and running first. New requests raise `EngineStoppedError` meanwhile.
            timeout: seconds after which draining turns into a hard stop. None: as long as it takes.
            hard: at once; every open stream gets `EngineStoppedError`. The same as `drain=False`.
        """
        worker = self._worker
        if worker is None or worker.process != os.getpid():
            return
        drain = drain and not hard
        worker.close_admission()
        worker.inbox.put(Stop(drain=drain))
        reply = Reply(self._ports.current())
        worker.when_ended(reply.set)
        if drain and timeout is not None:
            with anyio.move_on_after(timeout) as scope:
                await reply.wait()
            if not scope.cancelled_caught:
                return
            worker.inbox.put(Stop(drain=False))
        try:
            await reply.wait()
        except BaseException:
            worker.inbox.put(Stop(drain=False))  # whoever gives up on draining does not want it to go on
            raise

    async def aclose(self) -> None:
        """Stop hard, and for good: the model is given back. Idempotent."""
        self._closed = True
        try:
            with anyio.CancelScope(shield=True):
                await self.stop(hard=True)
        finally:
            self._open_desk = None
            if self._worker is not None:
                self._worker.loaded = None
            with anyio.CancelScope(shield=True):
                await self._forget()

    async def _forget(self) -> None:
        """Give the loaded model back. Off the loop, for it takes a while, and on a thread that does nothing else."""
        source, reply = self._source, Reply(self._ports.current())
        if source.loaded is None:
            return

        def forget() -> None:
            try:
                source.forget()
            finally:
                reply.set()

        try:
            threading.Thread(target=forget, name="cbengine-forget", daemon=True).start()
        except RuntimeError:  # the system has no thread left
            forget()
        await reply.wait()

    async def __aenter__(self) -> AsyncEngine:
        try:
            await self.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def pause(self) -> None:
        """Hold all generation at a step boundary; returns when nothing is in flight on the device.

        Counted: it takes as many `resume()` calls. Requests are still accepted, and wait. A stop lifts every pause.
        """
        worker = self._running()
        if worker.stopping:
            raise EngineStoppedError(
                "the engine is being stopped, which lifts every pause; it cannot be paused any more"
            )
        reply = Reply(self._ports.current())
        worker.ask(Pause, reply.set)
        try:
            await reply.wait()
        except EngineError:
            raise
        except BaseException:
            worker.inbox.put(Resume())  # cancelled while waiting: the pause was asked for, so it is taken back
            raise

    def resume(self) -> None:
        """Take back one `pause()`. Any thread; more resumes than pauses change nothing."""
        worker = self._worker
        if worker is not None:
            worker.inbox.put(Resume())

    @asynccontextmanager
    async def paused(self) -> AsyncGenerator[None]:
        """`async with engine.paused():` nothing is generated inside."""
        worker = self._running()
        await self.pause()
        try:
            yield
        finally:
            worker.inbox.put(Resume())  # a stop lifts it, and a run that was started since has pauses of its own

    # --- asking ----------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **arguments: Unpack[RequestArguments],
    ) -> TokenStream:
        """Generate from `prompt`; returns at once, with everything already under way.

        No await in here: once this has returned the request is registered and has an owner, so nothing can be lost
        between asking and reading. A long text (over a few thousand characters) is tokenized on a thread of its own, and
        what is wrong with it is then raised by the stream; everything else is checked here.

        Args:
            prompt: text, or token ids.
            params: sampling parameters.
            request_id: a label of your own, unique among living requests.
            arguments: single sampling parameters (they override `params`), deadlines and backpressure: every name in
                `SamplingParams` and `RequestOptions`.

        Raises:
            EmptyPromptError, PromptTooLongError, InvalidRequestError, DuplicateRequestError, QueueFullError: the request
                is not accepted.
            EngineNotStartedError, EngineStoppedError, EngineDeadError: nobody is there to take it.
            StreamError: no event loop is running here.
        """
        return self._stream(prompt, params, request_id, arguments)

    def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        arguments: Mapping[str, Any],
        *,
        index: int = 0,
        add_special_tokens: bool = True,
        form: AnswerFormat | None = None,
    ) -> TokenStream:
        try:
            desk = self._desk(self._running())
            return desk.accept(
                Ask(prompt, params, arguments, request_id, index, add_special_tokens, form), self._ports.current()
            )
        except CBEngineError as error:
            if error.request_id is None and isinstance(request_id, str):
                error.request_id = request_id
            raise

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        request_id: str | None = None,
        continue_final_message: bool = False,
        reasoning: str | None = "auto",
        tool_format: str | None = "auto",
        template_options: Mapping[str, Any] | None = None,
        **arguments: Unpack[RequestArguments],
    ) -> TokenStream:
        """`stream` over the model's chat template.

        Args:
            messages: mappings with `role` and `content`, as for `apply_chat_template` of a transformers tokenizer.
            tools: function schemas or callables, for templates that know tools.
            continue_final_message: go on with the last message, which is the assistant's, instead of answering it.
            reasoning: how the model marks its reasoning ("think", "mistral"; None: it does not), for `stream.parts()`.
                Default: what its template says.
            tool_format: how it writes tool calls ("hermes", "llama3", "mistral"; None: they are text). Default: what its
                template says, if there are tools.
            template_options: further arguments of the template (`enable_thinking=False`, …).

        Raises:
            UnsupportedFeatureError: the model has no chat template, or the engine no tokenizer.
            InvalidRequestError: the template cannot take these messages. And what `stream` raises.
        """
        self._running()  # an engine that does not run says so, whatever the messages are
        options = dict(template_options or {})
        if tools is not None:
            options["tools"] = list(tools)
        if continue_final_message:
            options["continue_final_message"] = True
        text = self.tokenizer.apply_chat_template(messages, **options)
        form = answer_format(self.tokenizer, text, reasoning, tool_format, with_tools=bool(tools))
        return self._stream(text, params, request_id, arguments, add_special_tokens=False, form=form)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **arguments: Unpack[RequestArguments],
    ) -> Completion:
        """The whole answer at once. Cancelling the call ends the work. Arguments and errors: see `stream`."""
        async with self._stream(prompt, params, request_id, arguments) as stream:
            return await stream.result()

    def as_completed(
        self, prompts: Iterable[Prompt], params: SamplingParams | None = None, **arguments: Unpack[RequestArguments]
    ) -> CompletionIterator:
        """`async for completion in engine.as_completed(prompts)`: answers as they finish; `completion.index` tells whose.

        Up to 1024 prompts are under way at once, as far as the queue's limits let them in. An answer that failed raises its
        error from the iteration, which may be continued. Dropping the iterator cancels what is unfinished.
        """
        start: Callable[[int, Prompt], TokenStream] = lambda index, prompt: self._stream(  # noqa: E731
            prompt, params, None, arguments, index=index
        )
        return CompletionIterator(prompts, start, self._ports.current)

    async def generate_batch(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        return_exceptions: bool = False,
        **arguments: Unpack[RequestArguments],
    ) -> list[Any]:
        """Answers to all prompts, in the order of the prompts.

        Args:
            progress: show a bar.
            return_exceptions: put an answer's error in its place, instead of raising the first one (which cancels the
                rest).
        """
        return await self.as_completed(prompts, params, **arguments).gather(progress, return_exceptions)

    # --- looking ---------------------------------------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig:
        """The settings; with every inferred one filled in while the engine runs."""
        worker = self._worker
        return self._config if worker is None else worker.config

    @property
    def memory_plan(self) -> MemoryPlan:
        """What the engine allocated, and why as much. Raises `EngineNotStartedError` before the first start."""
        worker = self._worker
        if worker is None or worker.memory is None:
            raise EngineNotStartedError("the memory plan is made at start; use `await engine.start()` first")
        return worker.memory

    async def plan(self) -> MemoryPlan:
        """What `start()` would allocate, without loading the weights: from the model's config and what is free now.

        Raises:
            UnsupportedFeatureError: the model cannot be served, or planned for.
            OSError, ValueError: no such model, or settings that do not fit the memory.
        """
        return await anyio.to_thread.run_sync(self._make_plan)

    def _make_plan(self) -> MemoryPlan:
        """On a worker thread."""
        spec = inspect(self._source.model, self._config, self._source.options)
        device = self._source.make_device(self._config)
        try:
            memory, on_cpu = device.memory_info(), device.torch_device.type == "cpu"
        finally:
            device.close()
        free = memory.free if self._source.loaded is not None else max(0, memory.free - spec.weight_bytes)
        return plan_memory(spec, self._config, replace(memory, free=free), on_cpu=on_cpu)

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back. Raises `UnsupportedFeatureError` when the model came without one."""
        loaded = self._source.loaded
        if loaded is None:
            raise EngineNotStartedError("the tokenizer is loaded at start; use `await engine.start()` first")
        if loaded.tokenizer is None:
            raise UnsupportedFeatureError(
                "this engine has no tokenizer: pass token ids, or make the engine with `tokenizer=`"
            )
        return loaded.tokenizer

    @contextmanager
    def timeline(self) -> Generator[Timeline]:
        """Record what each step does meanwhile, on the host and on the device.

            with engine.timeline() as timeline:
                ...
            timeline.write("trace.json")  # for https://ui.perfetto.dev or chrome://tracing

        Raises:
            EngineNotStartedError, EngineStoppedError, EngineDeadError: the engine does not run.
            UnsupportedFeatureError: the device works off its queue by itself, so that the host cannot see when.
            EngineError: another timeline is being recorded.
        """
        worker, timeline = self._running(), Timeline()
        worker.record(timeline)
        try:
            yield timeline
        finally:
            worker.record(None)

    def stats(self) -> EngineStats:
        """Counts as of now. Cheap; any thread, in any state."""
        return EngineStats() if self._worker is None else self._worker.stats()

    def health(self) -> EngineHealth:
        """Whether the engine serves, and if not, why. Any thread."""
        return EngineHealth.of(self._worker, closed=self._closed)

    def _desk(self, worker: Worker) -> Desk:
        desk = self._open_desk
        if desk is None or desk.worker is not worker:
            reader = PromptReader(worker)
            desk = Desk(worker, reader, self._config, self._ids.__next__, self._fresh_seed)
            self._open_desk = desk
        return desk

    def _running(self) -> Worker:
        """The worker, if it takes requests; else the error that says why not."""
        worker = self._worker
        if self._closed:
            raise EngineStoppedError("the engine was closed; make a new one")
        if worker is None or worker.state is WorkerState.STARTING:
            raise EngineNotStartedError("the engine is not started: use `async with engine` or `await engine.start()`")
        self._check_process(worker)
        if worker.fault is not None:  # known before the thread has ended
            if worker.memory is None:
                raise EngineNotStartedError(f"the engine did not start: {worker.fault}") from worker.fault
            raise dead_error("", worker.fault)
        if worker.state is WorkerState.ENDED:
            raise EngineStoppedError("the engine is stopped; `await engine.start()` starts it again")
        return worker

    def _fresh_seed(self, number: int) -> int:
        if self._config.seed is not None:
            return derive_seed(self._config.seed, number)
        return int.from_bytes(os.urandom(8), "little")
