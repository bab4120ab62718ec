"""What fast readers get beside one that takes 50 ms for each token, under each backpressure policy, and without it.

    python benchmarks/slow_reader.py [--fast 16] [--tokens 400] [--json FILE]

The model costs nothing but 2 ms a step, so that what is measured is the engine. Taken in turns, the best of three. The fast
ones' tokens per second, and in each step, should be the same in every line; `unread` is the largest number of tokens that
waited for the slow reader, and `kept` says how many of the tokens that were made for it it has got in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

from cbengine import AsyncEngine, RequestFailedError, TokenStream
from cbengine.testing import FakeModel

ROOM = 16


class SlowReader:
    """Reads a token in 50 ms until `hurry` is set."""

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        self.hurry = asyncio.Event()
        self.got = self.most = 0

    async def read(self) -> None:
        try:
            async for _ in self.stream:
                self.got += 1
                self.most = max(self.most, len(self.stream.token_ids) - self.got)
                if not self.hurry.is_set():
                    await asyncio.sleep(0.05)
        except RequestFailedError:
            pass  # backpressure="abort", which is what was asked for


async def measure(policy: str | None, fast: int, tokens: int) -> dict[str, Any]:
    model = FakeModel(eos_token_ids=(), free=True, delay=0.002)
    settings: dict[str, Any] = {"page_size": 16, "num_blocks": 60 * (fast + 1), "max_requests_per_batch": fast + 1}
    async with AsyncEngine(model, **settings) as engine:
        slow = reading = None
        if policy is not None:
            slow = SlowReader(engine.stream([9], max_new_tokens=tokens, backpressure=policy, stream_buffer=ROOM))
            reading = asyncio.create_task(slow.read())
        start = time.perf_counter()
        streams = [engine.stream([i, 6], max_new_tokens=tokens) for i in range(fast)]
        for stream in streams:
            await stream.result()
        found: dict[str, Any] = {"policy": policy or "no slow reader"}
        found["tokens_per_second"] = round(fast * tokens / (time.perf_counter() - start))
        found["tokens_a_step"] = round(fast * tokens / engine.stats().steps, 1)
        if slow is not None and reading is not None:
            found["read_meanwhile"] = slow.got
            slow.hurry.set()
            await reading
            found |= {"unread": slow.most, "kept": f"{slow.got} of {len(slow.stream.token_ids)}"}
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--json")
    args = parser.parse_args()
    policies = (None, "buffer", "pause", "abort")
    rounds = [[asyncio.run(measure(policy, args.fast, args.tokens)) for policy in policies] for _ in range(3)]
    results = [max(found, key=lambda one: one["tokens_per_second"]) for found in zip(*rounds, strict=True)]
    for result in results:
        print(result)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
