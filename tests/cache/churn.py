"""Workloads that are hard on a cache: shared prefixes, multi-turn chats, cancels, and far too little room."""

from __future__ import annotations

import random

from cbengine.config import EngineConfig
from cbengine.devices.base import Device, MemoryInfo
from cbengine.testing import FakeModel
from tests.support.driver import Driven, Driver

MEMORY = MemoryInfo(total=1 << 30, free=1 << 30)
EOS = (0, 1)


def make_driver(device: Device, *windows: int | None, **settings: object) -> Driver:
    """A loop over a model with these layers (default: two with full attention), pages of 4 tokens, by default 12 blocks."""
    model = FakeModel(vocab_size=31, eos_token_ids=EOS, max_model_len=512, windows=windows or (None, None))
    defaults: dict[str, object] = {
        "page_size": 4,
        "num_blocks": 12,
        "max_batch_tokens": 12,
        "max_requests_per_batch": 8,
        "safety_margin": 0.0,
    }
    return Driver(model, device, EngineConfig().merged({**defaults, **settings}))


def churn(driver: Driver, seed: int, *, chats: int = 5) -> None:
    """Chats of one to three turns with one of two system prompts, some cancelled, at random turns of the loop. To the end,
    with every answer checked."""
    rng = random.Random(seed)
    systems = [[2 + (7 * i + s) % 29 for i in range(8 + 3 * s)] for s in range(2)]
    todo = [(list(rng.choice(systems)), rng.randint(1, 3)) for _ in range(chats)]
    talking: list[tuple[Driven, list[int], int]] = []
    for _ in range(3000):
        while todo and rng.random() < 0.4:
            _ask(driver, rng, *todo.pop(), talking)
        for entry in talking[:]:
            driven, prompt, turns = entry
            if not driven.alive:
                talking.remove(entry)
                if turns > 1 and not driven.cancelled:
                    _ask(driver, rng, [*prompt, *driven.buffer.ids], turns - 1, talking)
            elif not driven.cancelled and rng.random() < 0.02:
                driver.cancel(driven)
        driver.turn()
        driver.parts.cache.check()
        if not (todo or talking or driver.busy):
            driver.run()
            driver.check()
            return
    raise AssertionError("the workload does not come to an end")


def _ask(
    driver: Driver, rng: random.Random, tokens: list[int], turns: int, talking: list[tuple[Driven, list[int], int]]
) -> None:
    prompt = [*tokens, *(rng.randrange(2, 31) for _ in range(rng.randint(1, 4)))]
    driven = driver.submit(prompt, max_new_tokens=rng.randint(1, 5), ignore_eos=rng.random() < 0.5)
    talking.append((driven, prompt, turns))
