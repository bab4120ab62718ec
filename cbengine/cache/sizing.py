"""How large everything will be, from the config and the free memory, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import psutil

from cbengine.cache.geometry import RESERVED_CHUNKS, CacheGeometry
from cbengine.cache.manager import longest_alone
from cbengine.cache.workspace import Step, workspace
from cbengine.config import MIN_BATCH_TOKENS, EngineConfig
from cbengine.devices.base import MemoryInfo
from cbengine.models.base import ModelSpec

_CPU_SHARE = 0.25
_CPU_LIMIT = 2 << 30
_ACCELERATOR_SHARE = 0.9
_CPU_BATCH_TOKENS, _CPU_REQUESTS = 512, 256
_BATCH_TOKENS, _REQUESTS = 8192, 1024
_CPU_PAGE_SIZE, _PAGE_SIZE = 32, 256
# Of `execution.buckets`: how many tokens of prompts are captured.
_Q_INTERVAL, _CAPTURED_INTERVALS = 64, 8
_GRAPH_LAYER_BYTES = 256 << 10
"""What a captured layer takes by itself: 8B models are reported to need 9 MiB for a graph of 32 layers."""
_SLOT_WORDS = 14  # of each request: lengths, rows and sampling parameters
_ROW_BYTES = 130  # of each row, beside its tokens and its block table


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of everything the engine allocates beside the weights, and the sizes that they follow from."""

    num_blocks: int
    page_size: int
    max_batch_tokens: int
    max_requests: int
    max_model_len: int
    capacity_tokens: int
    """Longest sequence that fits into the cache when it has it to itself."""
    weight_bytes: int
    """Of the model, which is there before the rest is sized."""
    kv_bytes: int
    activation_bytes: int
    """Peak of one forward: hidden states, the MLP's and attention's, tables of cosines."""
    logits_bytes: int
    """Logits of the sampled rows."""
    sampling_bytes: int
    """The sampler's working copies, where all rows have to be searched for their top_k and top_p."""
    mask_bytes: int
    """Attention masks that are kept, once a sequence as long as can be has been computed in pieces."""
    slot_bytes: int
    """Inputs and outputs of the steps in flight, host and device."""
    bookkeeping_bytes: int
    """Tokens, states and block tables of all rows, on the host."""
    offload_bytes: int
    """The CPU pool for swapping."""
    on_request_bytes: int
    """What penalties, biases, grammars and logprobs take, if every request of a batch asks for them; prompt logprobs not
    counted. Allocated only as they are asked for, so it is not part of the total."""
    graph_bytes: int = 0
    """CUDA graphs: themselves, what the largest of them computes with, and the logits that they leave behind."""

    @property
    def total_bytes(self) -> int:
        """What it takes beside the weights and the CPU pool."""
        step = self.activation_bytes + self.logits_bytes + self.sampling_bytes + self.mask_bytes
        return self.kv_bytes + step + self.slot_bytes + self.bookkeeping_bytes + self.graph_bytes

    def parts(self) -> dict[str, int]:
        """Bytes by what they are for, in words."""
        return {
            "weights": self.weight_bytes,
            "keys and values": self.kv_bytes,
            "activations": self.activation_bytes,
            "logits": self.logits_bytes,
            "sampling": self.sampling_bytes,
            "masks": self.mask_bytes,
            "graphs": self.graph_bytes,
            "slots": self.slot_bytes,
            "bookkeeping": self.bookkeeping_bytes,
            "CPU pool": self.offload_bytes,
        }

    def __str__(self) -> str:
        pool = f", CPU pool {_mib(self.offload_bytes)}" if self.offload_bytes else ""
        return (
            f"cache of {self.num_blocks} blocks x {self.page_size} tokens = {self.num_blocks * self.page_size:,} tokens "
            f"({_mib(self.kv_bytes)}), steps of up to {self.max_batch_tokens} tokens of {self.max_requests} requests "
            f"(activations {_mib(self.activation_bytes)}, logits {_mib(self.logits_bytes)}, sampling "
            f"{_mib(self.sampling_bytes)}, masks {_mib(self.mask_bytes)}, slots {_mib(self.slot_bytes, 1)}, bookkeeping "
            f"{_mib(self.bookkeeping_bytes, 1)}{pool}), sequences of up to {self.max_model_len:,} tokens"
        )


