"""The prefix cache and the pinned pool for swapping."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import networks
from tests.gpu.card import Card
from tests.gpu.serving import answers, ask, built, engine_for, run, until_idle

pytestmark = pytest.mark.gpu


def test_prefix_cache(card: Card) -> None:
    """The second to ask finds the pages of the first, and the answers are those of an engine that shares nothing."""
    model: Any = networks.network("qwen3", card)
    shared, *tails = networks.prompts(card, [card.size(600, 70), 5, 40, 1, 17], seed=2)
    prompts, new = [shared + tail for tail in tails], card.size(20, 4)

    async def main() -> list[list[int]]:
        async with engine_for(model, card) as engine:
            first = await ask(engine, prompts[:1], new)
            rest = await ask(engine, prompts[1:], new)
            stats = await until_idle(engine)
            page = engine.config.page_size
            assert page is not None
            assert stats.cached_tokens >= 3 * (len(shared) // page * page) and stats.pages_cached > 0
            return first + rest

    found = run(main())
    expected, stats = answers(model, card, prompts, new, allow_block_sharing=False)
    assert stats.cached_tokens == 0
    networks.assert_same(model, prompts, found, expected)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_preemption(card: Card, name: str, preemption: str) -> None:
    """A cache that holds few of those who run: some give way, by way of the pool in pinned memory, and nobody notices."""
    model: Any = networks.network(name, card)
    page, new = 16, card.size(120, 30)
    prompts = networks.prompts(card, card.size([40, 100, 7, 64, 33, 90], [10, 17, 5]), seed=4)
    settings: dict[str, Any] = {"attention_backend": "triton" if not card.dry else "sdpa", "page_size": page}
    expected, _ = answers(model, card, prompts, new, num_blocks=card.size(200, 60), **settings)
    # Room for the longest alone and little more; more than 64 MiB on the host, where memory is pinned in another way.
    tight = {"num_blocks": card.size(24, 6), "cpu_offload_space": 0.1, "preemption": preemption}

    async def main() -> list[list[int]]:
        async with engine_for(model, card, **settings, **tight) as engine:
            pool = built(engine).host_pool
            assert (pool is not None) == (preemption == "swap")
            if pool is not None and not card.dry:
                assert pool.nbytes > 64 << 20 and pool.is_pinned()
            found = await ask(engine, prompts, new)
            stats = await until_idle(engine)
            assert stats.preemptions > 0 and (stats.swaps > 0) == (preemption == "swap"), stats
            return found

    networks.assert_same(model, prompts, run(main()), expected)
