"""Siblings with one prompt: the second begins with the first's pages, and copies the one where they part."""

from __future__ import annotations

import pytest

from cbengine.testing import SimDevice
from tests.cache.churn import MEMORY, make_driver
from tests.support.driver import Driven, Driver

LAYERS = {"full": (None, None), "sliding": (9, 9), "hybrid": (None, 9, 9)}


def family(driver: Driver, prompt: list[int], size: int, new: int) -> list[Driven]:
    """Siblings of which all but the first sample with a seed, handed in together."""
    first = driver.submit(prompt, max_new_tokens=new, ignore_eos=True)
    siblings = [first]
    for seed in range(1, size):
        sampled = {"temperature": 2.0, "seed": seed}
        alone = make_driver(SimDevice(0, memory=MEMORY), *_windows(driver), num_blocks=60)
        expected = alone.submit(prompt, expected=(), max_new_tokens=new, ignore_eos=True, **sampled)
        alone.run()
        sibling = driver.submit(prompt, expected=expected.buffer.ids, max_new_tokens=new, ignore_eos=True, **sampled)
        sibling.request.parent = first.request
        siblings.append(sibling)
    return siblings


def _windows(driver: Driver) -> tuple[int | None, ...]:
    return tuple(layer.window for layer in driver.model.spec.layers)


@pytest.mark.parametrize("length", [1, 8, 9, 10, 11, 12, 25])
@pytest.mark.parametrize("layers", LAYERS)
def test_siblings_compute_the_prompt_once(layers: str, length: int) -> None:
    for seed in range(5):
        device = SimDevice(seed, memory=MEMORY)
        driver = make_driver(device, *LAYERS[layers], num_blocks=60, allow_block_sharing=seed % 2 == 0)
        prompt = [2 + i % 13 for i in range(length)]
        siblings = family(driver, prompt, 4, 12)
        while driver.turn():
            driver.parts.cache.check()
        driver.check()
        assert len({tuple(s.buffer.ids) for s in siblings}) > 1
        # The prompt once, and its last token for each of the others: that is what they sample from.
        assert driver.parts.committer.prompt_tokens == length + 3
        assert all(s.request.cached_tokens == length - 1 for s in siblings[1:])


@pytest.mark.parametrize(
    "settings", [{}, {"cpu_offload_space": 0.001, "preemption": "swap"}], ids=["recompute", "swap"]
)
@pytest.mark.parametrize("layers", LAYERS)
def test_siblings_survive_preemption_and_the_end_of_the_first(layers: str, settings: dict[str, object]) -> None:
    preempted = 0
    for seed in range(0, 24, 2):
        blocks = {"full": 9, "sliding": 7, "hybrid": 9}[layers]
        driver = make_driver(SimDevice(seed, memory=MEMORY), *LAYERS[layers], num_blocks=blocks, **settings)
        siblings = family(driver, [2 + i % 13 for i in range(10)], 4, 14)
        for turn in range(2000):
            if turn == seed:
                driver.cancel(siblings[0])
            if not driver.turn() and not driver.busy:
                break
            driver.parts.cache.check()
        driver.check()
        preempted += driver.parts.lifecycle.preemptions
    assert preempted > 0 or layers == "sliding"
