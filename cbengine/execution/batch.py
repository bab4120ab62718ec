"""Filling a slot with a plan: numpy over the batch, Python only for chunks and for rows that ban tokens.

Engine thread only, while the slot is FREE (I6).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from cbengine.cache.manager import CacheManager
from cbengine.execution.buckets import Bucket, pad
from cbengine.execution.edits import Edits, collect, collect_scores, take_loads
from cbengine.execution.graphs import GraphSet
from cbengine.execution.inputs import SamplingInputs, StepInputs
from cbengine.execution.noise import uniforms
from cbengine.execution.processors import PenaltyLoad, ProcessorInputs
from cbengine.execution.slots import Layout, Slot, SlotState, StepSizes
from cbengine.scheduling.base import StepPlan
from cbengine.scheduling.rows import RowTable

FROM_DEVICE = -1
"""Stands for a token id that only the device knows yet: the last token that it sampled for this row."""


@dataclass(slots=True)
class Filled:
    """A slot's content: what the device will be given, and what commit has to know."""

    plan: StepPlan
    layout: Layout
    rows: np.ndarray
    """int64 [S]: decoding rows, then the rows of the chunks."""
    counts: np.ndarray
    """int64 [S]: query tokens of each."""
    sample_rows: np.ndarray
    """int64 [N]."""
    host_query_starts: np.ndarray
    host_context_lens: np.ndarray
    host_tables: np.ndarray
    """[G, S, W] the block tables of each attention type."""
    flags: tuple[bool, bool, bool, bool]
    """any_random, any_top_k, any_top_p, any_min_p."""
    copies: list[list[tuple[int, int]]]
    """For each attention type: blocks (from, to) to be copied before the step."""
    edits: Edits
    loads: list[PenaltyLoad]
    """Rows with penalties that have joined, to be set up before the step."""
    out_words: int
    """Words of the slot's outputs that the step writes: N ids, then the logprob reports."""
    bucket: Bucket | None = None
    """The captured shape that the inputs are padded up to. Everything above is without the padding."""

    @property
    def num_tokens(self) -> int:
        """Query tokens, without padding."""
        return int(self.counts.sum())

    @property
    def host_block_tables(self) -> np.ndarray:
        """[S, W] those of the first attention type."""
        return self.host_tables[0]


