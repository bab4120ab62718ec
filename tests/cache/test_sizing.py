"""The memory plan: what it says is what is allocated, and what does not fit is refused with the reason."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cbengine.cache.geometry import RESERVED_CHUNKS
from cbengine.cache.sizing import MemoryPlan, plan_memory
from cbengine.config import MIN_BATCH_TOKENS, EngineConfig
from cbengine.devices.base import Device, MemoryInfo
from cbengine.devices.inline import InlineDevice
from cbengine.models.base import LayerSpec, ModelSpec
from cbengine.testing import FakeModel, SimDevice
from tests.support.driver import Driver

GIB = 2**30
SMOLLM2 = ModelSpec(  # SmolLM2-135M
    name="smollm2",
    layers=(LayerSpec("full_attention", 3, 64),) * 30,
    num_heads=9,
    hidden_size=576,
    intermediate_size=1536,
    vocab_size=49152,
    max_model_len=8192,
    kv_dtype=torch.float32,
    weight_bytes=538_000_000,
    eos_token_ids=(2,),
    generation_defaults={},
)


def _plan(free: float, *, on_cpu: bool = True, spec: ModelSpec = SMOLLM2, **settings: object) -> MemoryPlan:
    memory = MemoryInfo(total=int(2 * free), free=int(free))
    return plan_memory(spec, EngineConfig(page_size=256).merged(settings), memory, on_cpu=on_cpu)


# --- what the plan says is what there is ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_async_batching": False},
        {"page_size": 4, "max_batch_tokens": 16, "max_requests_per_batch": 4},
        {"page_size": 4, "num_blocks": 20, "max_batch_tokens": 64, "max_requests_per_batch": 32},
        {"max_model_len": 1000, "page_size": 16, "num_blocks": 500},
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["sim", "inline"])
def test_cache_and_slots_are_as_large_as_planned(device: str, settings: dict[str, object]) -> None:
    """C3, within 5 %."""
    made: Device = SimDevice(0, memory=MemoryInfo(GIB, GIB // 4)) if device == "sim" else InlineDevice()
    driver = Driver(FakeModel(), made, EngineConfig().merged(settings))
    plan = driver.built.memory
    assert driver.built.pool.nbytes == pytest.approx(plan.kv_bytes, rel=0.05)
    assert driver.parts.pipeline.nbytes == pytest.approx(plan.slot_bytes, rel=0.05)
    assert driver.parts.cache.capacity == plan.num_blocks


def test_the_cache_is_the_plan_in_blocks() -> None:
    plan = _plan(8 * GIB)
    block = 30 * 2 * 256 * 3 * 64 * 4
    assert plan.kv_bytes == (plan.num_blocks + RESERVED_CHUNKS) * block
    assert plan.capacity_tokens == 256 * plan.num_blocks
    assert plan.total_bytes >= plan.kv_bytes + plan.activation_bytes + plan.logits_bytes + plan.slot_bytes


def test_the_plan_can_be_read() -> None:
    text = str(_plan(8 * GIB, num_blocks=100))
    assert text.startswith(
        "cache of 100 blocks x 256 tokens = 25,600 tokens (1148 MiB), steps of up to 512 tokens of 256"
    )
    assert "sequences of up to 8,192 tokens" in text


# --- how much it takes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("free", [1, 2, 4, 8, 64, 1024])
def test_a_cpu_keeps_to_a_quarter_of_what_is_free_and_to_two_gib(free: float) -> None:
    plan = _plan(free * GIB)
    assert plan.total_bytes <= min(free * GIB / 4, 2 * GIB)
    assert plan.num_blocks >= 1


def test_a_cpu_may_be_given_more() -> None:
    assert 2 * GIB < _plan(16 * GIB, max_memory_percent=0.5).total_bytes <= 8 * GIB


def test_an_accelerator_is_used_to_nine_tenths() -> None:
    plan = _plan(16 * GIB, on_cpu=False)
    assert 0.85 * 16 * GIB < plan.total_bytes - plan.bookkeeping_bytes <= 0.9 * 16 * GIB


def test_no_more_than_can_be_used() -> None:
    """Every request of a batch at its longest, and no block more."""
    plan = _plan(64 * GIB, max_requests_per_batch=2, max_model_len=1000)
    assert plan.num_blocks == 2 * 4


def test_a_small_machine_gets_smaller_steps_before_it_gets_no_cache() -> None:
    assert _plan(64 * GIB).max_batch_tokens == 512
    assert _plan(1 * GIB).max_batch_tokens == MIN_BATCH_TOKENS
    assert _plan(1 * GIB, max_batch_tokens=300).max_batch_tokens == 300


def test_a_batch_has_no_more_requests_than_tokens() -> None:
    assert _plan(8 * GIB, max_batch_tokens=5).max_requests == 5
    assert _plan(8 * GIB, max_requests_per_batch=100, max_batch_tokens=50).max_requests == 50


# --- what is refused -----------------------------------------------------------------------------------------------


def test_too_little_memory() -> None:
    with pytest.raises(ValueError, match="no room for a cache: 51 MiB may be used, the workspace takes") as raised:
        _plan(0.2 * GIB)
    for setting in ("max_memory_percent", "page_size", "max_batch_tokens", "max_requests_per_batch", "num_blocks"):
        assert setting in str(raised.value)


def test_a_context_that_the_model_was_not_made_for() -> None:
    with pytest.raises(ValueError, match="max_model_len=8193 is more than the 8192 tokens that smollm2 was made for"):
        _plan(8 * GIB, max_model_len=8193)
    assert _plan(8 * GIB, max_model_len=8192).max_model_len == 8192
    assert _plan(8 * GIB).max_model_len == 8192


def test_a_context_without_room_for_an_answer() -> None:
    with pytest.raises(ValueError, match=r"max_model_len=1 leaves no room for an answer.*at least 2"):
        _plan(8 * GIB, max_model_len=1)
    assert _plan(8 * GIB, max_model_len=2).max_model_len == 2


def test_a_pool_that_the_machine_has_no_memory_for() -> None:
    with pytest.raises(
        ValueError, match=r"cpu_offload_space=1e\+09 \(GiB\) is more than the .* GiB of memory that are free"
    ):
        _plan(8 * GIB, cpu_offload_space=1e9)
    assert _plan(8 * GIB, cpu_offload_space=0.1).offload_bytes <= 0.1 * GIB
    assert _plan(8 * GIB, cpu_offload_space=1e9, preemption="recompute").offload_bytes == 0


def test_more_blocks_than_there_is_memory_for() -> None:
    with pytest.raises(ValueError, match=r"num_blocks=1000 takes 11.0 GiB .* 8.0 GiB are free"):
        _plan(8 * GIB, num_blocks=1000)
    assert _plan(8 * GIB, num_blocks=500).num_blocks == 500  # more than its share, but there is room


def test_a_smaller_page_makes_room() -> None:
    tight = dataclasses.replace(SMOLLM2, max_model_len=1024)
    with pytest.raises(ValueError, match="no room"):
        _plan(0.7 * GIB, spec=tight, page_size=1024)
    assert _plan(0.7 * GIB, spec=tight, page_size=16).num_blocks > 0
