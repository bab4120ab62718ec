"""Several prompts answered at once by one engine, streaming side by side.

    python examples/quickstart.py [PROMPT ...]

Uses the model that examples/get_models.py lays down; examples/quickstart.sh prepares everything and runs this.
examples/hello.py shows the API with one prompt, in ten lines.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from cbengine import AsyncEngine
from cbengine.cli.demo import PROMPTS, watch

MODEL = Path(os.environ.get("CBENGINE_MODELS", "~/.cache/cbengine-models")).expanduser() / "smollm2-135m"


async def main(prompts: list[str]) -> None:
    print(f"Loading {MODEL.name} ...", file=sys.stderr)
    async with AsyncEngine.from_pretrained(str(MODEL)) as engine:
        await watch(engine, prompts, max_new_tokens=120, temperature=0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or list(PROMPTS)))