class BatchFiller:
    """Turns plans into slot contents. `graphs`: what steps may be padded up to."""

    def __init__(
        self, rows: RowTable, cache: CacheManager, eos_token_ids: tuple[int, ...], graphs: GraphSet | None = None
    ) -> None:
        self._rows = rows
        self._cache = cache
        self._eos = eos_token_ids
        self._graphs = graphs

    def fill(self, slot: Slot, plan: StepPlan) -> Filled:
        """Write the inputs of `plan`, whose tokens are already counted in `planned`, into `slot`."""
        assert slot.state is SlotState.FREE
        table = self._rows
        d, chunks = plan.num_decodes, plan.chunks
        rows = plan.rows
        counts = np.ones(len(rows), np.int64)
        counts[d:] = [c.count for c in chunks]
        ends = table.planned[rows]
        sampling = np.ones(len(rows), bool)
        sampling[d:] = [c.last for c in chunks]
        sample_rows, sample_ends = rows[sampling], ends[sampling]
        banned = self._banned(sample_rows, sample_ends)
        width = self._cache.blocks_for(int(ends.max()))
        groups = self._cache.group_tables
        edits = collect(table, sample_rows)
        collect_scores(edits, table, chunks, d)
        shape = StepSizes(int(counts.sum()), len(rows), width, len(sample_rows), len(banned), len(groups), *edits.sizes)
        bucket = self._bucket(shape, plan)
        layout = Layout.of(shape if bucket is None else _padded(shape, bucket))
        out_words = len(sample_rows) + edits.report_words
        slot.reserve(layout.words, out_words)

        self._fill_tokens(slot, layout, plan, ends)
        starts = self._fill_sequences(slot, layout, rows, counts, ends)
        wanted = slot.ints(layout, "sample_index")
        wanted[: len(sample_rows)] = (starts[1:] - 1)[sampling]
        if bucket is None:
            wanted[len(sample_rows) :] = edits.score_index
        else:
            self._pad(slot, layout, bucket, shape)
        slot.ints(layout, "sample_rows")[:] = sample_rows
        flags = self._fill_sampling(slot, layout, sample_rows, sample_ends)
        slot.ints(layout, "banned_rows")[:] = banned[:, 0]
        slot.ints(layout, "banned_tokens")[:] = banned[:, 1]
        self._fill_edits(slot, layout, edits, sample_rows, sample_ends)
        slot.state = SlotState.FILLED
        lens = slot.ints(layout, "context_lens")[: len(rows)]
        tables = _tables(slot, layout)[:, : len(rows)]
        copies, loads = self._cache.take_copies(), take_loads(table)
        filled = Filled(
            plan, layout, rows, counts, sample_rows, starts, lens, tables, flags, copies, edits, loads, out_words
        )
        filled.bucket = bucket
        return filled

    def _bucket(self, shape: StepSizes, plan: StepPlan) -> Bucket | None:
        """The captured shape for this step. Prompt tokens that are scored have no place in one."""
        if self._graphs is None or shape.scores:
            return None
        return self._graphs.find(decode=not plan.chunks, tokens=shape.tokens, seqs=shape.seqs, width=shape.width)

    def _pad(self, slot: Slot, layout: Layout, bucket: Bucket, shape: StepSizes) -> None:
        assert self._graphs is not None
        pad(
            partial(slot.ints, layout),
            bucket,
            tokens=shape.tokens,
            seqs=shape.seqs,
            samples=shape.samples,
            dummy_row=self._graphs.dummy_row,
        )

    def _fill_sequences(
        self, slot: Slot, layout: Layout, rows: np.ndarray, counts: np.ndarray, ends: np.ndarray
    ) -> np.ndarray:
        """Where each sequence's queries, rows and pages are; returns the query starts."""
        count = len(rows)
        starts = slot.ints(layout, "query_starts")[: count + 1]
        starts[0] = 0
        np.cumsum(counts, out=starts[1:])
        slot.ints(layout, "context_lens")[:count] = ends
        slot.ints(layout, "rows")[:count] = rows
        for group, out in zip(self._cache.group_tables, _tables(slot, layout), strict=True):
            np.take(group[:, : layout.sizes.width], rows, axis=0, out=out[:count])
        return starts

    def _fill_edits(self, slot: Slot, layout: Layout, edits: Edits, rows: np.ndarray, ends: np.ndarray) -> None:
        table = self._rows
        if edits.bias_samples:
            slot.ints(layout, "bias_samples")[:] = np.concatenate(edits.bias_samples)
            slot.ints(layout, "bias_tokens")[:] = np.concatenate(edits.bias_tokens)
            slot.floats(layout, "bias_values")[:] = np.concatenate(edits.bias_values)
        if len(edits.penalty_samples):
            penalised = rows[edits.penalty_samples]
            slot.ints(layout, "penalty_samples")[:] = edits.penalty_samples
            slot.ints(layout, "penalty_places")[:] = table.penalty_place[penalised]
            slot.ints(layout, "penalty_lengths")[:] = ends[edits.penalty_samples]
            edits.longest = int(ends[edits.penalty_samples].max())
            slot.floats(layout, "repetition")[:] = table.repetition[penalised]
            slot.floats(layout, "presence")[:] = table.presence[penalised]
            slot.floats(layout, "frequency")[:] = table.frequency[penalised]
        if edits.masks:
            slot.ints(layout, "mask_samples")[:] = edits.mask_samples
            slot.ints(layout, "masks")[:] = np.concatenate(edits.masks)
        slot.ints(layout, "logprob_samples")[:] = edits.logprob_samples
        if edits.score_tokens:
            slot.ints(layout, "score_tokens")[:] = np.concatenate(edits.score_tokens)

    def _fill_tokens(self, slot: Slot, layout: Layout, plan: StepPlan, ends: np.ndarray) -> None:
        table, d = self._rows, plan.num_decodes
        ids, positions = slot.ints(layout, "token_ids"), slot.ints(layout, "positions")
        if d:
            rows, at = plan.decode_rows, ends[:d] - 1
            positions[:d] = at
            # The token at `at` is on the host once the step that sampled it has committed; else it is in last_token.
            # Clipped only so that the gather stays inside the table; what it reads there is not used.
            host = table.tokens[rows, np.minimum(at, table.tokens.shape[1] - 1)]
            ids[:d] = np.where(at < table.known[rows], host, FROM_DEVICE)
        at = d
        for chunk in plan.chunks:
            end = chunk.start + chunk.count
            ids[at : at + chunk.count] = table.tokens[chunk.row, chunk.start : end]
            positions[at : at + chunk.count] = np.arange(chunk.start, end)
            at += chunk.count

    def _fill_sampling(
        self, slot: Slot, layout: Layout, rows: np.ndarray, ends: np.ndarray
    ) -> tuple[bool, bool, bool, bool]:
        table = self._rows
        temperature = table.temperature[rows]
        random = temperature > 0
        flags = (False, False, False, False)
        slot.floats(layout, "temperature")[:] = temperature
        if random.any():
            top_k, top_p, min_p = table.top_k[rows], table.top_p[rows], table.min_p[rows]
            slot.ints(layout, "top_k")[:] = top_k
            slot.floats(layout, "top_p")[:] = top_p
            slot.floats(layout, "min_p")[:] = min_p
            # The draw for the n-th token of an answer depends on the seed and n alone: not on the batch, not on where
            # the prompt was split, not on preemptions (E2).
            slot.floats(layout, "uniform")[:] = uniforms(table.seed[rows], ends - table.prompt_len[rows])
            flags = (
                True,
                bool(((top_k > 0) & random).any()),
                bool(((top_p < 1) & random).any()),
                bool(((min_p > 0) & random).any()),
            )
        else:
            slot.floats(layout, "uniform")[:] = 0
        return flags

    def _banned(self, rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """int64 [B, 2] of (sample, token id): stop tokens of rows that have not made `min_new_tokens` yet."""
        early = np.flatnonzero(ends < self._rows.min_len[rows])
        pairs: list[tuple[int, int]] = []
        for i in early.tolist():
            request = self._rows.requests[rows[i]]
            assert request is not None
            stops = request.stop_ids if request.params.ignore_eos else request.stop_ids.union(self._eos)
            pairs.extend((i, token) for token in stops)
        return np.array(pairs, np.int64).reshape(-1, 2)


def _padded(shape: StepSizes, bucket: Bucket) -> StepSizes:
    """`shape` with the model's inputs as large as the bucket's."""
    padding = bucket.seqs - shape.samples
    return shape._replace(tokens=bucket.tokens, seqs=bucket.seqs, width=bucket.width, padding=padding)


def _tables(slot: Slot, layout: Layout) -> np.ndarray:
    """The host's block tables, [G, S, W]."""
    sizes = layout.sizes
    return slot.ints(layout, "block_tables").reshape(sizes.groups, sizes.seqs, sizes.width)


def processor_inputs(slot: Slot, filled: Filled) -> ProcessorInputs:
    """The device's view of what changes logits before sampling."""
    layout = filled.layout
    view = {name: slot.tensor(layout, name) for name in _PROCESSOR_INTS}
    values = {name: slot.tensor(layout, name).view(torch.float32) for name in _PROCESSOR_FLOATS}
    masks = slot.tensor(layout, "masks").view(layout.sizes.masks, layout.sizes.mask_words)
    return ProcessorInputs(**view, **values, masks=masks, longest=filled.edits.longest)


_PROCESSOR_INTS = (
    "bias_samples",
    "bias_tokens",
    "penalty_samples",
    "penalty_places",
    "penalty_lengths",
    "mask_samples",
)
_PROCESSOR_FLOATS = ("bias_values", "repetition", "presence", "frequency")


def device_inputs(slot: Slot, filled: Filled) -> StepInputs:
    """The device's view of a filled slot."""
    assert filled.bucket is None, "a graph has inputs of its own"
    layout, sizes = filled.layout, filled.layout.sizes
    view = {name: slot.tensor(layout, name) for name, (_, end) in layout.starts.items() if end <= layout.model_words}
    tables = view["block_tables"].view(sizes.groups, sizes.seqs, sizes.width)
    several = sizes.groups > 1
    return StepInputs(
        num_tokens=sizes.tokens,
        num_seqs=sizes.seqs,
        num_decodes=filled.plan.num_decodes,
        num_samples=sizes.samples,
        max_query_len=int(filled.counts.max()),
        max_context_len=int(filled.host_context_lens.max()),
        token_ids=view["token_ids"],
        positions=view["positions"],
        query_starts=view["query_starts"],
        context_lens=view["context_lens"],
        block_tables=tables[0],
        rows=view["rows"],
        sample_index=view["sample_index"],
        host_query_starts=filled.host_query_starts,
        host_context_lens=filled.host_context_lens,
        host_block_tables=filled.host_tables[0],
        group_tables=tuple(tables) if several else (),
        host_group_tables=tuple(filled.host_tables) if several else (),
        sampling=sampling_inputs(slot, filled),
    )


def sampling_inputs(slot: Slot, filled: Filled) -> SamplingInputs:
    """The device's view of how the step's samples are drawn."""
    layout = filled.layout
    any_random, any_top_k, any_top_p, any_min_p = filled.flags
    return SamplingInputs(
        temperature=slot.tensor(layout, "temperature").view(torch.float32),
        top_k=slot.tensor(layout, "top_k"),
        top_p=slot.tensor(layout, "top_p").view(torch.float32),
        min_p=slot.tensor(layout, "min_p").view(torch.float32),
        uniform=slot.tensor(layout, "uniform").view(torch.float32),
        banned_rows=slot.tensor(layout, "banned_rows"),
        banned_tokens=slot.tensor(layout, "banned_tokens"),
        any_random=any_random,
        any_top_k=any_top_k,
        any_top_p=any_top_p,
        any_min_p=any_min_p,
    )
