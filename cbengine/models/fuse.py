"""Makes a model fast without changing what it computes. What follows is the CPU's way; a GPU's is `fuse_gpu.py`.

A model whose every part we know (`fuse_recognise.py`) is not run by transformers any more, but by `cbengine.kernels`: its
weights packed, in half of float32's size where that is exact, and a whole step in one call. In other models the linear
layers are replaced one by one. Either is tried against transformers' own forward before it is used: where the two differ,
or anything is not as expected, the model runs as transformers computes it. Nothing here raises because of a model.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from cbengine.attention import AttentionBackend, LayerKV
from cbengine.attention.cpu import CpuBackend
from cbengine.cache.geometry import RESERVED_CHUNKS, group_of_layers
from cbengine.execution.inputs import SamplingInputs, StepInputs
from cbengine.kernels.library import Library, get_library
from cbengine.kernels.native import NativeDecoder
from cbengine.kernels.reference import PlainLinear, TorchDecoder, TorchLinear
from cbengine.kernels.team import take_over_threads
from cbengine.models.base import ModelSpec
from cbengine.models.fuse_linear import PackedLinears
from cbengine.models.fuse_recognise import NotRecognised, recognise
from cbengine.models.fuse_weights import GivenUp, settle

_log = logging.getLogger(__name__)

_COMPUTE = "cbengine-compute"
"""Name of the thread that a threaded device computes in, and that belongs to nobody else."""
_PROBE_TOKENS = 12
_TOLERANCE = 1e-4
"""Largest difference of two logits, as a share of the largest logit, that rounding explains."""
_HALF_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""In half precision: of the logits' Euclidean norm, since single ones differ by chance."""

Forward = Callable[[StepInputs], torch.Tensor]


class Fused(Protocol):
    """What a model is run by instead. Made by `fuse`."""

    capturable: bool
    """Of a step's inputs it looks at device tensors and sizes alone, so that a graph may capture it."""

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """As `ModelRunner.forward`."""
        ...

    def bind(self, layers: Sequence[LayerKV], page_size: int) -> None:
        """Use another cache from now on."""
        ...

    def release(self) -> bool:
        """Undo what was changed in the model. False if the model cannot run without this any more; then it is kept."""
        ...

    def undo(self) -> None:
        """Undo everything, and give the model its weights back. This cannot be used any more."""
        ...


class FusedNative:
    """One call into the kernels for each step."""

    capturable = False

    def __init__(self, library: Library, model: PreTrainedModel, spec: ModelSpec, owned: bool) -> None:
        decoder = recognise(model, spec)
        self._weights = GivenUp()
        self._decoder = NativeDecoder(library, decoder, self._weights.give_up if owned else lambda *_: None)
        if owned:
            settle(model)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        if threading.current_thread().name == _COMPUTE:
            take_over_threads()
        return self._decoder.forward(inputs)

    def bind(self, layers: Sequence[LayerKV], page_size: int) -> None:
        self._decoder.bind([(layer.key, layer.value) for layer in layers], page_size)

    def release(self) -> bool:
        return not self._weights.given_up

    def undo(self) -> None:
        self._weights.restore()


