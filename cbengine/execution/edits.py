"""Filling in what single requests want changed in their logits. Engine thread only, as part of filling a slot.

Costs Python for the rows that have an entry here, and nothing for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cbengine.execution.logprobs import words
from cbengine.execution.processors import PenaltyLoad
from cbengine.scheduling.base import Chunk
from cbengine.scheduling.rows import RowTable

_FORBIDDEN = float("-inf")


@dataclass(slots=True)
class Edits:
    """What a step's samples want: parallel lists, "sample" is an index in [0, N)."""

    bias_samples: list[np.ndarray] = field(default_factory=list)
    bias_tokens: list[np.ndarray] = field(default_factory=list)
    bias_values: list[np.ndarray] = field(default_factory=list)
    penalty_samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    longest: int = 0
    """Tokens of the longest of them."""
    mask_samples: list[int] = field(default_factory=list)
    masks: list[np.ndarray] = field(default_factory=list)
    logprob_samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    top: int = 0
    """Most alternatives that any of `logprob_samples` wants."""
    scores: list[tuple[int, int, int]] = field(default_factory=list)
    """For each scored chunk: its row, the index in the packed row of its first scored token, and how many there are."""
    score_tokens: list[np.ndarray] = field(default_factory=list)
    """The tokens that are scored: those that follow."""
    score_top: int = 0

    @property
    def num_scores(self) -> int:
        return sum(count for _, _, count in self.scores)

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """The last six of `StepSizes`."""
        biases = sum(len(tokens) for tokens in self.bias_tokens)
        mask_words = len(self.masks[0]) if self.masks else 0
        penalties, reports = len(self.penalty_samples), len(self.logprob_samples)
        return biases, penalties, len(self.masks), mask_words, reports, self.num_scores

    @property
    def report_words(self) -> int:
        """Words of the outputs that the logprob reports take."""
        return words(len(self.logprob_samples), self.top) + words(self.num_scores, self.score_top)

    @property
    def score_index(self) -> np.ndarray:
        """Indices into the packed row of the tokens to be scored."""
        ranges = [np.arange(first, first + count) for _, first, count in self.scores]
        return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)


def collect(table: RowTable, rows: np.ndarray) -> Edits:
    """The edits for the sampling rows `rows`, int64 [N]."""
    edits = Edits()
    edits.penalty_samples = np.flatnonzero(table.penalty_place[rows] >= 0)
    edits.logprob_samples = np.flatnonzero(table.logprobs[rows] >= 0)
    if len(edits.logprob_samples):
        edits.top = int(table.logprobs[rows[edits.logprob_samples]].max())
    for sample in np.flatnonzero(table.edited[rows]).tolist():
        request = table.requests[rows[sample]]
        assert request is not None and request.edit is not None
        edit, row = request.edit, rows[sample]
        tokens, values = edit.tokens, edit.values
        if edit.words:
            # Such a request is scheduled in lockstep: every token before the one to be drawn is known here.
            said = table.tokens[row, : table.known[row]]
            ends = [word[-1] for word in edit.words if said[len(said) - len(word) + 1 :].tolist() == list(word[:-1])]
            tokens = np.append(tokens, np.array(ends, np.int32))
            values = np.append(values, np.full(len(ends), _FORBIDDEN, np.float32))
        if len(tokens):
            edits.bias_samples.append(np.full(len(tokens), sample, np.int32))
            edits.bias_tokens.append(tokens)
            edits.bias_values.append(values)
        if edit.mask is not None:
            edits.mask_samples.append(sample)
            edits.masks.append(edit.mask)
    return edits


def collect_scores(edits: Edits, table: RowTable, chunks: Sequence[Chunk], first: int) -> None:
    """Add the prompt tokens to be scored; the chunks' queries begin at `first` in the packed row."""
    at = first
    for chunk in chunks:
        start, end = chunk.score
        if start < end:
            edits.scores.append((chunk.row, at + start - chunk.start, end - start))
            edits.score_tokens.append(table.tokens[chunk.row, start + 1 : end + 1])
            edits.score_top = max(edits.score_top, int(table.prompt_logprobs[chunk.row]))
        at += chunk.count


def take_loads(table: RowTable) -> list[PenaltyLoad]:
    """The penalty tables' news since the last step: rows that have joined."""
    loads, table.penalty_loads = table.penalty_loads, []
    return [PenaltyLoad(place, prompt, answer) for place, prompt, answer in loads]
