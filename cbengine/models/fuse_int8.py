"""`EngineConfig.quantization = "int8"`: the CPU kernels' forward with small integers in its linear layers.

The result is not that of the model, so unlike with `fuse.py` there is no falling back: a model that cannot be run this way is
refused. That we know every part of it is checked first, by computing the same in plain torch with its own weights.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from cbengine.attention import AttentionBackend, LayerKV
from cbengine.attention.cpu import CpuBackend
from cbengine.errors import UnsupportedFeatureError
from cbengine.execution.inputs import StepInputs
from cbengine.kernels.decoder import Linear
from cbengine.kernels.library import Library, get_library
from cbengine.kernels.native import NativeDecoder
from cbengine.kernels.reference import PlainLinear
from cbengine.kernels.team import take_over_threads
from cbengine.models.base import ModelSpec
from cbengine.models.fuse import _COMPUTE, _TOLERANCE, Forward, FusedTorch, _probe
from cbengine.models.fuse_recognise import NotRecognised, recognise
from cbengine.models.fuse_weights import hollow, settle

_INT8_TOLERANCE = 0.25
"""Largest norm of the logits' difference, as a share of their norm. Real models are at 0.01 to 0.05; more is no rounding."""


class FusedInt8:
    """One call into the kernels for each step. Made by `fuse_int8`."""

    capturable = False

    def __init__(self, library: Library, model: PreTrainedModel, spec: ModelSpec) -> None:
        self._name = spec.name
        self._sources: list[torch.Tensor] = []
        self._lost = False
        decoder = recognise(model, spec)
        self._decoder = NativeDecoder(library, decoder, lambda linear, _: self._note(linear), int8=True)

    def _note(self, linear: Linear) -> None:
        self._sources += linear.sources

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        if threading.current_thread().name == _COMPUTE:
            take_over_threads()
        return self._decoder.forward(inputs)

    def bind(self, layers: Sequence[LayerKV], page_size: int) -> None:
        self._decoder.bind([(layer.key, layer.value) for layer in layers], page_size)

    def give_up(self, model: PreTrainedModel) -> None:
        """Drop the weights that were packed. There is no way back: the packed ones are not the same."""
        for source in self._sources:
            if isinstance(source, nn.Parameter):
                hollow(source)
                self._lost = True
        settle(model)

    def release(self) -> bool:
        return not self._lost

    def undo(self) -> None:
        if self._lost:
            raise UnsupportedFeatureError(
                f'{self._name}: its weights were dropped when they were quantised (quantization="int8"); load the model again'
            )


def refuse_int8(model: PreTrainedModel, spec: ModelSpec, attention: AttentionBackend) -> None:
    """Before anything is loaded into a cache: whether model, device and backend are such as int8 is made for.

    Raises:
        UnsupportedFeatureError: they are not; the message says which, and what to do.
    """
    asked = f'{spec.name}: quantization="int8"'
    if model.device.type != "cpu":
        raise UnsupportedFeatureError(
            f'{asked} is for CPUs, and the model is on {model.device}; pass device="cpu", or leave quantization out'
        )
    wrong = sorted({str(p.dtype) for p in model.parameters() if p.dtype != torch.float32})
    if wrong or spec.kv_dtype != torch.float32:
        raise UnsupportedFeatureError(
            f"{asked} starts from float32 weights, and the model has {', '.join(wrong) or spec.kv_dtype}; leave dtype out"
        )
    if not isinstance(attention, CpuBackend):
        raise UnsupportedFeatureError(
            f'{asked} needs the attention backend "cpu", not {attention.name!r}; leave attention_backend out, and see the log '
            "if the CPU kernels could not be compiled"
        )


def fuse_int8(
    model: PreTrainedModel,
    spec: ModelSpec,
    backends: Sequence[AttentionBackend],
    layers: Sequence[LayerKV],
    page_size: int,
    original: Forward,
    *,
    owned: bool,
) -> FusedInt8:
    """`model` with small integers in its linear layers. Engine thread, at bind time. Arguments as for `fuse`.

    Raises:
        UnsupportedFeatureError: the model has a part that the kernels do not know, or that does not bear quantisation. It is
            left as it was.
    """
    library = get_library()
    assert library is not None, "refuse_int8 comes first"
    with torch.inference_mode():
        probe = _probe(spec, layers, page_size)
        expected = original(probe)
        try:
            exact = FusedTorch(model, spec, backends, PlainLinear)
            exact.bind(layers, page_size)
            error = float((exact.forward(probe) - expected).abs().max() / expected.abs().max())
            if error > _TOLERANCE:
                raise NotRecognised(f"{type(model).__name__}, whose logits are {error:.1e} off what was taken for it")
            fused = FusedInt8(library, model, spec)
        except (NotRecognised, ValueError) as reason:
            raise UnsupportedFeatureError(
                f'{spec.name}: quantization="int8" is for models that the CPU kernels run as a whole (Llama, Mistral, Qwen 2 '
                "and 3, Gemma 2 and 3, Phi 3, OLMo and what has their code), with finite weights. Not this one: "
                f"{reason}. Leave quantization out"
            ) from reason
        if not expected.isfinite().all() or not expected.any():
            raise UnsupportedFeatureError(
                f'{spec.name}: quantization="int8" is tried on a short prompt first, and there the logits of the model itself '
                "are not all finite, or all zero; its weights are broken, or were never loaded"
            )
        fused.bind(layers, page_size)
        share = float((fused.forward(probe) - expected).norm() / expected.norm())
        if not share <= _INT8_TOLERANCE:
            raise UnsupportedFeatureError(
                f'{spec.name} does not bear quantization="int8": its logits change by {share:.0%}; leave it out'
            )
        if owned:
            fused.give_up(model)
        return fused
