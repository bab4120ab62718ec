"""Log probabilities of drawn tokens, and of the likeliest ones: of the model's own distribution.

That is the softmax of the logits as the model gave them, before temperature, penalties and filters, as OpenAI and vLLM
report them: what a plain forward says. Rows that do not ask cost nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cbengine.outputs import TokenLogprobs


def words(rows: int, top: int) -> int:
    """32-bit words that `rows` rows with `top` alternatives take in a slot's outputs."""
    return rows * (1 + 2 * top)


def write(out: Tensor, logits: Tensor, tokens: Tensor, top: int) -> None:
    """Write the report of each row into `out`, int32 [rows * (1 + 2 * top)]; float32 by its bits. Compute stream.

    `logits` [rows, V], `tokens` [rows].
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    out = out.view(len(logits), 1 + 2 * top)
    chosen = logprobs.gather(1, tokens.long().unsqueeze(1))
    out[:, :1] = chosen.view(torch.int32)
    if top:
        best = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
        found = best.indices.shape[1]
        out[:, 1 : 1 + found] = best.indices.int()
        out[:, 1 + top : 1 + top + found] = best.values.contiguous().view(torch.int32)


def read(out: np.ndarray, top: int, wanted: np.ndarray) -> list[TokenLogprobs]:
    """The host's side of `write`; row i has asked for `wanted[i]` alternatives."""
    rows = out.reshape(len(wanted), 1 + 2 * top)
    chosen = (
        rows[:, 0].view(np.float32).tolist() if top == 0 else np.ascontiguousarray(rows[:, 0]).view(np.float32).tolist()
    )
    ids = rows[:, 1 : 1 + top].tolist()
    values = np.ascontiguousarray(rows[:, 1 + top :]).view(np.float32).tolist()
    return [
        TokenLogprobs(logprob, tuple(zip(ids[i][:count], values[i][:count], strict=True)))
        for i, (logprob, count) in enumerate(zip(chosen, wanted.tolist(), strict=True))
    ]
