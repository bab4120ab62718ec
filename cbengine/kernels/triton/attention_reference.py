"""What the attention kernels compute, in plain torch and float32, one sequence after the other. Reads lengths on the host."""

from __future__ import annotations

import torch


def write_pages_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """See `launch.write_pages`."""
    key_pages[blocks.long(), offsets.long()] = key
    value_pages[blocks.long(), offsets.long()] = value


def attend_pages_reference(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, heads, D] in the query's dtype: the last queries of each sequence over its pages; zeros for padding.

    `query` [T, heads, D]; pages [blocks, page_size, kv heads, D]; `tables` [S, W]; `context_lens` [S]; `query_starts` [S + 1].
    """
    out = torch.zeros_like(query)
    starts = query_starts.tolist()
    for seq, context in enumerate(context_lens.tolist()):
        mine = slice(starts[seq], starts[seq + 1])
        count = mine.stop - mine.start
        if not count or not context:
            continue
        low = 0 if window is None else max(0, context - count - window + 1)
        at = torch.arange(low, context, device=query.device)
        blocks = tables[seq].long()[at // key_pages.shape[1]]
        key, value = (pages[blocks, at % pages.shape[1]].float() for pages in (key_pages, value_pages))
        mask = at[None] > torch.arange(context - count, context, device=query.device)[:, None]
        if window is not None:
            mask |= at[None] <= torch.arange(context - count, context, device=query.device)[:, None] - window
        out[mine] = _attend(query[mine].float(), key, value, mask, scale, softcap, sinks).to(query.dtype)
    return out


def merge_reference(
    acc: torch.Tensor, tops: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """[..., D] from parts [..., splits, D] that were each weighted by exp2(score - top); `sinks` is a natural score."""
    highest = tops.amax(-1)
    if sinks is not None:
        highest = torch.maximum(highest, sinks * torch.log2(torch.tensor(torch.e)))
    shares = torch.exp2(tops - highest[..., None]).nan_to_num(0.0)
    total = (sums * shares).sum(-1)
    if sinks is not None:
        total = total + torch.exp2(sinks * torch.log2(torch.tensor(torch.e)) - highest)
    parts = torch.where(tops[..., None] > -torch.inf, acc, 0.0)
    return (parts * shares[..., None]).sum(-2) / torch.where(total > 0, total, 1.0)[..., None]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One dense sequence: [n, heads, D] over [m, kv heads, D]; `mask` [n, m] is True where a token is hidden."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", query, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(mask, -torch.inf)
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=2)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[0]]
    return torch.einsum("hnm,mhd->nhd", weights, value)
