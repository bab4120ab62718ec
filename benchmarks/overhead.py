"""Host time per step and per token, with a model that costs nothing: what the engine itself adds.

    python benchmarks/overhead.py [--streams 1 32 256 1024] [--tokens 200] [--json FILE]

Two measurements for each number of running streams:

* the loop alone, turned by hand over the inline device: plan, fill, launch, commit, text, hand over, with the device's
  own work (a forward of nothing, an argmax) timed apart and taken off;
* the whole engine with real readers, one coroutine for each stream, on asyncio: wall time a token, loop wake-ups a step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import time
from typing import Any

import numpy as np

from cbengine import AsyncEngine, EngineConfig
from cbengine.bridge.buffer import StreamBuffer
from cbengine.bridge.inbox import Inbox, Submit
from cbengine.bridge.ports import LoopPort, Waiter
from cbengine.devices.inline import InlineDevice
from cbengine.execution.build import build
from cbengine.sampling import SamplingParams
from cbengine.scheduling.admission import Registry
from cbengine.scheduling.request import Request
from cbengine.testing import FakeModel

PROMPT = list(range(1, 17))


class NullPort(LoopPort):
    """Takes what is posted and drops it."""

    def _schedule(self, fn: Any, *args: Any) -> None:
        pass

    def waiter(self) -> Waiter:
        raise AssertionError("nobody waits here")


class TimedDevice(InlineDevice):
    """Adds up the time of the operations, which is the device's and not the host's."""

    spent = 0.0

    def launch(self, stream: Any, fn: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        super().launch(stream, fn, **kwargs)
        self.spent += time.perf_counter() - start


def config(streams: int, tokens: int) -> EngineConfig:
    return EngineConfig(
        page_size=256,
        num_blocks=streams * (2 + (tokens + len(PROMPT)) // 256),
        max_batch_tokens=max(512, streams),
        max_requests_per_batch=streams,
        safety_margin=0.0,
    )


def loop_alone(streams: int, tokens: int) -> dict[str, float]:
    """Medians over the steps in which every stream decodes."""
    model = FakeModel(free=True, eos_token_ids=())
    device, inbox, registry = TimedDevice(), Inbox(), Registry(0, 0)
    built = build(config(streams, tokens), model, device, inbox, registry, model.tokenizer.detokenizer)
    port = NullPort(object())
    for i in range(streams):
        params = SamplingParams(temperature=0, max_new_tokens=tokens).resolved({})
        request = Request(
            id=i,
            label=str(i),
            params=params,
            seed=0,
            reader=StreamBuffer(port, str(i), len(PROMPT), 0.0),
            arrival_time=0.0,
            prompt=np.array(PROMPT, np.int32),
            limit=len(PROMPT) + tokens,
        )
        registry.enter([i], str(i), len(PROMPT), lambda request=request: inbox.put(Submit(request)))
    host: list[float] = []
    while True:
        device.spent = 0.0
        start = time.perf_counter()
        if not built.loop.turn():
            break
        spent = time.perf_counter() - start - device.spent
        if built.loop.parts.scheduler.num_waiting == 0 and built.loop.parts.scheduler.num_running == streams:
            host.append(spent)
    step = statistics.median(host[5:])
    return {"host_ms_per_step": step * 1e3, "host_us_per_token": step * 1e6 / streams, "steps": len(host)}


async def whole_engine(streams: int, tokens: int) -> dict[str, float]:
    model = FakeModel(free=True, eos_token_ids=())
    async with AsyncEngine(model, config=config(streams, tokens)) as engine:

        async def read() -> None:
            async for _ in engine.stream(PROMPT, temperature=0, max_new_tokens=tokens):
                pass

        cpu, start = time.process_time(), time.perf_counter()
        await asyncio.gather(*(read() for _ in range(streams)))
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        stats = engine.stats()
    total = streams * tokens
    return {
        "engine_us_per_token": wall * 1e6 / total,
        "engine_cpu_us_per_token": cpu * 1e6 / total,
        "wakeups_per_step": stats.loop_wakeups / stats.steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows: list[dict[str, float]] = []
    heads = ("streams", "host ms/step", "host µs/token", "engine µs/token", "CPU µs/token", "wake-ups/step")
    print("{:>8} {:>13} {:>14} {:>16} {:>13} {:>14}".format(*heads))
    for streams in args.streams:
        row = {
            "streams": streams,
            **loop_alone(streams, args.tokens),
            **asyncio.run(whole_engine(streams, args.tokens)),
        }
        row["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append(row)
        print(
            f"{streams:8} {row['host_ms_per_step']:13.3f} {row['host_us_per_token']:14.2f} {row['engine_us_per_token']:16.2f} "
            f"{row['engine_cpu_us_per_token']:13.2f} {row['wakeups_per_step']:14.2f}",
            flush=True,
        )
    print(f"peak memory {rows[-1]['peak_rss_mib']:.0f} MiB")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