class FusedTorch:
    """The same in torch's operations, where there are no kernels."""

    capturable = False

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        backends: Sequence[AttentionBackend],
        kind: type[TorchLinear] | type[PlainLinear] = TorchLinear,
    ) -> None:
        decoder = recognise(model, spec)
        self._attentions = [layer.attention for layer in decoder.layers]
        self._decoder = TorchDecoder(decoder, kind)
        self._backends = backends

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        for group, backend in enumerate(self._backends):
            backend.begin(inputs.of_group(group), self._page_size)
        return self._decoder.forward(inputs, self._attend)

    def _attend(self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        a, layer = self._attentions[index], self._layers[index]
        backend = self._backends[a.group]
        backend.write(layer, key, value)
        return backend.attend(layer, query, scale=a.scale, window=a.window, softcap=a.softcap, sinks=a.sinks)

    def bind(self, layers: Sequence[LayerKV], page_size: int) -> None:
        self._layers, self._page_size = layers, page_size

    def release(self) -> bool:
        return True

    def undo(self) -> None:
        pass


class FusedLinears:
    """transformers' own forward, over linear layers that are replaced."""

    capturable = False

    def __init__(self, library: Library, model: PreTrainedModel, original: Forward, owned: bool) -> None:
        self._original = original
        self._linears = PackedLinears(library, model, owned=owned)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        return self._original(inputs)

    def bind(self, layers: Sequence[LayerKV], page_size: int) -> None:
        pass

    def release(self) -> bool:
        return self._linears.release()

    def undo(self) -> None:
        self._linears.undo()


def fuse(
    model: PreTrainedModel,
    spec: ModelSpec,
    backends: Sequence[AttentionBackend],
    layers: Sequence[LayerKV],
    page_size: int,
    original: Forward,
    *,
    owned: bool,
) -> Fused | None:
    """Something faster than `original` for `model`, or None: then it stays as it is. Engine thread, at bind time.

    Args:
        backends: one for each attention type, as the runner uses them.
        layers: the pages of each layer. The first blocks after the reserved ones are written to.
        original: the model's own forward over the same pages.
        owned: the model is nobody else's, so its weights may be dropped once they are packed.
    """
    if _on_gpu(model):
        return _fuse_for_gpu(model, spec, backends, layers, page_size, original, owned)
    plain = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())
    if spec.kv_dtype != torch.float32 or not plain:
        return None
    library = get_library() if isinstance(backends[0], CpuBackend) else None
    with torch.inference_mode():
        probe = _probe(spec, layers, page_size)
        expected = original(probe)
        try:
            whole = FusedTorch(model, spec, backends) if library is None else FusedNative(library, model, spec, owned)
        except NotRecognised as unknown:
            _log.info("%s: its forward stays transformers' own; what we know does not cover %s", spec.name, unknown)
        else:
            whole.bind(layers, page_size)
            if _agrees(whole, [probe], [expected], spec):
                return whole
        if library is None:
            return None
        parts = FusedLinears(library, model, original, owned)
        return parts if _agrees(parts, [probe], [expected], spec) else None


def _on_gpu(model: PreTrainedModel) -> bool:
    """Whether our Triton kernels can run the model."""
    return model.device.type == "cuda" and importlib.util.find_spec("triton") is not None


def _fuse_for_gpu(
    model: PreTrainedModel,
    spec: ModelSpec,
    backends: Sequence[AttentionBackend],
    layers: Sequence[LayerKV],
    page_size: int,
    original: Forward,
    owned: bool,
) -> Fused | None:
    """`fuse` on a GPU."""
    from cbengine.models.fuse_gpu import FusedGpu  # triton is not everywhere
    from cbengine.models.fuse_modules import FusedModules

    if any(p.dtype != spec.kv_dtype for p in model.parameters()):
        return None
    with torch.inference_mode():
        prompt = _probe(spec, layers, page_size)
        probes = [_moved(probe, model.device) for probe in (prompt, _next_token(prompt))]
        expected = [original(probe) for probe in probes]
        try:
            whole = FusedGpu(model, spec, backends, owned=owned)
        except NotRecognised as unknown:
            _log.info("%s: its forward stays transformers' own; what we know does not cover %s", spec.name, unknown)
        else:
            whole.bind(layers, page_size)
            if _agrees(whole, probes, expected, spec):
                return whole
        parts = FusedModules(model, original, owned=owned)
        return parts if _agrees(parts, probes, expected, spec) else None


