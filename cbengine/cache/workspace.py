"""What one step takes beside the cache, from a model's spec: the tensors that are live at its peak, counted one by one.

Three kinds of forward are told apart by what the config asks for. `native`: a decoder that runs as one call into the CPU
kernels has its buffers for good, and nothing else. `model`: transformers' own forward makes and drops tensors as it goes. On
an accelerator the same is assumed, and that a sampler does not cut its batch. What a model whose parts are not recognised, or
a machine without the kernels, takes beside `native` is not foreseen.

Every count is held against what is really allocated by `tests/cache/test_workspace.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from cbengine.cache.geometry import CacheGeometry
from cbengine.config import EngineConfig
from cbengine.models.base import ModelSpec

_WORD = 4
_MASK_ROWS = 256
_SMALLEST_BUFFERS = 64
_ROTARY_ROWS = 512
_CHUNK = 1 << 20  # elements that a sampler on a CPU looks at together
_DIGITS, _BLOCK = 1 << 11, 512
_GATHERED = 2 << 20  # keys and values that decoding sequences gather together
# Of a kernel's thread, at the widest vectors: partial products and an unpacked panel; a block of keys and its queries.
_PRODUCT_SCRATCH = (126 + 352) * 32 * _WORD
_KEYS, _QUERY_ROWS, _TILE_ROWS, _PANEL = 128, 84, 14, 32


@dataclass(frozen=True, slots=True)
class Step:
    """The largest step: what the sizes of its tensors follow from."""

    tokens: int
    samples: int
    longest: int
    """Tokens of the longest sequence."""
    on_cpu: bool


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes. See the fields of the same names in `MemoryPlan`."""

    activations: int
    logits: int
    sampling: int
    masks: int
    on_request: int


def workspace(spec: ModelSpec, config: EngineConfig, geometry: CacheGeometry, step: Step) -> Workspace:
    """What `step` takes at its peak."""
    logits = step.samples * spec.vocab_size * (_WORD if step.on_cpu else spec.kv_dtype.itemsize)
    sampling = _sampling_bytes(spec.vocab_size, step)
    masks = 0
    if is_native(spec, config, step.on_cpu):
        activations = native_bytes(spec, geometry, step, config.num_threads or os.cpu_count() or 1)
        # Tables of cosines are made while neither logits nor anything of the sampler is there.
        activations += max(0, _rotary_building(spec, step.longest) - logits - sampling)
    else:
        building = 0
        if step.on_cpu and config.attention_backend != "eager":
            masks, building = _mask_bytes(spec, geometry, step.longest)
        activations = _model_bytes(spec, config, step, building)
    return Workspace(activations, logits, sampling, masks, _on_request_bytes(spec.vocab_size, step))


def is_native(spec: ModelSpec, config: EngineConfig, on_cpu: bool) -> bool:
    """Whether the forward is expected to be one call into the CPU kernels."""
    return on_cpu and spec.kv_dtype == torch.float32 and config.attention_backend in (None, "cpu")


# --- forwards ------------------------------------------------------------------------------------------------------


def _widths(spec: ModelSpec) -> tuple[int, int, int]:
    """Elements of a token's queries, of its keys, and of a head."""
    layer = spec.layers[0]
    return spec.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim, layer.head_dim


def native_bytes(spec: ModelSpec, geometry: CacheGeometry, step: Step, threads: int) -> int:
    """The buffers of `NativeDecoder`, for a power of two of tokens; its tables; its threads' memory."""
    queries, keys, dim = _widths(spec)
    rows = max(_SMALLEST_BUFFERS, 1 << (max(step.tokens, step.samples) - 1).bit_length())
    # Hidden states, normed ones, products and sampled rows; queries, keys and values; attended; gated.
    buffers = rows * (4 * spec.hidden_size + 2 * queries + 2 * keys + spec.intermediate_size) * _WORD
    tables = spec.num_rotaries * _rotary_rows(spec, step.longest) * dim * _WORD
    places = len(geometry.groups) * 2 * step.tokens * 8
    return buffers + tables + places + threads * _scratch_bytes(spec)


