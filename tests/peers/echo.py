"""A runner without an engine: token n of a request is its prompt's first token plus n. Standard library only, as the peers'.

`mode`: how it is driven: "loop" by a loop of its own, "async" by coroutines; "broken" ends in the middle of a workload.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence

from benchmarks.peers.protocol import Arrivals, Item, Record, arguments, ask, jobs, ready


def in_a_loop(items: Sequence[Item]) -> list[Record]:
    records = [Record() for _ in items]
    arrivals, live = Arrivals(items, records), set()
    while arrivals or live:
        live.update(arrivals.due())
        if not live:
            time.sleep(arrivals.wait())
        for i in list(live):
            records[i].add([items[i].prompt[0] + len(records[i].ids)], time.perf_counter())
            if len(records[i].ids) == items[i].max_new_tokens:
                live.remove(i)
    return records


async def stream(number: int, item: Item) -> AsyncIterator[Sequence[int]]:
    for n in range(item.max_new_tokens):
        await asyncio.sleep(0)
        yield [item.prompt[0] + n]


def main() -> None:
    args = arguments(__doc__, mode="loop")
    ready("1.0", mode=args.mode)
    for items, finish in jobs():
        if args.mode == "broken":
            sys.exit("out of order")
        finish(in_a_loop(items) if args.mode == "loop" else asyncio.run(ask(items, stream)))


if __name__ == "__main__":
    main()