def _agrees(fused: Fused, probes: list[StepInputs], expected: list[torch.Tensor], spec: ModelSpec) -> bool:
    """Whether the logits are the same but for rounding; if not, everything is undone."""
    found = [fused.forward(probe).float() for probe in probes]
    error = max(_difference(*pair, spec.kv_dtype) for pair in zip(found, (e.float() for e in expected), strict=True))
    if error <= _tolerance(spec.kv_dtype):
        _log.debug("%s: %s differs by %.1e of the logits", spec.name, type(fused).__name__, error)
        return True
    _log.warning(
        "%s: faster code for it was not used, since its logits differ by %.1e of the largest", spec.name, error
    )
    fused.undo()
    return False


def _difference(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    if dtype in _HALF_TOLERANCE:
        return float((found - expected).norm() / expected.norm())
    return float((found - expected).abs().max() / expected.abs().max())


def _tolerance(dtype: torch.dtype) -> float:
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return 5e-3  # somebody allows TF32, whose rounding differs with the shape of a product
    return _HALF_TOLERANCE.get(dtype, _TOLERANCE)


def _probe(spec: ModelSpec, layers: Sequence[LayerKV], page_size: int) -> StepInputs:
    """A short random prompt, all of whose tokens are sampled, in the first blocks of a cache that nobody uses yet."""
    groups = group_of_layers(spec.layers)
    free = min(layer.key.shape[0] - RESERVED_CHUNKS for layer in layers)
    count = min(_PROBE_TOKENS, free * page_size, spec.max_model_len)
    pages = -(-count // page_size)
    ids = torch.randint(spec.vocab_size, (count,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    starts, context = np.array([0, count], np.int32), np.array([count], np.int32)
    table = np.arange(RESERVED_CHUNKS, RESERVED_CHUNKS + pages, dtype=np.int32)[None]
    index = torch.arange(count, dtype=torch.int32)
    floats, none = torch.zeros(count), torch.zeros(0, dtype=torch.int32)
    several = max(groups) + 1 if max(groups) else 0
    return StepInputs(
        num_tokens=count,
        num_seqs=1,
        num_decodes=0,
        num_samples=count,
        max_query_len=count,
        max_context_len=count,
        token_ids=ids,
        positions=index,
        query_starts=torch.from_numpy(starts),
        context_lens=torch.from_numpy(context),
        block_tables=torch.from_numpy(table),
        rows=torch.zeros(1, dtype=torch.int32),
        sample_index=index,
        host_query_starts=starts,
        host_context_lens=context,
        host_block_tables=table,
        sampling=SamplingInputs(floats, index, floats, floats, floats, none, none, False, False, False, False),
        group_tables=(torch.from_numpy(table),) * several,
        host_group_tables=(table,) * several,
    )


def _next_token(prompt: StepInputs) -> StepInputs:
    """The step after `_probe`'s, where its last token is decoded again: attention has another kernel for that."""
    last = slice(prompt.num_tokens - 1, prompt.num_tokens)
    starts = np.array([0, 1], np.int32)
    return replace(
        prompt,
        num_tokens=1,
        num_decodes=1,
        num_samples=1,
        max_query_len=1,
        token_ids=prompt.token_ids[last],
        positions=prompt.positions[last],
        query_starts=torch.from_numpy(starts),
        sample_index=prompt.sample_index[:1],
        host_query_starts=starts,
    )


def _moved(inputs: StepInputs, device: torch.device) -> StepInputs:
    """The same step with its tensors on `device`."""
    names = [name for name in StepInputs.__slots__ if isinstance(getattr(inputs, name), torch.Tensor)]
    moved = {name: getattr(inputs, name).to(device) for name in names}
    sampling = {
        name: value.to(device)
        for name in SamplingInputs.__slots__
        if isinstance(value := getattr(inputs.sampling, name), torch.Tensor)
    }
    tables = tuple(table.to(device) for table in inputs.group_tables)
    return replace(inputs, **moved, sampling=replace(inputs.sampling, **sampling), group_tables=tables)
