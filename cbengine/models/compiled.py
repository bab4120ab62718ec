"""A transformers model's forward through torch.compile, with our attention as one operation that is not looked into.

That operation, `cbengine::attend`, has the layer's number as an argument and finds the step where attention functions find
it, so the compiled program holds nothing that varies from step to step but tensors. Packed rows and the rows that are sampled
are padded to at least two, because torch makes programs of their own for sizes of 0 and 1; the attention sees what is real.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from cbengine.execution.inputs import StepInputs

HANDLE = "_cbengine_handle"
"""Attribute of an attention module whose model is compiled: the layer's number to `attend`."""
Options = Mapping[str, Any]
"""Arguments of `torch.compile`."""
_SMALLEST = 2

_numbers = itertools.count()


class Attending(Protocol):
    """One layer's attention within a step: query [1, heads, T, D] … to [1, T, heads, D]."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor: ...


_layers: weakref.WeakValueDictionary[int, Attending] = weakref.WeakValueDictionary()


@torch.library.custom_op("cbengine::attend", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Write the tokens' keys and values into the layer's pages and attend. The pages are no argument of it: what orders the
    writes of one step before the reads of the next is that a step is one program."""
    return _layers[layer](query, key, value, scale, softcap, sinks)


@attend.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    batch, heads, tokens, dim = query.shape
    return query.new_empty(batch, tokens, heads, dim)


def pad_tokens(out: Tensor, tokens: int) -> Tensor:
    """[T, heads, D] with zeros for padded tokens, as the compiled program expects it: [1, tokens, heads, D]."""
    if len(out) < tokens:
        out = F.pad(out, (0, 0, 0, 0, 0, tokens - len(out)))
    return out.contiguous()[None]


class CompiledForward:
    """The forward of a model, compiled separately for steps that only decode and for all others.

    Args:
        attending: for each attention module, its attention within a step.
        varlen, decode: how to compile; None: not compiled, the model's own forward. With `dynamic` False there is a program
            for each padded size, powers of two, which is made when it is first met; else one for all sizes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attending: Mapping[nn.Module, Attending],
        varlen: Options | None,
        decode: Options | None,
    ) -> None:
        self._options = {False: varlen, True: decode}
        self._forward: Callable[..., Tensor] = _forward_of(model)
        self._made: dict[tuple[object, ...], Callable[..., Tensor]] = {}
        self._attending = dict(attending)  # keeps the weak references of `_layers` alive
        for module, call in attending.items():
            number = next(_numbers)
            _layers[number] = call
            setattr(module, HANDLE, number)

    def __call__(self, inputs: StepInputs, mask: Tensor) -> Tensor:
        """Logits of `inputs.sample_index`. Within a step; compute stream's thread."""
        decoding = inputs.num_decodes == inputs.num_seqs
        options = self._options[decoding]
        ids, positions, chosen = inputs.token_ids.long(), inputs.positions.long(), inputs.sample_index.long()
        rows = len(chosen)
        if options is None:
            return self._forward(ids[None], positions[None], chosen, mask)
        static = options.get("dynamic") is False
        tokens, wanted = (_padded(len(part), static) for part in (ids, chosen))
        ids, positions = (F.pad(part, (0, tokens - len(part)))[None] for part in (ids, positions))
        chosen = F.pad(chosen, (0, wanted - rows))
        key: tuple[object, ...] = (decoding, tokens, wanted) if static else (decoding,)
        if not static:
            for part, dim in ((ids, 1), (positions, 1), (chosen, 0)):
                torch._dynamo.maybe_mark_dynamic(part, dim)
        if key not in self._made:
            self._made[key] = torch.compile(_own_code(self._forward, f"forward_{next(_numbers)}"), **options)
        return self._made[key](ids, positions, chosen, mask)[:rows]

    def release(self) -> None:
        """Take the marks off the model's modules."""
        for module in self._attending:
            vars(module).pop(HANDLE, None)
        self._made.clear()


def _padded(count: int, static: bool) -> int:
    least = max(count, _SMALLEST)
    return 1 << (least - 1).bit_length() if static else least


def _forward_of(model: PreTrainedModel) -> Callable[..., Tensor]:
    def forward(ids: Tensor, positions: Tensor, chosen: Tensor, mask: Tensor) -> Tensor:
        output: Any = model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=False,
            logits_to_keep=chosen,
            return_dict=True,
        )
        return output.logits[0]

    return forward


def _own_code(function: Any, name: str) -> Callable[..., Tensor]:
    """The same function with a code object of its own: torch keeps what it compiled, and how often, by code object."""
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
