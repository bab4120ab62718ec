"""A slot: the buffers of one step in flight, on both sides, and the events that guard them.

All inputs of a step are packed into one int32 buffer (float32 values by their bits), so that a step costs one copy. The
layout follows from the step's sizes alone. Engine thread only; the device reads the buffers between launch and `done`.

    I6 The host writes a slot's inputs only after that slot's `done`.
    I8 `done` is recorded after the last operation that touches the slot; outputs are read only after it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from cbengine.devices.base import Device


class SlotState(enum.Enum):
    FREE = "free"
    FILLED = "filled"
    LAUNCHED = "launched"


class StepSizes(NamedTuple):
    """What the layout of a step depends on."""

    tokens: int  # T
    seqs: int  # S
    width: int  # W, blocks a sequence in the tables
    samples: int  # N
    banned: int  # B
    groups: int = 1  # G, attention types
    biases: int = 0
    penalties: int = 0  # Q
    masks: int = 0  # M
    mask_words: int = 0  # 32 tokens each
    logprobs: int = 0  # L
    scores: int = 0  # P, prompt tokens to be scored
    padding: int = 0  # entries of `sample_index` past N: a captured shape has a place for every sequence


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets into the packed buffer, in 4-byte words."""

    sizes: StepSizes
    starts: dict[str, tuple[int, int]]
    words: int
    model_words: int
    """Where the sections end that the model reads. They come first, so that a graph gets its inputs by one copy; what they
    are cut by (T, S, W, G and the length of `sample_index`) is the graph's shape."""

    @staticmethod
    @lru_cache(maxsize=512)
    def of(sizes: StepSizes) -> Layout:
        t, s, w, n, b, g, biases, q, m, mask_words, logprobs, scores, padding = sizes
        lengths = {
            "token_ids": t,
            "positions": t,
            "query_starts": s + 1,
            "context_lens": s,
            "rows": s,
            "sample_index": n + padding + scores,
            "block_tables": g * s * w,
            "sample_rows": n,
            "top_k": n,
            "temperature": n,
            "top_p": n,
            "min_p": n,
            "uniform": n,
            "banned_rows": b,
            "banned_tokens": b,
            "bias_samples": biases,
            "bias_tokens": biases,
            "bias_values": biases,
            "penalty_samples": q,
            "penalty_places": q,
            "penalty_lengths": q,
            "repetition": q,
            "presence": q,
            "frequency": q,
            "mask_samples": m,
            "masks": m * mask_words,
            "logprob_samples": logprobs,
            "score_tokens": scores,
        }
        starts: dict[str, tuple[int, int]] = {}
        at = 0
        for name, length in lengths.items():
            starts[name] = (at, at + length)
            at += length
        return Layout(sizes, starts, at, starts["block_tables"][1])


class Slot:
    """One of the (at most two) places for a step in flight."""

    def __init__(self, device: Device, index: int, words: int, samples: int) -> None:
        self.index = index
        self.state = SlotState.FREE
        self._device = device
        self._allocate(words)
        self.device_out = device.device_buffer((samples,), torch.int32)
        self.host_out = device.host_buffer((samples,), torch.int32)
        """Sampled ids, int32 [N], and behind them the reports of `execution.logprobs`."""
        self.inputs_ready = device.event("inputs_ready")
        self.done = device.event("done")

    def _allocate(self, words: int) -> None:
        self.host_in = self._device.host_buffer((words,), torch.int32)
        self.device_in = self._device.device_buffer((words,), torch.int32)
        self._ints = self.host_in.numpy()
        self._floats = self._ints.view(np.float32)

    def reserve(self, words: int, out_words: int) -> None:
        """Make the buffers at least this long. Only while FREE, and rare: the first use of what few requests ask for."""
        assert self.state is SlotState.FREE
        if words > len(self._ints):
            self._allocate(max(words, 2 * len(self._ints)))
        if out_words > len(self.host_out):
            size = (max(out_words, 2 * len(self.host_out)),)
            self.device_out = self._device.device_buffer(size, torch.int32)
            self.host_out = self._device.host_buffer(size, torch.int32)

    def ints(self, layout: Layout, name: str) -> np.ndarray:
        """The host's view of a section, int32."""
        start, end = layout.starts[name]
        return self._ints[start:end]

    def floats(self, layout: Layout, name: str) -> np.ndarray:
        """The host's view of a section, float32."""
        start, end = layout.starts[name]
        return self._floats[start:end]

    def tensor(self, layout: Layout, name: str) -> torch.Tensor:
        """The device's view of an int32 section."""
        start, end = layout.starts[name]
        return self.device_in[start:end]

    @property
    def nbytes(self) -> int:
        """Bytes on the host and on the device."""
        return 2 * 4 * (len(self._ints) + len(self.host_out))
