"""The inputs of one step, as the model, the attention backend and the sampler see them.

A step computes S sequences packed into one row of T query tokens: first the decoding ones, one token each, then the
chunks of prompts. N of the S sequences sample a token at the end: all decoding ones, and the chunks that end a prompt.
T, S, N and W may be padded up (to a captured shape): padded tokens belong to the dummy row, and their reads and writes go
to the reserved blocks of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch


@dataclass(slots=True)
class SamplingInputs:
    """One entry for each sampling sequence, in the order of `StepInputs.sample_index`. Device tensors, shape [N]."""

    temperature: torch.Tensor
    """float32; 0 = greedy."""
    top_k: torch.Tensor
    """int32; 0 = off."""
    top_p: torch.Tensor
    """float32; 1 = off."""
    min_p: torch.Tensor
    """float32; 0 = off."""
    uniform: torch.Tensor
    """float32 in [0, 1): the randomness of this draw, a function of (seed, position) alone."""
    banned_rows: torch.Tensor
    """int32 [B]: with `banned_tokens` the (row, token id) pairs whose logits become -inf (min_new_tokens)."""
    banned_tokens: torch.Tensor
    # What the host knows about the whole batch, so that work nobody asked for is not done. Part of a graph's key.
    any_random: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool


@dataclass(slots=True)
class StepInputs:
    """Device tensors of one step (int32 unless said otherwise), and the same lengths as numpy arrays for the host."""

    num_tokens: int  # T
    num_seqs: int  # S
    num_decodes: int  # the first num_decodes sequences have one query token each
    num_samples: int  # N
    max_query_len: int
    max_context_len: int
    token_ids: torch.Tensor
    """[T]. While a step runs the loop has already put the device-resident last tokens in place."""
    positions: torch.Tensor
    """[T] position of each query token in its own sequence."""
    query_starts: torch.Tensor
    """[S + 1] where each sequence's queries start in the packed row (`cu_seqlens_q`)."""
    context_lens: torch.Tensor
    """[S] KV length of each sequence once this step's tokens are written (`seqused_k`)."""
    block_tables: torch.Tensor
    """[S, W] block ids; entries past a sequence's length are 0 (a reserved block)."""
    rows: torch.Tensor
    """[S] the row of each sequence in per-row device state."""
    sample_index: torch.Tensor
    """[N + P] index into the packed row of the tokens whose logits are wanted: the N that sample, and behind them P tokens
    of prompts whose logprobs were asked for."""
    host_query_starts: np.ndarray
    host_context_lens: np.ndarray
    host_block_tables: np.ndarray
    """Host copies of the same name's tensors: stable while the step runs (I6)."""
    sampling: SamplingInputs
    group_tables: tuple[torch.Tensor, ...] = ()
    """Of a model with several attention types: the block tables of each (`cache.geometry.group_of_layers` says which layer
    reads which); `block_tables` is the first of them. Pages behind a window are not there: their entries name a reserved
    block, or a block that is somebody else's by now, so that only pages inside the window may be read."""
    host_group_tables: tuple[np.ndarray, ...] = ()

    def of_group(self, index: int) -> StepInputs:
        """The same step as the layers of one attention type see it."""
        if not self.group_tables:
            return self
        tables, host = self.group_tables[index], self.host_group_tables[index]
        return replace(self, block_tables=tables, host_block_tables=host)