def _mib(size: int, digits: int = 0) -> str:
    return f"{size / 2**20:.{digits}f} MiB"


def plan_memory(
    spec: ModelSpec, config: EngineConfig, memory: MemoryInfo, *, on_cpu: bool, page_size_multiple: int = 1
) -> MemoryPlan:
    """Sizes for `spec` under `config` on a device with `memory` free (the weights already taken off).

    `page_size_multiple`: what the attention backend needs. The default page size adapts to it.

    Raises:
        ValueError: an explicit setting does not fit, or what is free is too little to serve at all.
    """
    page_size = _page_size(config, page_size_multiple, on_cpu)
    geometry = CacheGeometry.of(spec, page_size)
    max_len = min(config.max_model_len or spec.max_model_len, spec.max_model_len)
    if config.max_model_len is not None and config.max_model_len > spec.max_model_len:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than the {spec.max_model_len} tokens that {spec.name} was made for"
        )
    if max_len < 2:
        raise ValueError(
            f"max_model_len={max_len} leaves no room for an answer: a sequence is a prompt of at least one token and at least "
            "one new one; it must be at least 2"
        )
    share = config.max_memory_percent
    budget = int((share if share is not None else _CPU_SHARE if on_cpu else _ACCELERATOR_SHARE) * memory.free)
    if on_cpu and share is None:
        budget = min(budget, _CPU_LIMIT)
    tokens = config.max_batch_tokens or (_CPU_BATCH_TOKENS if on_cpu else _BATCH_TOKENS)
    while True:
        plan = _workspace(spec, config, geometry, tokens, max_len, on_cpu)
        taken = plan.total_bytes if on_cpu else plan.total_bytes - plan.bookkeeping_bytes
        spare = budget - taken - RESERVED_CHUNKS * geometry.chunk_bytes
        # An inferred token budget shrinks before the cache does without: it only makes prompts take more steps.
        if config.max_batch_tokens is not None or tokens <= MIN_BATCH_TOKENS or spare >= budget // 2:
            break
        tokens = max(MIN_BATCH_TOKENS, tokens // 2)
    plan = _fit_step(spec, config, geometry, _fit_cache(plan, config, geometry, spare, budget), on_cpu)
    if plan.kv_bytes > memory.free:  # an inferred cache is never that large
        raise ValueError(
            f"num_blocks={config.num_blocks} takes {plan.kv_bytes / 2**30:.1f} GiB with page_size={plan.page_size}, and "
            f"{memory.free / 2**30:.1f} GiB are free; lower num_blocks, or leave it out to have it found out"
        )
    available = psutil.virtual_memory().available
    if config.cpu_offload_space is not None and plan.offload_bytes > available:
        raise ValueError(
            f"cpu_offload_space={config.cpu_offload_space:g} (GiB) is more than the {available / 2**30:.1f} GiB of memory that "
            "are free; lower it, or None for a share of what is free"
        )
    return plan


def _page_size(config: EngineConfig, multiple: int, on_cpu: bool) -> int:
    if config.page_size is None:
        return -(-(_CPU_PAGE_SIZE if on_cpu else _PAGE_SIZE) // multiple) * multiple
    if config.page_size % multiple:
        raise ValueError(
            f"page_size={config.page_size} does not suit the attention backend, which needs a multiple of {multiple}: set "
            f"page_size to {multiple}, leave it out, or choose another attention_backend"
        )
    return config.page_size


def _workspace(
    spec: ModelSpec, config: EngineConfig, geometry: CacheGeometry, tokens: int, max_len: int, on_cpu: bool
) -> MemoryPlan:
    requests = min(config.max_requests_per_batch or (_CPU_REQUESTS if on_cpu else _REQUESTS), tokens)
    step = workspace(spec, config, geometry, Step(tokens, requests, max_len, on_cpu))
    slots = 2 if config.use_async_batching is not False else 1
    return MemoryPlan(
        num_blocks=0,
        page_size=geometry.page_size,
        max_batch_tokens=tokens,
        max_requests=requests,
        max_model_len=max_len,
        capacity_tokens=0,
        weight_bytes=spec.weight_bytes,
        kv_bytes=0,
        activation_bytes=step.activations,
        logits_bytes=step.logits,
        sampling_bytes=step.sampling,
        mask_bytes=step.masks,
        slot_bytes=_slot_bytes(geometry, slots, tokens, requests, geometry.blocks_for(max_len)),
        bookkeeping_bytes=_bookkeeping_bytes(geometry, requests, max_len, max_len, geometry.blocks_for(max_len), 0),
        offload_bytes=swap_chunks(config, geometry) * geometry.chunk_bytes,
        on_request_bytes=step.on_request,
        graph_bytes=0 if on_cpu else _graph_bytes(spec, config, geometry, Step(tokens, requests, max_len, on_cpu)),
    )


def _graph_bytes(spec: ModelSpec, config: EngineConfig, geometry: CacheGeometry, step: Step) -> int:
    """Graphs share the memory that they compute with, so the largest counts: a full batch of decodes, or as many tokens of
    prompts as are captured."""
    if config.use_cuda_graph in (False, (False, False)):
        return 0
    mixed = min(step.tokens, _CAPTURED_INTERVALS * (config.q_padding_interval_size or _Q_INTERVAL))
    largest = workspace(spec, config, geometry, replace(step, tokens=max(mixed, step.samples)))
    return largest.activations + largest.logits + config.max_cached_graphs * len(spec.layers) * _GRAPH_LAYER_BYTES


def _slot_bytes(geometry: CacheGeometry, slots: int, tokens: int, requests: int, width: int) -> int:
    words = 2 * tokens + _SLOT_WORDS * requests + len(geometry.groups) * requests * width
    return slots * 2 * 4 * words + 4 * 2 * requests


def _bookkeeping_bytes(
    geometry: CacheGeometry, requests: int, max_len: int, longest: int, width: int, chunks: int
) -> int:
    """On the host, once there has been a sequence of `longest` tokens: the columns of tokens grow by doubling."""
    rows, columns = 2 * requests + 1, min(max_len, 1024)
    while columns < longest:
        columns = min(2 * columns, max_len)
    tables = len(geometry.groups) * rows * (4 * width + 16)
    blocks = 8 * chunks * sum(geometry.blocks_per_chunk)
    return rows * (4 * columns + _ROW_BYTES) + tables + blocks


def _fit_cache(plan: MemoryPlan, config: EngineConfig, geometry: CacheGeometry, spare: int, budget: int) -> MemoryPlan:
    largest_use = plan.max_requests * geometry.blocks_for(plan.max_model_len)
    blocks = config.num_blocks
    if blocks is None:
        blocks = min(spare // geometry.chunk_bytes * geometry.chunk_bytes // geometry.block_bytes, largest_use)
        if blocks < 1:
            raise ValueError(
                f"no room for a cache: {budget / 2**20:.0f} MiB may be used, the workspace takes "
                f"{plan.total_bytes / 2**20:.0f} MiB and one block of {plan.page_size} tokens "
                f"{geometry.chunk_bytes / 2**20:.1f} MiB; raise max_memory_percent, or lower page_size, max_batch_tokens or "
                "max_requests_per_batch, or set num_blocks"
            )
    chunks = geometry.chunks_for(blocks)
    capacity = longest_alone(geometry, chunks, plan.max_model_len)
    longest = min(plan.max_model_len, capacity)
    width = max(1, geometry.blocks_for(longest))
    slots = 2 if config.use_async_batching is not False else 1
    return replace(
        plan,
        num_blocks=blocks,
        capacity_tokens=capacity,
        kv_bytes=(chunks + RESERVED_CHUNKS) * geometry.chunk_bytes,
        slot_bytes=_slot_bytes(geometry, slots, plan.max_batch_tokens, plan.max_requests, width),
        bookkeeping_bytes=_bookkeeping_bytes(
            geometry, plan.max_requests, plan.max_model_len, longest, width, chunks + RESERVED_CHUNKS
        ),
    )


def _fit_step(
    spec: ModelSpec, config: EngineConfig, geometry: CacheGeometry, plan: MemoryPlan, on_cpu: bool
) -> MemoryPlan:
    """A sequence is no longer than what the cache holds, and then what depends on its length is no larger."""
    longest = min(plan.max_model_len, plan.capacity_tokens)
    step = workspace(spec, config, geometry, Step(plan.max_batch_tokens, plan.max_requests, longest, on_cpu))
    return replace(plan, activation_bytes=step.activations, mask_bytes=step.masks, on_request_bytes=step.on_request)


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
