"""How much of a prompt is computed in a step that others decode in."""

from __future__ import annotations

import pytest

from cbengine.models.base import LayerSpec
from cbengine.testing import FakeModel
from tests.scheduling.desk import Desk


def test_alone_a_prompt_takes_the_whole_step() -> None:
    desk = Desk(tokens=64, blocks=128, prefill=8)
    desk.add(100, 2)
    assert [chunk.count for chunk in desk.plan().chunks] == [64]


def test_beside_decoders_it_is_cut_finer() -> None:
    desk = Desk(tokens=64, blocks=128, prefill=8)
    desk.add(3, 40)
    desk.plan()
    desk.add(60, 2)
    steps = [desk.plan() for _ in range(3)]
    assert [(plan.num_decodes, [chunk.count for chunk in plan.chunks]) for plan in steps] == [(1, [8])] * 3


def test_all_chunks_of_a_step_share_it() -> None:
    desk = Desk(tokens=64, blocks=128, prefill=8)
    desk.add(3, 40)
    desk.plan()
    desk.add(5, 2)
    desk.add(60, 2)
    desk.add(60, 2)
    plan = desk.plan()
    assert [chunk.count for chunk in plan.chunks] == [5, 3]  # and the last one is not let in


def test_a_small_rest_is_not_left_for_a_step_of_its_own() -> None:
    desk = Desk(tokens=64, blocks=128, prefill=8)
    desk.add(3, 40)
    desk.plan()
    desk.add(10, 2)
    plan = desk.plan()
    assert [chunk.count for chunk in plan.chunks] == [10]


def test_many_decoders_put_up_with_more() -> None:
    desk = Desk(tokens=64, blocks=128, requests=8, prefill=4, prefill_per_decode=3)
    for _ in range(5):
        desk.add(3, 40)
    desk.plan()
    desk.add(60, 2)
    plan = desk.plan()
    assert (plan.num_decodes, [chunk.count for chunk in plan.chunks]) == (5, [15])


def test_few_decoders_make_way() -> None:
    """Two are held up, so the newcomer takes what it needs; the more of them, the less."""
    desk = Desk(tokens=64, blocks=256, requests=8, prefill=2, prefill_over_square=160)
    for decodes in (2, 4):
        while desk.scheduler.num_running < decodes:
            desk.add(3, 60)
            desk.plan()
        long = desk.add(100, 2)
        plan = desk.plan()
        assert [chunk.count for chunk in plan.chunks] == [160 // decodes**2]
        desk.end(long)


def test_few_decoders_are_not_held_up_for_ever() -> None:
    """However few they are, a step has a bound; and a long prompt, which takes many steps, a lower one."""
    settings = {"prefill": 2, "prefill_over_square": 160, "prefill_to_few": 20, "long_prompt": 50, "prefill_of_long": 8}
    for tokens, expected in ((50, [20, 20, 10]), (51, [8] * 6 + [3])):
        desk = Desk(tokens=64, blocks=256, requests=8, **settings)
        desk.add(3, 60)
        desk.plan()
        desk.add(tokens, 2)
        assert [desk.plan().chunks[0].count for _ in expected] == expected


def test_a_short_prompt_gets_what_a_long_one_leaves() -> None:
    desk = Desk(tokens=64, blocks=256, prefill=2, prefill_over_square=160, long_prompt=50, prefill_of_long=8)
    desk.add(3, 60)
    desk.plan()
    desk.add(60, 2)
    desk.add(30, 2)
    assert [chunk.count for chunk in desk.plan().chunks] == [8, 30]


def test_the_more_wait_the_more_is_let_in() -> None:
    counts = []
    for waiting in (1, 3, 9):
        desk = Desk(tokens=64, blocks=256, requests=16, prefill=2, prefill_per_waiting=4, prefill_when_waiting=5.0)
        for _ in range(4):
            desk.add(3, 60)
        desk.plan()
        for _ in range(waiting):
            desk.add(40, 2)
        counts.append(sum(chunk.count for chunk in desk.plan().chunks))
    assert counts == [4, 12, 20]


def test_a_long_context_counts() -> None:
    """The further into a prompt, the fewer of its tokens: each attends to all before it."""
    desk = Desk(tokens=64, blocks=128, prefill=32, attention_reach=16)
    desk.add(3, 100)
    desk.plan()
    desk.add(200, 2)
    counts = [desk.plan().chunks[0].count for _ in range(6)]
    assert counts == sorted(counts, reverse=True) and counts[0] == 32 and counts[-1] <= 10


def test_every_prompt_ends_however_small_the_share() -> None:
    desk = Desk(tokens=16, blocks=128, prefill=1, attention_reach=1)
    requests = [desk.add(30, 20), desk.add(30, 2), desk.add(30, 2)]
    desk.run()
    assert all(request.status.ended for request in requests)


@pytest.mark.parametrize("window", [None, 8])
def test_the_reach_of_a_model(window: int | None) -> None:
    """SmolLM2-135M: 3,072 tokens, where each of its layers attends to all."""
    from dataclasses import replace

    layer = LayerSpec("full_attention", 3, 64)
    other = LayerSpec("sliding_attention" if window else "full_attention", 3, 64, window)
    spec = replace(FakeModel().spec, layers=(layer, other), num_heads=9, hidden_size=576, intermediate_size=1536)
    assert spec.attention_reach == (3072 if window is None else 6144)


@pytest.mark.parametrize(("hidden", "layers", "expected"), [(576, 30, 256), (1024, 24, 76), (2048, 16, 48)])
def test_a_large_model_is_given_smaller_pieces(hidden: int, layers: int, expected: int) -> None:
    """On a CPU a step beside few decoders has a bound in time: so many tokens of SmolLM2-135M, of twice that, of a 1B Llama."""
    from dataclasses import replace

    from cbengine.execution.build import prefill_to_few

    layer = LayerSpec("full_attention", 4, 64)
    sizes = {
        "num_heads": hidden // 64,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden if hidden > 600 else 1536,
    }
    spec = replace(FakeModel().spec, layers=(layer,) * layers, **sizes)
    assert prefill_to_few(spec) == expected
