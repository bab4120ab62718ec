"""Runs a transformers model, unchanged, over our paged cache.

transformers lets an attention function be registered by name. Ours, "cbengine", is registered at the first `bind`. It is
called by the attention modules of every model whose config names it, finds its layer's pages through an attribute of the
module, and the step's metadata through a thread-local that only `TransformersRunner.forward` sets. A call outside a step of
ours (somebody calls `model.generate`, perhaps in another thread at the same time) is ordinary attention.

Within a step there is no transformers cache object and no mask: one packed row of tokens with their positions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cbengine.attention import AttentionBackend, AttentionSettings, LayerKV, choose
from cbengine.attention.eager import attention_math
from cbengine.cache.geometry import group_of_layers
from cbengine.errors import UnsupportedFeatureError
from cbengine.execution.inputs import SamplingInputs, StepInputs
from cbengine.models.base import ModelSpec
from cbengine.models.compiled import HANDLE, CompiledForward, Options, attend, pad_tokens
from cbengine.models.fuse import Fused, fuse
from cbengine.models.fuse_int8 import fuse_int8, refuse_int8
from cbengine.models.spec import spec_from_config, text_config
from cbengine.models.structure import attention_modules, refuse_unknown_interface, weight_bytes

IMPLEMENTATION = "cbengine"
"""Our name in transformers' registry of attention functions."""
_LAYER = "_cbengine_layer"
_INTERNAL = "_attn_implementation_internal"

_bind_lock = threading.Lock()
"""Makes "is it served already? then mark it" one step."""
_running = threading.local()
"""`_running.step`: the step that this thread's model call belongs to."""


@dataclass(slots=True)
class _Layer:
    """Attribute of an attention module: which runner serves it, and its part of the cache."""

    runner: TransformersRunner
    index: int
    kv: LayerKV
    window: int | None
    attention: AttentionBackend

    def __deepcopy__(self, memo: dict[int, Any]) -> _Layer:
        return self  # a copy of the model is not served; it must not copy the cache


@dataclass(slots=True)
class _Step:
    """One call of `forward`."""

    runner: TransformersRunner
    num_tokens: int
    written: set[int]
    """Layers that have had their attention computed."""


@dataclass(frozen=True, slots=True)
class _Before:
    """What `release` puts back."""

    implementations: tuple[tuple[Any, str | None], ...]
    """Configs, and the attention implementation that each named."""
    training: tuple[nn.Module, ...]
    """Modules that were in training mode."""


