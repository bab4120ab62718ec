"""Packed steps made by hand: what the engine's batch filler makes, without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cbengine.execution.inputs import SamplingInputs, StepInputs


@dataclass(frozen=True)
class Work:
    """`count` query tokens of one sequence, which ends at `context` tokens; context 0 is a padded sequence."""

    context: int
    count: int
    blocks: Sequence[int]
    ids: Sequence[int] = ()
    samples: bool = True


def greedy(n: int) -> SamplingInputs:
    """Sampling inputs of `n` greedy rows."""
    zeros, ints = torch.zeros(n), torch.zeros(n, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int32)
    return SamplingInputs(zeros, ints, torch.ones(n), zeros, zeros, none, none, False, False, False, False)


def step(decodes: Sequence[Work], chunks: Sequence[Work] = (), *, padded_tokens: int = 0) -> StepInputs:
    """Pack decoding sequences, then chunks; `padded_tokens` more tokens belong to no sequence."""
    work = [*decodes, *chunks]
    assert all(w.count == 1 for w in decodes)
    counts = np.array([w.count for w in work], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    total = int(starts[-1]) + padded_tokens
    contexts = np.array([w.context for w in work], np.int32)
    tables = np.zeros((len(work), max(1, *(len(w.blocks) for w in work))), np.int32)
    positions, ids = np.zeros(total, np.int32), np.zeros(total, np.int32)
    for i, w in enumerate(work):
        tables[i, : len(w.blocks)] = w.blocks
        span = slice(int(starts[i]), int(starts[i + 1]))
        positions[span] = np.arange(w.context - w.count, w.context) if w.context else 0
        ids[span] = w.ids if len(w.ids) else 0
    sample_index = (starts[1:] - 1)[[w.samples and w.context > 0 for w in work]]
    return StepInputs(
        num_tokens=total,
        num_seqs=len(work),
        num_decodes=len(decodes),
        num_samples=len(sample_index),
        max_query_len=int(counts.max()),
        max_context_len=int(contexts.max()),
        token_ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        query_starts=torch.from_numpy(starts),
        context_lens=torch.from_numpy(contexts),
        block_tables=torch.from_numpy(tables),
        rows=torch.arange(len(work), dtype=torch.int32),
        sample_index=torch.from_numpy(sample_index),
        host_query_starts=starts,
        host_context_lens=contexts,
        host_block_tables=tables,
        sampling=greedy(len(sample_index)),
    )
