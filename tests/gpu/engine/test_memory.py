"""What the plan says is what is taken, and all of it comes back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import networks
from tests.gpu.card import Card
from tests.gpu.serving import answers, ask, built, engine_for, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_the_plan_is_met(card: Card, graphs: bool, record_property: Any) -> None:
    """The largest step there can be: as many prompt tokens as fit, and then every row sampling with top_k and top_p."""
    model: Any = networks.network("llama", card)
    card.settle()
    tokens, requests = card.size(8192, 64), card.size(1024, 8)
    settings: dict[str, Any] = {"num_blocks": None, "max_batch_tokens": tokens, "max_requests_per_batch": requests}
    settings |= {"max_memory_percent": card.size(0.2, 0.01), **(card.graphs if graphs else {"use_cuda_graph": False})}
    before = card.allocated()
    card.peak(reset=True)

    async def main() -> tuple[int, int]:
        async with engine_for(model, card, **settings) as engine:
            prompts = networks.prompts(card, [tokens // requests] * requests)
            await ask(engine, prompts, 3, temperature=0.8, top_k=50, top_p=0.9, seed=1)
            await ask(engine, networks.prompts(card, [card.size(2000, 100)] * card.size(4, 1)), 2)
            plan, inside = engine.memory_plan, built(engine)
            host = plan.bookkeeping_bytes + inside.loop.parts.pipeline.nbytes // 2  # slots count both sides
            return plan.total_bytes - host, plan.kv_bytes

    planned, kv = run(main())
    real = card.peak() - before
    print(
        f"planned {planned / 2**20:,.0f} MiB, of it {kv / 2**20:,.0f} for the cache; at most {real / 2**20:,.0f} were taken"
    )
    record_property("planned", planned)
    record_property("taken", real)
    if not card.dry:
        assert abs(real - planned) <= 0.05 * planned


def test_five_engines_leave_nothing(card: Card) -> None:
    model: Any = networks.network("gemma3", card)
    prompts = networks.prompts(card, [3, 70, 21])
    answers(model, card, prompts, 3, **card.graphs)  # compiles, and fills caches that stay
    card.settle()
    before = card.allocated()
    for round_ in range(5):
        answers(model, card, prompts, 3, cpu_offload_space=0.1, **card.graphs)
        card.settle()
        left = card.allocated() - before
        assert left <= 1 << 20, f"{left / 2**20:.1f} MiB are left after engine {round_ + 1}"


def test_an_engine_that_is_started_again(card: Card) -> None:
    """Stopped and started, with the model kept: the same answers, and no more memory."""
    model: Any = networks.network("llama", card)
    prompts = networks.prompts(card, [9, 33])

    async def main() -> None:
        engine = engine_for(model, card, **card.graphs)
        taken, found = [], []
        for _ in range(3):
            await engine.start()
            found.append(await ask(engine, prompts, 4))
            await engine.stop()
            card.settle()
            taken.append(card.allocated())
        await engine.aclose()
        assert found[0] == found[1] == found[2]
        assert taken[2] <= taken[0] + (1 << 20), taken

    run(main())
