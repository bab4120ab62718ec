"""Runner: cbengine, through `AsyncEngine`'s streams, on its default settings."""

from __future__ import annotations

import asyncio
import importlib.metadata
from dataclasses import fields
from typing import Any

from benchmarks.peers.protocol import WARM_UP, arguments, jobs, ready
from cbengine.cli.clients import ask, warm_up
from cbengine.cli.workload import Item, Workload
from cbengine.engine import AsyncEngine


async def main() -> None:
    args = arguments(__doc__, quantization="", threads_given=0)
    settings: dict[str, Any] = {"quantization": args.quantization} if args.quantization else {}
    if args.threads_given:
        settings["num_threads"] = args.threads
    async with AsyncEngine.from_pretrained(args.model, **settings) as engine:
        await warm_up(engine, Workload("warm-up", [Item(WARM_UP.prompt, WARM_UP.max_new_tokens)]))
        chosen = {f.name: getattr(engine.config, f.name) for f in fields(engine.config)}
        ready(importlib.metadata.version("cbengine"), **chosen)
        for items, finish in jobs():
            workload = Workload("job", [Item(i.prompt, i.max_new_tokens, i.arrival_s, i.after_tokens) for i in items])
            finish(await ask(engine, workload))


if __name__ == "__main__":
    asyncio.run(main())
