"""Random workloads for a driven loop: requests whose answers are known, cancels, pauses and stops at any step."""

from __future__ import annotations

import functools
import random
from typing import NamedTuple

from cbengine.config import EngineConfig
from cbengine.devices.base import Device, MemoryInfo
from cbengine.devices.inline import InlineDevice
from cbengine.sampling import SamplingParams
from cbengine.testing import FakeModel
from tests.support.driver import Driver

VOCAB = 31
EOS = (0, 1)  # one token in fifteen ends an answer, so that many steps are launched past an end
MEMORY = MemoryInfo(total=1 << 30, free=1 << 30)


def make_model() -> FakeModel:
    return FakeModel(vocab_size=VOCAB, eos_token_ids=EOS, max_model_len=64)


def make_config(seed: int, **overrides: object) -> EngineConfig:
    """A tight configuration; the seed decides how tight. Every request of `asks` fits the smallest cache."""
    settings: dict[str, object] = {
        "page_size": 4,
        "num_blocks": (5, 8, 30)[seed % 3],
        "max_batch_tokens": (6, 16)[seed // 3 % 2],
        "max_requests_per_batch": 3,
        "safety_margin": (None, 0.0)[seed // 6 % 2],
        "use_async_batching": seed % 7 != 0,
        "allow_block_sharing": seed // 2 % 2 == 0,
        "cpu_offload_space": (0.0, 1e-5)[seed // 4 % 2],  # 10 kB are 80 pages
        "preemption": "swap",
    }
    return EngineConfig().merged({**settings, **overrides})


class Ask(NamedTuple):
    """A request and its answer."""

    prompt: tuple[int, ...]
    params: SamplingParams
    answer: tuple[int, ...]


@functools.cache
def asks() -> tuple[Ask, ...]:
    """60 requests of up to 20 tokens, every other one sampled. A greedy answer is the model's own reference; a sampled one
    is that of a quiet run: alone, one step at a time, with room for everything."""
    rng, model = random.Random(1), make_model()
    return tuple(_ask(rng, model, i) for i in range(60))


def _ask(rng: random.Random, model: FakeModel, index: int) -> Ask:
    prompt = tuple(rng.randrange(2, VOCAB) for _ in range(rng.choice((1, 2, 3, 4, 5, 7, 8, 10))))
    new = rng.randint(1, 10)
    params = SamplingParams(
        max_new_tokens=new,
        min_new_tokens=rng.choice((0, 0, 0, min(3, new))),
        stop_token_ids=rng.choice(((), (), (5, 6, 7))),
        ignore_eos=rng.random() < 0.2,
        temperature=0.0,
    )
    if index % 2:
        answer = model.reference(
            prompt,
            new,
            min_new_tokens=params.min_new_tokens,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
        )
        return Ask(prompt, params, tuple(answer))
    sampled = params.merged(
        temperature=rng.choice((0.5, 1.0, 2.0)),
        top_k=rng.choice((0, 0, 5)),
        top_p=rng.choice((1.0, 1.0, 0.9)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        seed=index,
    )
    return Ask(prompt, sampled, _alone(prompt, sampled))


def _alone(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    config = EngineConfig(page_size=64, num_blocks=1, use_async_batching=False)
    driver = Driver(make_model(), InlineDevice(), config)
    driven = driver.submit(prompt, params, expected=())
    driver.run()
    return tuple(driven.buffer.ids)


class Workload:
    """Drives one loop through what the seed says. `turn` is one cycle of the loop with what happened before it."""

    def __init__(self, driver: Driver, seed: int, *, requests: int = 6, stop: str = "") -> None:
        self.driver = driver
        self._rng = random.Random(seed)
        self._asks = self._rng.sample(asks(), 5)  # few, so that some are asked twice
        self._todo = requests
        self._cancels = self._rng.choice((0.1, 0.2, 0.4))
        self._stop = stop
        self._stop_at = self._rng.randint(0, 14) if stop else -1
        self._turns = 0
        self._paused = 0

    @property
    def done(self) -> bool:
        """Nothing is left to do, or the loop has stopped."""
        return self.driver.loop.stopped or not (self._todo or self.driver.busy or self._paused or self._stop_at >= 0)

    def turn(self) -> None:
        rng, driver = self._rng, self.driver
        for _ in range(rng.choice((0, 0, 1, 2, 5))):
            if self._todo:
                self._todo -= 1
                ask = rng.choice(self._asks)
                driver.submit(ask.prompt, ask.params, ask.answer, unread=rng.choice((0, 0, 0, 1, 3)))
        alive = [d for d in driver.driven if d.alive and not d.cancelled]
        if alive and rng.random() < self._cancels:
            driver.cancel(rng.choice(alive))
        for driven in driver.driven:
            if driven.request.stream_buffer and rng.random() < 0.3:
                driven.buffer.advance(len(driven.buffer.ids))
        self._pause_or_resume()
        if self._turns == self._stop_at:
            driver.stop(drain=self._stop == "drain")
            self._stop_at = -1
            self._paused = 0
        driver.turn()
        self._turns += 1
        assert self._turns < 1000, "the workload does not come to an end"

    def _pause_or_resume(self) -> None:
        if self._paused:
            if self._rng.random() < 0.5:
                self._paused -= 1
                self.driver.resume()
        elif self._rng.random() < 0.05:
            for _ in range(self._rng.choice((1, 2))):  # pauses are counted
                self._paused += 1
                self.driver.pause()

    def run(self) -> None:
        """To the end, and then check that all is right."""
        while not self.done:
            self.turn()
        self.driver.run()
        self.driver.check()


def make_driver(device: Device, seed: int, **overrides: object) -> Driver:
    return Driver(make_model(), device, make_config(seed, **overrides))
