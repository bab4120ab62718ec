"""Settings of the engine: every one checked, with a message that says what is allowed."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from cbengine import AsyncEngine, EngineConfig
from cbengine.testing import FakeModel
from tests.api.fakes import fake_engine
from tests.support.loops import aio

BAD: list[tuple[str, Any, type[Exception]]] = [
    ("page_size", 3, ValueError),
    ("page_size", 0, ValueError),
    ("page_size", -4, ValueError),
    ("page_size", 4.0, TypeError),
    ("page_size", True, TypeError),
    ("page_size", "16", TypeError),
    ("num_blocks", 0, ValueError),
    ("num_blocks", "many", TypeError),
    ("max_model_len", 0, ValueError),
    ("max_batch_tokens", 0, ValueError),
    ("max_batch_tokens", 1.5, TypeError),
    ("prefill_chunk", 0, ValueError),
    ("prefill_chunk", 0.5, TypeError),
    ("max_requests_per_batch", 0, ValueError),
    ("num_threads", 0, ValueError),
    ("seed", -1, ValueError),
    ("seed", "0", TypeError),
    ("max_queue_size", -1, ValueError),
    ("max_queue_size", None, TypeError),
    ("max_queued_tokens", -1, ValueError),
    ("max_memory_percent", 0, ValueError),
    ("max_memory_percent", 1.01, ValueError),
    ("max_memory_percent", float("nan"), ValueError),
    ("max_memory_percent", "half", ValueError),
    ("safety_margin", -0.1, ValueError),
    ("safety_margin", 1.1, ValueError),
    ("safety_margin", float("inf"), ValueError),
    ("safety_margin", True, ValueError),
    ("scheduler_type", "lifo", ValueError),
    ("scheduler_type", None, ValueError),
    ("use_async_batching", "yes", TypeError),
    ("return_logprobs", 1, TypeError),
    ("per_request_processors", None, TypeError),
    ("dtype", 32, TypeError),
    ("device", 0, TypeError),
    ("backpressure", "drop", ValueError),
    ("quantization", "int4", ValueError),
    ("stream_buffer", 0, ValueError),
    ("stream_buffer", 10**400, ValueError),
    ("allow_block_sharing", None, TypeError),
    ("admission", "hopeful", ValueError),
    ("preemption", "kill", ValueError),
    ("cpu_offload_space", -1, ValueError),
    ("cpu_offload_space", "all", ValueError),
    ("cpu_offload_space_safety_threshold", 0, ValueError),
    ("attention_backend", True, TypeError),
    ("auto_switch_to_flash", 1, TypeError),
    ("default_compile_level", 4, ValueError),
    ("varlen_compile_config", 1, TypeError),
    ("decode_compile_config", "default", TypeError),
    ("use_cuda_graph", "auto", TypeError),
    ("use_cuda_graph", (True,), TypeError),
    ("q_padding_interval_size", -1, ValueError),
    ("kv_padding_interval_size", None, TypeError),
    ("max_cached_graphs", 0, ValueError),
    ("max_blocks_per_request", -1, ValueError),
    ("max_prompt_length", 0, ValueError),
    ("max_generated_length", "long", TypeError),
]


@pytest.mark.parametrize(("name", "value", "error"), BAD, ids=lambda v: str(v))
def test_a_bad_value_is_refused_by_name(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name) as caught:
        EngineConfig(**{name: value})
    assert repr(value) in str(caught.value) and "must be" in str(caught.value)
    with pytest.raises(error, match=name):
        AsyncEngine(FakeModel(), **{name: value})


def test_every_setting_is_checked() -> None:
    assert {name for name, _, _ in BAD} == {field.name for field in fields(EngineConfig)}


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 4},
        {"safety_margin": 0},
        {"safety_margin": 1.0},
        {"max_memory_percent": 1},
        {"seed": 0},
        {"max_queue_size": 0},
        {"scheduler_type": "prefill_first"},
        {"use_async_batching": False},
    ],
)
def test_limits_themselves_are_allowed(settings: dict[str, Any]) -> None:
    config = EngineConfig(**settings)
    assert {name: getattr(config, name) for name in settings} == settings


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        TypeError, match=r"unknown setting max_batch_size; known are .*attention_backend, .*max_batch_tokens"
    ):
        AsyncEngine(FakeModel(), max_batch_size=8)
    with pytest.raises(TypeError, match="max_batch_size"):
        AsyncEngine.from_pretrained("whatever", max_batch_size=8)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"config": {"page_size": 8}}, "config must be an EngineConfig or None, got dict"),
        ({"load_options": "main"}, "load_options must be a mapping or None, got str"),
        (
            {"tokenizer": "some/name"},
            "tokenizer must be a transformers tokenizer, .* got str 'some/name'; load one with",
        ),
        ({"tokenizer": 5}, "tokenizer must be .* got int 5"),
        ({"tokenizer": Path("folder")}, "tokenizer must be .* got PosixPath"),
    ],
)
def test_arguments_of_another_kind_are_refused_at_once(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        AsyncEngine(FakeModel(), **arguments)


def test_overrides_go_before_the_config_and_leave_it_alone() -> None:
    config = EngineConfig(page_size=8, seed=3)
    engine = AsyncEngine(FakeModel(), config=config, seed=4)
    assert (engine.config.page_size, engine.config.seed) == (8, 4)
    assert config.seed == 3
    with pytest.raises(FrozenInstanceError):
        setattr(config, "seed", 5)  # noqa: B010 - a plain assignment is an error to the type checker too


def test_the_default_margin_goes_by_the_scheduler() -> None:
    assert EngineConfig().margin == 0.15
    assert EngineConfig(scheduler_type="prefill_first").margin == 0.0
    assert EngineConfig(safety_margin=0.5).margin == 0.5


@aio(trio=True)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 5000}, r"max_model_len=5000 is more than the 4096 tokens"),
        ({"num_blocks": None, "max_memory_percent": 1e-9}, r"no room for a cache: .* raise max_memory_percent"),
    ],
)
async def test_what_only_start_can_know_is_said_by_start(settings: dict[str, Any], message: str) -> None:
    engine = fake_engine(**settings)
    with pytest.raises(ValueError, match=message):
        await engine.start()
    assert engine.health().status == "dead"
    await engine.aclose()


@aio(trio=True)
@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
@pytest.mark.parametrize("asynchronous", [True, False])
async def test_every_mode_gives_the_same_tokens(scheduler: str, asynchronous: bool) -> None:
    model = FakeModel()
    prompts = ["x" * n for n in (1, 3, 40, 77)]
    settings = {"scheduler_type": scheduler, "use_async_batching": asynchronous, "num_threads": 1}
    async with fake_engine(model, **settings) as engine:
        completions = await engine.generate_batch(prompts, max_new_tokens=9, ignore_eos=True)
    assert [c.token_ids for c in completions] == [
        tuple(model.reference(model.tokenizer.encode(text), 9, ignore_eos=True)) for text in prompts
    ]


@aio(trio=True)
async def test_a_seeded_engine_repeats_itself() -> None:
    async def sample(seed: int | None) -> list[tuple[int, ...]]:
        model = FakeModel(generation_defaults={"temperature": 1.0})
        async with fake_engine(model, seed=seed) as engine:
            completions = await engine.generate_batch(["hello"] * 4, max_new_tokens=12, ignore_eos=True)
        return [c.token_ids for c in completions]

    first, again, other = await sample(11), await sample(11), await sample(12)
    assert first == again != other
    assert len(set(first)) > 1  # requests of one engine differ from each other
    assert await sample(None) != await sample(None)