def _scratch_bytes(spec: ModelSpec) -> int:
    """Of one thread: the largest that a kernel asks for."""
    _, _, dim = _widths(spec)
    group = spec.num_heads // spec.layers[0].num_kv_heads
    rows = max(spec.num_heads, max(1, _QUERY_ROWS // group) * group)
    padded = -(-dim // _PANEL) * _PANEL
    copies = _KEYS * padded if dim % _PANEL else 0
    attention = rows * (dim + padded + 2) + _KEYS * dim + _TILE_ROWS * _KEYS + copies
    return max(_PRODUCT_SCRATCH, attention * _WORD)


def _rotary_rows(spec: ModelSpec, longest: int) -> int:
    return max(longest, min(max(_ROTARY_ROWS, 1 << (longest - 1).bit_length()), spec.max_model_len))


def _rotary_building(spec: ModelSpec, longest: int) -> int:
    """Angles, cosines and sines of all positions while a table is made of them, and the tables that will be replaced."""
    table = _rotary_rows(spec, longest) * _widths(spec)[2] * _WORD
    return 7 * table // 2 + spec.num_rotaries * table // 2


def _model_bytes(spec: ModelSpec, config: EngineConfig, step: Step, building: int) -> int:
    """The forward of transformers: its feed-forward part, its attention, or the making of a mask (`building`), whichever has
    most alive."""
    queries, keys, dim = _widths(spec)
    itemsize, hidden = spec.kv_dtype.itemsize, spec.hidden_size
    # Embeddings, the layer's input, the sum so far and its norm; gate, factor and product.
    mlp = step.tokens * (4 * hidden + 3 * spec.intermediate_size) * itemsize
    # While queries are rotated: four of them, keys, values.
    rotating = step.tokens * (3 * hidden + 4 * queries + 2 * keys) * itemsize
    projected = step.tokens * (3 * hidden + queries + 2 * keys) * itemsize
    one = 2 * step.longest * keys * itemsize + 24 * step.longest
    chunk = one + _score_bytes(spec, config, step)
    decodes = min(step.samples * one, _GATHERED) if step.on_cpu else 0
    attending = projected + step.tokens * queries * itemsize + max(chunk, decodes)
    rotary = 2 * dim * spec.num_rotaries * step.tokens * itemsize
    indices = 8 * step.tokens * _WORD
    return max(mlp, rotating, attending, projected + building) + rotary + indices


def _score_bytes(spec: ModelSpec, config: EngineConfig, step: Step) -> int:
    """Scores that are written out, where no kernel of torch's computes them: those, their weights and a copy."""
    eager = config.attention_backend == "eager"
    if not eager and spec.softcap is None and not spec.has_sinks:
        return 0
    rows = step.tokens if eager else min(step.tokens, _MASK_ROWS)
    return 3 * spec.num_heads * rows * step.longest * _WORD if step.on_cpu or eager else 0


def _mask_bytes(spec: ModelSpec, geometry: CacheGeometry, longest: int) -> tuple[int, int]:
    """Of the patterns that SDPA on a CPU keeps, one for each window and one for full attention that has grown with the
    longest sequence; and what the largest takes beside that while it is made (distances, and which of them are hidden)."""
    columns = [
        (group.window or max(1024, 1 << (longest - 1).bit_length())) + _MASK_ROWS
        for group in geometry.groups
        if group.window is None or group.window < longest
    ]
    return _MASK_ROWS * sum(columns) * spec.kv_dtype.itemsize, 9 * _MASK_ROWS * max(columns, default=0)


# --- sampling ------------------------------------------------------------------------------------------------------


def _sampling_bytes(vocab: int, step: Step) -> int:
    """Where every row has its own top_k and top_p and all of them have to be searched.

    On a CPU by chunks: scores, their ratios, weights (twice: the last chunk's are alive), and a search's keys, digits and
    what is left of the weights. Elsewhere all rows at once.
    """
    padded = -(-vocab // _BLOCK) * _BLOCK
    rows = min(step.samples, max(1, _CHUNK // max(vocab, _DIGITS))) if step.on_cpu else step.samples
    element = 49 if not step.on_cpu else 61 if step.samples > rows else 53
    return rows * (element * padded + 24 * _DIGITS)


def _on_request_bytes(vocab: int, step: Step) -> int:
    """Penalty tables with a place for each request and each that is leaving, a copy of the logits that is edited, and two
    that log probabilities are made of."""
    places = max(8, 1 << (2 * step.samples - 1).bit_length())
    # What was said is kept in a row for each place, and the rows become longer too whenever there have to be more places.
    columns = min(step.longest * places // 8, step.longest + 4096)
    tables = places * (5 * vocab + _WORD * columns)
    return tables + 3 * step.samples * vocab * _WORD