class TransformersRunner:
    """Serves one transformers model. See `ModelRunner` for who calls what on which thread.

    On a CPU in float32 the model is run by faster code of ours where that is possible (`models/fuse.py`), unless another
    attention backend than "cpu" is asked for. `owned`: the model is nobody else's, so that its weights may be repacked.
    `quantization`: None or "int8", see `EngineConfig`.

    Between `bind` and `release` the model's config names our attention function and the model is in evaluation mode; it
    can still be called by others, with SDPA instead of the implementation it had.

    Raises (constructor):
        UnsupportedFeatureError: the model cannot be served; the message names what was found and what is supported.
    """

    spec: ModelSpec
    attention: AttentionBackend
    """Chosen here, so that its `page_size_multiple` is known before the cache is made."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str | None = None,
        attention: AttentionSettings | str | None = None,
        quantization: str | None = None,
        owned: bool = False,
    ) -> None:
        name = str(name or getattr(model.config, "_name_or_path", "") or type(model).__name__)
        self._model = model
        self.spec = spec_from_config(
            model.config,
            name=name,
            kv_dtype=model.dtype,
            weight_bytes=weight_bytes(model),
            generation_config=getattr(model, "generation_config", None),
        )
        refuse_unknown_interface(model, name)
        self._modules = attention_modules(model, self.spec)
        if any(getattr(module, "sinks", None) is not None for module in self._modules):
            self.spec = replace(self.spec, has_sinks=True)
        settings = attention if isinstance(attention, AttentionSettings) else AttentionSettings(attention)
        self.attention = choose(settings, model.device, self.spec)
        # A backend remembers the step's block tables, and each attention type has its own.
        self._group_of = group_of_layers(self.spec.layers)
        others = [type(self.attention).create(settings) for _ in range(max(self._group_of))]
        self._backends = [self.attention, *others]
        self._before: _Before | None = None
        # transformers takes a mask with four dimensions as it is. Given none, it would look for packed sequences among the
        # positions, and the host would wait for what it finds (I13). One without elements masks nothing.
        self._no_mask = torch.zeros(1, 1, 0, 0, device=model.device)
        self._page_size = 0
        self._owned = owned
        self._may_fuse = settings.name is None or self.attention.name not in ("sdpa", "eager")
        self._fused: Fused | None = None
        self._compile: tuple[Options | None, Options | None] | None = None
        self._compiled: CompiledForward | None = None
        self._int8 = quantization == "int8"
        if self._int8:
            refuse_int8(model, self.spec, self.attention)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._model.device

    @property
    def page_size_multiple(self) -> int:
        """The cache's page size has to be a multiple of this."""
        return self.attention.page_size_multiple

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model.

        One of our own that was served lacks the weights that were repacked; it gets them back here, unless it is being served.
        Quantised ones cannot be given back: `UnsupportedFeatureError`.
        """
        if self._fused is not None and self._before is None:
            self._fused.undo()
            self._fused = None
        return self._model

    @property
    def capturable(self) -> bool:
        """See `ModelRunner.capturable`. Whether the model's own code reads values shows when it is tried."""
        return (self._fused is None or self._fused.capturable) and all(b.capturable for b in self._backends)

    def compile_with(self, varlen: Options | None, decode: Options | None) -> None:
        """From the next `bind` on: run steps with prompt tokens, and steps that only decode, through `torch.compile` with
        these arguments; None for a path as it is. With either the model is not run by faster code of ours."""
        self._compile = None if varlen is decode is None else (varlen, decode)

    def warm_up(self) -> None:
        """Compile what is to be compiled. Compute stream's thread, after `bind`; what it raises is the compiler's."""
        if self._compiled is not None:
            for decodes in (0, 2):
                self.forward(_padded_tokens(self._model.device, 2, decodes))

    def bind(self, kv: list[tuple[torch.Tensor, torch.Tensor]], page_size: int) -> None:
        """Take the model over, and try it with one padded token. See `ModelRunner.bind`.

        Raises:
            UnsupportedFeatureError: the model object is being served by another engine, or its attention is not what its
                config promised. The model is left as it was.
        """
        assert len(kv) == len(self._modules), (len(kv), len(self._modules))
        self.release()
        _register()
        parts = [LayerKV.of(key, value) for key, value in kv]
        with _bind_lock:
            for module in self._modules:
                owner: _Layer | None = vars(module).get(_LAYER)
                if owner is not None and owner.runner._model is self._model:
                    raise UnsupportedFeatureError(
                        f"{self.spec.name}: this model object is being served by another engine; stop that engine "
                        "first, or load the model once for each engine"
                    )
            for index, (module, part) in enumerate(zip(self._modules, parts, strict=True)):
                attention = self._backends[self._group_of[index]]
                setattr(module, _LAYER, _Layer(self, index, part, self.spec.layers[index].window, attention))
        self._page_size = page_size
        training = tuple(module for module in self._model.modules() if module.training)
        configs = self._configs()
        self._before = _Before(tuple((config, getattr(config, _INTERNAL)) for config in configs), training)
        # The internal attribute: the public setter would also change the sub-configs (a vision tower's).
        for config in configs:
            setattr(config, _INTERNAL, IMPLEMENTATION)
        for module in training:
            module.training = False
        try:
            self._make_ready(parts)
        except BaseException:
            self.release()
            raise

    def _make_ready(self, parts: list[LayerKV]) -> None:
        if self._fused is not None and self._compile is not None:
            self._fused.undo()
            self._fused = None
        if self._fused is not None:
            self._fused.bind(parts, self._page_size)
            return
        self._probe()
        if self._compile is not None:
            self._make_compiled(self._compile)
        elif self._int8:
            self._fused = fuse_int8(
                self._model, self.spec, self._backends, parts, self._page_size, self._run, owned=self._owned
            )
        elif self._may_fuse:
            self._fused = fuse(
                self._model, self.spec, self._backends, parts, self._page_size, self._run, owned=self._owned
            )

    def _make_compiled(self, options: tuple[Options | None, Options | None]) -> None:
        if self._int8:
            raise UnsupportedFeatureError(
                f"{self.spec.name}: weights of 8 bits are for code of ours, which is not compiled; leave either out"
            )
        attending = {module: partial(_attend_compiled, module) for module in self._modules}
        self._compiled = CompiledForward(self._model, attending, *options)

    def _probe(self) -> None:
        """One padded token through the model: how it attends shows only when it runs, and should show before a request."""
        logits = self.forward(_padded_tokens(self._model.device, 1, 1))
        if logits.ndim != 2 or logits.shape[0] != 1:
            raise UnsupportedFeatureError(
                f"{self.spec.name}: {type(self._model).__name__} gave logits of shape {tuple(logits.shape)} for one sampled "
                "token; language models with a head, whose logits_to_keep takes positions, are supported"
            )

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """See `ModelRunner.forward`. Compute stream's thread."""
        assert self._before is not None, "forward before bind"
        if self._fused is not None:
            with torch.inference_mode():
                return self._fused.forward(inputs)
        return self._run(inputs)

    def _run(self, inputs: StepInputs) -> torch.Tensor:
        """The forward of transformers."""
        with torch.inference_mode(), _in_step(_Step(self, inputs.num_tokens, set())) as step:
            for group, attention in enumerate(self._backends):
                attention.begin(inputs.of_group(group), self._page_size)
            logits = self._logits(inputs) if self._compiled is None else self._compiled(inputs, self._no_mask)
            missing = sorted(set(range(len(self._modules))) - step.written)
            if missing:
                raise UnsupportedFeatureError(
                    f"{self.spec.name}: layers {missing} did not call the attention function; models whose every layer "
                    "attends through transformers' attention interface are supported"
                )
            return logits

    def _logits(self, inputs: StepInputs) -> torch.Tensor:
        output = self._model(
            input_ids=inputs.token_ids.long()[None],
            position_ids=inputs.positions.long()[None],
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=inputs.sample_index,
            return_dict=True,
        )
        return output.logits[0]

    def release(self) -> None:
        """See `ModelRunner.release`."""
        before, self._before = self._before, None
        if before is None:
            return
        try:
            if self._fused is not None and self._fused.release():
                self._fused = None
            if self._compiled is not None:
                self._compiled.release()
                self._compiled = None
        finally:  # a device that is lost gives no weights back
            for config, implementation in before.implementations:
                setattr(config, _INTERNAL, implementation)
            for module in before.training:
                module.training = True
            with _bind_lock:
                for module in self._modules:
                    delattr(module, _LAYER)

    def _configs(self) -> list[Any]:
        """The distinct configs that say which attention function the text model's modules call."""
        text = text_config(self._model.config, self.spec.name)
        owners = [self._model.config, text, *(vars(module).get("config") for module in self._modules)]
        distinct = {id(config): config for config in owners if hasattr(config, _INTERNAL)}
        return list(distinct.values())


