"""How large everything will be, from the config and the free memory, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil

from cbengine.cache.geometry import RESERVED_CHUNKS, CacheGeometry
from cbengine.config import MIN_BATCH_TOKENS, EngineConfig
from cbengine.devices.base import MemoryInfo
from cbengine.models.base import ModelSpec

_CPU_SHARE = 0.25
_CPU_LIMIT = 2 << 30
_ACCELERATOR_SHARE = 0.9
_CPU_BATCH_TOKENS, _CPU_REQUESTS = 512, 256
_BATCH_TOKENS, _REQUESTS = 8192, 1024


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of everything the engine allocates beside the weights, and the sizes that they follow from."""

    num_blocks: int
    page_size: int
    max_batch_tokens: int
    max_requests: int
    max_model_len: int
    kv_bytes: int
    activation_bytes: int
    """Peak of one forward: hidden states and the MLP's, attention workspace included."""
    logits_bytes: int
    """Logits of the sampled rows in float32, with the sampler's working copies."""
    slot_bytes: int
    """Inputs and outputs of the steps in flight, host and device."""

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + self.activation_bytes + self.logits_bytes + self.slot_bytes

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.page_size

    def __str__(self) -> str:
        mib = 2**20
        return (
            f"cache of {self.num_blocks} blocks x {self.page_size} tokens = {self.capacity_tokens:,} tokens "
            f"({self.kv_bytes / mib:.0f} MiB), steps of up to {self.max_batch_tokens} tokens of {self.max_requests} requests "
            f"(activations {self.activation_bytes / mib:.0f} MiB, logits {self.logits_bytes / mib:.0f} MiB, "
            f"slots {self.slot_bytes / mib:.1f} MiB), sequences of up to {self.max_model_len:,} tokens"
        )


def plan_memory(spec: ModelSpec, config: EngineConfig, memory: MemoryInfo, *, on_cpu: bool) -> MemoryPlan:
    """Sizes for `spec` under `config` on a device with `memory` free (the weights already taken off).

    Raises:
        ValueError: an explicit setting does not fit, or what is free is too little to serve at all.
    """
    geometry = CacheGeometry.of(spec, config.page_size)
    max_len = min(config.max_model_len or spec.max_model_len, spec.max_model_len)
    if config.max_model_len is not None and config.max_model_len > spec.max_model_len:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than the {spec.max_model_len} tokens that {spec.name} was made for"
        )
    share = config.max_memory_percent
    budget = int((share if share is not None else _CPU_SHARE if on_cpu else _ACCELERATOR_SHARE) * memory.free)
    if on_cpu and share is None:
        budget = min(budget, _CPU_LIMIT)
    tokens = config.max_batch_tokens or (_CPU_BATCH_TOKENS if on_cpu else _BATCH_TOKENS)
    while True:
        plan = _workspace(spec, config, geometry, tokens, max_len, on_cpu)
        spare = budget - plan.total_bytes - RESERVED_CHUNKS * geometry.chunk_bytes
        # An inferred token budget shrinks before the cache does without: it only makes prompts take more steps.
        if config.max_batch_tokens is not None or tokens <= MIN_BATCH_TOKENS or spare >= budget // 2:
            break
        tokens = max(MIN_BATCH_TOKENS, tokens // 2)
    return _fit_cache(plan, config, geometry, spare, budget)


def _workspace(
    spec: ModelSpec, config: EngineConfig, geometry: CacheGeometry, tokens: int, max_len: int, on_cpu: bool
) -> MemoryPlan:
    requests = min(config.max_requests_per_batch or (_CPU_REQUESTS if on_cpu else _REQUESTS), tokens)
    itemsize = spec.kv_dtype.itemsize
    kv_width = sum(group.num_kv_heads * group.head_dim for group in geometry.groups)
    heads_width = spec.num_heads * max(group.head_dim for group in geometry.groups)
    per_token = 4 * spec.hidden_size + 3 * spec.intermediate_size + 2 * heads_width + 2 * kv_width
    # Gathered K and V of one layer for the longest sequence, and its attention scores for a chunk.
    gathered = 2 * max_len * kv_width * itemsize
    width = geometry.blocks_for(max_len)
    slots = 2 if config.use_async_batching is not False else 1
    slot_words = 2 * tokens + requests * (width + 13)
    return MemoryPlan(
        num_blocks=0,
        page_size=config.page_size,
        max_batch_tokens=tokens,
        max_requests=requests,
        max_model_len=max_len,
        kv_bytes=0,
        activation_bytes=per_token * tokens * itemsize + gathered,
        logits_bytes=3 * requests * spec.vocab_size * 4,
        slot_bytes=2 * slots * 4 * slot_words,
    )


def _fit_cache(plan: MemoryPlan, config: EngineConfig, geometry: CacheGeometry, spare: int, budget: int) -> MemoryPlan:
    largest_use = plan.max_requests * geometry.blocks_for(plan.max_model_len)
    blocks = config.num_blocks
    if blocks is None:
        blocks = min(spare // geometry.chunk_bytes * geometry.chunk_bytes // geometry.block_bytes, largest_use)
        if blocks < 1:
            raise ValueError(
                f"no room for a cache: {budget / 2**20:.0f} MiB may be used, the workspace takes "
                f"{plan.total_bytes / 2**20:.0f} MiB and one block of {config.page_size} tokens "
                f"{geometry.chunk_bytes / 2**20:.1f} MiB; raise max_memory_percent, or lower page_size, max_batch_tokens or "
                "max_requests_per_batch, or set num_blocks"
            )
    return replace(plan, num_blocks=blocks, kv_bytes=(geometry.chunks_for(blocks) + RESERVED_CHUNKS) * geometry.chunk_bytes)


def swap_chunks(config: EngineConfig, geometry: CacheGeometry) -> int:
    """Chunks of the CPU pool for swapping; 0 = none."""
    space = config.cpu_offload_space
    if config.preemption == "recompute" or space == 0:
        return 0
    if space is None:
        available = psutil.virtual_memory().available * config.cpu_offload_space_safety_threshold
    else:
        available = space * 2**30
    return int(available) // geometry.chunk_bytes
