"""From a call to a request on its way: everything is checked, registered and handed over, with no await in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cbengine.bridge.buffer import StreamBuffer
from cbengine.bridge.inbox import Cancel, Read, Submit
from cbengine.bridge.ports import LoopPort
from cbengine.choices import ChoicesStream
from cbengine.config import EngineConfig
from cbengine.execution.noise import derive_seed
from cbengine.execution.worker import Worker
from cbengine.options import RequestOptions, split
from cbengine.prompts import Parsed, Prompt, PromptReader
from cbengine.sampling import SamplingParams
from cbengine.scheduling.request import Request
from cbengine.stream import TokenStream
from cbengine.text.answer_format import AnswerFormat


@dataclass(slots=True)
class Ask:
    """What a caller wants."""

    prompt: Prompt
    params: SamplingParams | None
    arguments: Mapping[str, Any]
    request_id: str | None
    index: int = 0
    add_special_tokens: bool = True
    form: AnswerFormat | None = None
    """How to tell the parts of the answer apart; None: it is text."""


@dataclass(slots=True)
class Desk:
    """Takes requests for one run of the engine. Any thread with an event loop.

    `next_id()` and `fresh_seed(id)` are the engine's, for they outlive a run.
    """

    worker: Worker
    prompts: PromptReader
    config: EngineConfig
    next_id: Callable[[], int]
    fresh_seed: Callable[[int], int]

    def accept(self, ask: Ask, port: LoopPort) -> TokenStream:
        """Raises what `AsyncEngine.stream` says; nothing is left behind then."""
        sampling, options = split(ask.arguments)
        options = options.resolved(self.config)
        params = self.prompts.resolve(ask.params, sampling)
        if params.structured is not None and ask.form is not None:
            params = replace(params, structured=ask.form.constrain(params.structured))
        number = self.next_id()
        label = self.prompts.label(ask.request_id, number)
        parsed = self.prompts.read(ask.prompt, params, label, add_special_tokens=ask.add_special_tokens)
        seed = params.seed if params.seed is not None else self.fresh_seed(number)
        requests: list[Request] = []
        for choice in range(params.n):
            sibling = number if choice == 0 else self.next_id()
            # The siblings' prompt is the same, so its logprobs are too: the first alone reports them.
            theirs = params if choice == 0 else replace(params, prompt_logprobs=None)
            own = label if params.n == 1 else f"{label}[{choice}]"
            request = self._request(sibling, own, theirs, options, parsed, port)
            request.seed = derive_seed(seed, choice)
            request.keep = ask.form.keep if ask.form is not None else frozenset()
            request.parent = requests[0] if requests else None
            requests.append(request)
        streams = self._enter(requests, label, parsed, ask)
        if requests[0].prompt is None:
            numbers = [request.id for request in requests]
            self.prompts.prepare_later(numbers, parsed, params, label, add_special_tokens=ask.add_special_tokens)
        return streams[0] if params.n == 1 else ChoicesStream(streams, label, ask.index)

    def _request(
        self,
        number: int,
        label: str,
        params: SamplingParams,
        options: RequestOptions,
        parsed: Parsed,
        port: LoopPort,
    ) -> Request:
        now = time.monotonic()
        request = Request(
            id=number,
            label=label,
            params=params,
            seed=0,
            reader=StreamBuffer(port, label, 0 if parsed.ids is None else len(parsed.ids), now),
            arrival_time=now,
            prompt=parsed.ids if params.structured is None else None,  # then it follows, with the grammar
            limit=parsed.limit,
            stop_ids=frozenset(params.stop_token_ids),
            edit=self.prompts.edit(params),
            timeout=options.timeout,
            queue_timeout=options.queue_timeout,
            backpressure=options.backpressure or "buffer",
            stream_buffer=options.stream_buffer or 1,
            cache_salt=options.cache_salt,
        )
        request.reader.scored = params.prompt_logprobs is not None
        if request.backpressure == "pause":
            request.reader.stride = max(1, request.stream_buffer // 2)
            request.reader.ack = partial(self.worker.inbox.put, Read(number))
        return request

    def _enter(self, requests: Sequence[Request], label: str, parsed: Parsed, ask: Ask) -> list[TokenStream]:
        """All of them or none."""
        put = self.worker.inbox.put

        def submit() -> None:
            for request in requests:
                put(Submit(request))

        self.worker.registry.enter([request.id for request in requests], label, parsed.tokens, submit)
        return [
            TokenStream(request.reader, partial(put, Cancel(request.id)), ask.index, ask.form) for request in requests
        ]
