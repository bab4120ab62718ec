"""`cbengine plan`: the plan of a model that is never loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cbengine import AsyncEngine
from cbengine.cli import main
from cbengine.cli.plan import table


def test_the_plan_of_a_real_model_is_the_one_it_starts_with(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64}
    assert main(["plan", str(smollm2), *[f"--set={name}={value}" for name, value in settings.items()]]) == 0
    printed = capsys.readouterr().out.splitlines()

    async def run() -> None:
        async with AsyncEngine.from_pretrained(str(smollm2), **settings) as engine:
            assert printed == table(engine.memory_plan)
            assert await engine.plan() == engine.memory_plan

    asyncio.run(run())
    assert any("64 blocks of 16 tokens" in line for line in printed) and printed[0].startswith("weights")


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path)]) == 1
    assert "cbengine:" in capsys.readouterr().err
