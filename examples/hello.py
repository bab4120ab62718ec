"""The smallest program: python examples/hello.py MODEL_FOLDER"""

import asyncio
import sys

from cbengine import AsyncEngine


async def main(model: str) -> None:
    async with AsyncEngine.from_pretrained(model) as engine:
        async for token in engine.stream("The capital of France is", max_new_tokens=24, temperature=0):
            print(token, end="", flush=True)
    print()


asyncio.run(main(sys.argv[1]))