def _padded_tokens(device: torch.device, count: int, decodes: int) -> StepInputs:
    """A step of `count` sequences of one token each that belong to no request: they are written to the cache's reserved
    block. The first `decodes` are said to decode."""
    starts, zeros = np.arange(count + 1, dtype=np.int32), np.zeros(count, np.int32)
    floats, none = torch.zeros(count, device=device), torch.zeros(0, dtype=torch.int32, device=device)
    ints = floats.to(torch.int32)
    return StepInputs(
        num_tokens=count,
        num_seqs=count,
        num_decodes=decodes,
        num_samples=count,
        max_query_len=1,
        max_context_len=0,
        token_ids=ints,
        positions=ints,
        query_starts=torch.from_numpy(starts).to(device),
        context_lens=ints,
        block_tables=ints[:, None],
        rows=ints,
        sample_index=ints,
        host_query_starts=starts,
        host_context_lens=zeros,
        host_block_tables=zeros[:, None],
        sampling=SamplingInputs(floats, ints, floats, floats, floats, none, none, False, False, False, False),
    )


def _register() -> None:
    AttentionInterface.register(IMPLEMENTATION, _attention_function)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask_function)


@contextmanager
def _in_step(step: _Step) -> Iterator[_Step]:
    _running.step = step
    try:
        yield step
    finally:
        _running.step = None


