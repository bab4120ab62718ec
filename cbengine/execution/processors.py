"""What changes logits before a token is drawn: biases, penalties and masks, for the rows that ask for them.

Runs on the compute stream, before the filters of `sampler.py` (which see temperature, top_k and so on). The order is that
of `transformers.generate`: biases, the repetition penalty, and then what forbids tokens; OpenAI's two penalties come right
after the repetition penalty. Each touches the rows that it is for and no other, so a row's result does not depend on its
neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cbengine.devices.base import Device


@dataclass(slots=True)
class ProcessorInputs:
    """Device tensors of one step. "Sample" is an index in [0, N)."""

    bias_samples: Tensor
    """int32 [B]: with `bias_tokens` and `bias_values` (float32) what is added to single logits; -inf forbids a token."""
    bias_tokens: Tensor
    bias_values: Tensor
    penalty_samples: Tensor
    """int32 [Q]: the samples with penalties, and for each its place in `PenaltyTables` and its values (float32)."""
    penalty_places: Tensor
    penalty_lengths: Tensor
    """int32 [Q]: tokens that prompt and answer have so far."""
    longest: int
    """The largest of them."""
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    mask_samples: Tensor
    """int32 [M]: the samples that may only draw tokens whose bit is set in `masks`."""
    masks: Tensor
    """int32 [M, words]: bit i of word w stands for token 32 * w + i."""

    def __bool__(self) -> bool:
        return bool(len(self.bias_samples) or len(self.penalty_samples) or len(self.mask_samples))


@dataclass(frozen=True, slots=True)
class PenaltyLoad:
    """A row with penalties has got (or got again, after a preemption) a place in the tables: what it has so far."""

    place: int
    prompt: np.ndarray
    answer: np.ndarray


class PenaltyTables:
    """Which tokens the prompts of penalised rows have, how often their answers have each, and all of them in a row.

    On the device, so that a step's penalties see the token that the step before it drew, without the host. Only tokens
    that were said are looked at and changed: a few hundred of a row's logits, not all of them. Made for the rows that ask;
    grown by doubling. Compute stream only, apart from the constructor.
    """

    def __init__(self, device: Device, vocab_size: int) -> None:
        self._device = device
        self._vocab = vocab_size
        self._in_prompt = device.device_buffer((0, vocab_size), torch.bool)
        self._counts = device.device_buffer((0, vocab_size), torch.int32)
        self._said = device.device_buffer((0, 0), torch.int32)

    def load(self, loads: Sequence[PenaltyLoad]) -> None:
        """Set up the places of rows that join."""
        longest = max(len(load.prompt) + len(load.answer) for load in loads)
        self._reserve(max(load.place for load in loads) + 1, longest)
        where = self._counts.device
        for load in loads:
            prompt, answer = _to_device(load.prompt, where), _to_device(load.answer, where)
            self._in_prompt[load.place] = False
            self._in_prompt[load.place, prompt.long()] = True
            self._counts[load.place] = 0  # bincount would make the host wait for the device
            self._counts[load.place].index_add_(0, answer.long(), torch.ones_like(answer))
            self._said[load.place, : len(prompt)] = prompt
            self._said[load.place, len(prompt) : len(prompt) + len(answer)] = answer

    def _reserve(self, places: int, length: int) -> None:
        held, width = self._said.shape
        if places > held:
            size = max(places, 2 * held, 8)
            in_prompt, counts = self._in_prompt, self._counts
            self._in_prompt = self._device.device_buffer((size, self._vocab), torch.bool)
            self._counts = self._device.device_buffer((size, self._vocab), torch.int32)
            self._in_prompt[:held], self._counts[:held] = in_prompt, counts
        if places > held or length > width:
            said = self._said
            shape = (len(self._counts), max(length, min(2 * width, length + 4096), 64))
            self._said = self._device.device_buffer(shape, torch.int32)
            self._said[:held, :width] = said

    def apply(self, logits: Tensor, inputs: ProcessorInputs) -> None:
        """Penalise in place: float32 [N, V].

        Repetition penalty (RepetitionPenaltyLogitsProcessor): a token that the prompt or the answer has is divided by it
        if its logit is positive, else multiplied. Presence and frequency penalty (OpenAI): a token that the answer has
        loses the one, and the other for each time that it has it.
        """
        samples, places = inputs.penalty_samples.long().unsqueeze(1), inputs.penalty_places.long().unsqueeze(1)
        lengths = inputs.penalty_lengths.unsqueeze(1)
        self._reserve(0, inputs.longest)
        said = self._said[places[:, 0], : inputs.longest].long()
        # Past a row's length its first token stands again: it is then changed twice, to the same.
        beyond = torch.arange(inputs.longest, device=said.device) >= lengths
        tokens = torch.where(beyond, said[:, :1], said)
        scores, counts = logits[samples, tokens], self._counts[places, tokens]
        penalty = inputs.repetition.unsqueeze(1)
        answered = counts > 0
        repeated = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores = torch.where(answered | self._in_prompt[places, tokens], repeated, scores)
        scores -= inputs.frequency.unsqueeze(1) * counts + inputs.presence.unsqueeze(1) * answered
        logits[samples, tokens] = scores

    def count(self, tokens: Tensor, inputs: ProcessorInputs) -> None:
        """The samples have drawn `tokens`, [N]."""
        places, drawn = inputs.penalty_places.long(), tokens[inputs.penalty_samples.long()]
        # A place stands in a step once, so no two of these writes meet.
        self._counts[places, drawn.long()] += 1
        self._reserve(0, inputs.longest + 1)
        self._said[places, inputs.penalty_lengths.long()] = drawn.int()


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Without waiting: from pinned memory where that exists. (What a device still reads is not used again by its allocator.)"""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def process(logits: Tensor, inputs: ProcessorInputs, tables: PenaltyTables) -> Tensor:
    """Logits with everything applied that `inputs` asks for: float32 [N, V], new."""
    logits = logits.float().clone()
    if len(inputs.bias_samples):
        at = (inputs.bias_samples.long(), inputs.bias_tokens.long())
        # Accumulating: a token may be biased and forbidden.
        logits.index_put_(at, inputs.bias_values, accumulate=True)
    if len(inputs.penalty_samples):
        tables.apply(logits, inputs)
    if len(inputs.mask_samples):
        _mask(logits, inputs)
    return logits


def _mask(logits: Tensor, inputs: ProcessorInputs) -> None:
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (inputs.masks.unsqueeze(-1) >> bits) & 1  # [M, words, 32]
    allowed = allowed.flatten(1)[:, : logits.shape[1]].bool()
    samples = inputs.mask_samples.long()
    logits[samples] = logits[samples].masked_fill(~allowed, float("-inf"))