def _attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention interface of transformers: [B, heads, T, D] in, [B, T, heads, D] out. Any thread."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    masked = attention_mask is not None and attention_mask.numel() > 0
    special = masked or kwargs.get("position_bias") is not None or kwargs.get("is_causal") is False
    # In code that torch.compile makes for us, what follows within a step is one operation, and this is only traced.
    if torch.compiler.is_compiling() and (handle := getattr(module, HANDLE, None)) is not None and not special:
        return attend(query, key, value, handle, scale, softcap, s_aux), None
    step: _Step | None = getattr(_running, "step", None)
    if step is None:
        return _ordinary_attention(
            module, query, key, value, attention_mask, scale, dropout, softcap=softcap, s_aux=s_aux, **kwargs
        )
    if special:
        raise UnsupportedFeatureError(
            f"{step.runner.spec.name}: {type(module).__name__} attends with a mask or a bias of its own; plain causal "
            "attention is supported"
        )
    return _attend(module, step, query, key, value, scale, softcap, s_aux)[None], None


def _attend_compiled(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The attention of a compiled forward, whose rows may be padded: [1, T, heads, D]. Compute stream's thread."""
    step: _Step | None = getattr(_running, "step", None)
    if step is None:
        raise UnsupportedFeatureError(
            f"{type(module).__name__} is being served compiled: nobody else can call it compiled"
        )
    padded = query.shape[2]
    query, key, value = (x[:, :, : step.num_tokens] for x in (query, key, value))
    return pad_tokens(_attend(module, step, query, key, value, scale, softcap, sinks), padded)


def _attend(
    module: nn.Module,
    step: _Step,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One layer's attention in a step: [1, heads, T, D] in, [T, heads, D] out."""
    layer: _Layer | None = vars(module).get(_LAYER)
    name = step.runner.spec.name
    if layer is None or layer.runner is not step.runner or layer.index in step.written:
        again = "a second time" if layer is not None else "from outside the decoder's layers"
        raise UnsupportedFeatureError(
            f"{name}: {type(module).__name__} called the attention function {again} in one step; models that attend once "
            "in each layer are supported"
        )
    kv, heads = layer.kv, (key.shape[1], key.shape[3])
    if heads != kv.key.shape[2:] or value.shape != key.shape or query.shape[3] != key.shape[3]:
        raise UnsupportedFeatureError(
            f"{name}: layer {layer.index} has keys {tuple(key.shape)} and values {tuple(value.shape)}, where its config says "
            f"{kv.key.shape[2]} heads of {kv.key.shape[3]}"
        )
    step.written.add(layer.index)
    backend = layer.attention
    _check_backend(backend, name, softcap, sinks)
    backend.write(kv, key[0].transpose(0, 1), value[0].transpose(0, 1))
    return backend.attend(kv, query[0].transpose(0, 1), scale=scale, window=layer.window, softcap=softcap, sinks=sinks)


def _check_backend(backend: AttentionBackend, name: str, softcap: float | None, sinks: torch.Tensor | None) -> None:
    if softcap is not None and not backend.supports_softcap:
        raise UnsupportedFeatureError(f'{name} needs a soft cap, which attention={backend.name!r} lacks; use "sdpa"')
    if sinks is not None and not backend.supports_sinks:
        raise UnsupportedFeatureError(f'{name} needs sinks, which attention={backend.name!r} lacks; use "sdpa"')


def _mask_function(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask within a step; outside, what transformers' SDPA needs. Any thread."""
    if getattr(_running, "step", None) is not None:
        return None
    return sdpa_mask(*args, **kwargs)


def _ordinary_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    dropout: float,
    *,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Somebody else's call of a model that is being served: transformers' SDPA, or the reference where SDPA cannot."""
    if softcap is None and s_aux is None:
        out, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        return out, None
    n, m = query.shape[2], key.shape[2]
    if mask is None:
        hidden = torch.ones(n, m, dtype=torch.bool, device=query.device).triu_(m - n + 1)[None]
        additive = torch.zeros(1, n, m, device=query.device).masked_fill_(hidden, float("-inf"))
    elif mask.dtype == torch.bool:
        additive = torch.zeros(mask[:, 0].shape, device=query.device).masked_fill_(~mask[:, 0], torch.finfo().min)
    else:
        additive = mask[:, 0]
    out = attention_math(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        scale=scaling,
        mask=additive,
        softcap=softcap,
        sinks=s_aux,
    )
    return out, None
