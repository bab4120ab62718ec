"""Which shapes are captured, which of them a step goes into, and what fills the rest of it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbengine.execution.buckets import Bucket, Buckets, Limits, decode_sizes, pad, plan_buckets
from cbengine.execution.slots import Layout


def test_decode_sizes_go_by_eight() -> None:
    assert decode_sizes(40, 64) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert decode_sizes(37, 64) == [1, 2, 4, 8, 16, 24, 32, 37]
    assert decode_sizes(3, 64) == [1, 2, 3]
    assert decode_sizes(1, 64) == [1]
    assert decode_sizes(256, 64) == [1, 2, 4, *range(8, 257, 8)]


@given(limit=st.integers(1, 5000), most=st.integers(1, 80))
def test_decode_sizes_end_at_the_limit_and_are_few(limit: int, most: int) -> None:
    sizes = decode_sizes(limit, most)
    assert len(sizes) <= most and sizes == sorted(set(sizes)) and sizes[0] >= 1
    if most >= limit.bit_length() + 1:
        assert sizes[-1] == limit
    if most >= 64 and limit <= 1024:  # the default
        # at most an eighth of a batch is padding, apart from the smallest
        assert all(b - a <= max(8, a // 8 + 1) for a, b in pairwise(sizes))


def test_the_plan_is_bounded_and_the_largest_come_first() -> None:
    limits = Limits(requests=64, tokens=1000, width=200, page_size=256)
    plan = plan_buckets(limits, varlen=True, decode=True, q_interval=0, kv_interval=0, most=25)
    assert len(plan) == 25 and len(set(plan)) == 25
    assert plan[0] == Bucket(False, 512, 64, 64)  # 64 blocks of 256 are 16,384 tokens
    tokens = [bucket.tokens for bucket in plan]
    assert tokens == sorted(tokens, reverse=True)
    # decode batches of all sizes and mixed ones for short contexts first, then what there is room for
    assert {b.seqs for b in plan if b.decode and b.width == 64} == {1, 2, 4, *range(8, 65, 8)}
    assert {b.tokens for b in plan if not b.decode} == set(range(64, 513, 64))
    assert {b.width for b in plan if b.decode} == {64, 128}


@pytest.mark.parametrize(
    ("varlen", "decode", "paths"), [(True, False, {False}), (False, True, {True}), (False, False, set[bool]())]
)
def test_paths_are_chosen_separately(varlen: bool, decode: bool, paths: set[bool]) -> None:
    limits = Limits(requests=16, tokens=100, width=3, page_size=16)
    plan = plan_buckets(limits, varlen=varlen, decode=decode, q_interval=0, kv_interval=0, most=64)
    assert {bucket.decode for bucket in plan} == paths
    assert all(bucket.tokens <= 100 and bucket.seqs <= 16 and bucket.width == 3 for bucket in plan)


def test_intervals_are_the_users() -> None:
    limits = Limits(requests=16, tokens=100, width=10, page_size=16)
    plan = plan_buckets(limits, varlen=True, decode=True, q_interval=40, kv_interval=64, most=100)
    assert {bucket.tokens for bucket in plan if not bucket.decode} == {40, 80, 100}
    assert {bucket.width for bucket in plan} == {4, 8, 10}


@given(
    data=st.data(),
    requests=st.integers(1, 70),
    width=st.integers(1, 300),
    most=st.integers(1, 90),
)
def test_a_step_gets_the_smallest_shape_that_holds_it(
    data: st.DataObject, requests: int, width: int, most: int
) -> None:
    limits = Limits(requests=requests, tokens=300, width=width, page_size=256)
    plan = plan_buckets(limits, varlen=True, decode=True, q_interval=0, kv_interval=0, most=most)
    buckets = Buckets()
    for bucket in plan:
        buckets.add(bucket)
    decode = data.draw(st.booleans())
    seqs = data.draw(st.integers(1, requests))
    tokens = seqs if decode else data.draw(st.integers(seqs, 300))
    columns = data.draw(st.integers(1, width))
    found = buckets.find(decode=decode, tokens=tokens, seqs=seqs, width=columns)
    fits = [b for b in plan if b.decode is decode and b.tokens >= tokens and b.seqs >= seqs and b.width >= columns]
    assert found == min(fits, key=lambda b: (b.width, b.tokens, b.seqs), default=None)


@given(decode=st.booleans(), seqs=st.integers(0, 5), extra=st.integers(0, 6), groups=st.integers(1, 2))
def test_padding_belongs_to_nobody(decode: bool, seqs: int, extra: int, groups: int) -> None:
    tokens = seqs if decode or not seqs else seqs + extra
    bucket = Bucket(decode, 8 if decode else 16, 8, 3)
    layout = Layout.of(bucket.sizes(groups))
    words = np.full(layout.words, 77, np.int32)

    def section(name: str) -> np.ndarray:
        start, end = layout.starts[name]
        return words[start:end]

    section("query_starts")[: seqs + 1] = np.minimum(np.arange(seqs + 1), tokens)
    if seqs:
        section("query_starts")[seqs] = tokens
    pad(section, bucket, tokens=tokens, seqs=seqs, samples=min(seqs, 2), dummy_row=9)
    starts = section("query_starts")
    lengths = np.diff(starts)
    assert starts[0] == 0 and (lengths >= 0).all() and starts[-1] == (8 if decode else tokens)
    assert (lengths[seqs:] == (1 if decode else 0)).all()
    assert (section("token_ids")[tokens:] == 0).all() and (section("positions")[tokens:] == 0).all()
    assert (section("context_lens")[seqs:] == 0).all() and (section("rows")[seqs:] == 9).all()
    assert (section("block_tables").reshape(groups, 8, 3)[:, seqs:] == 0).all()
    index = section("sample_index")
    assert len(index) == 8 and (index[min(seqs, 2) :] == 0).all()
    # what the step has of its own is left alone, and so is what is not the model's
    assert (section("token_ids")[:tokens] == 77).all() and (words[layout.model_words :] == 77).all()


def test_the_models_inputs_are_one_piece() -> None:
    """So that one copy brings a graph its inputs, wherever the rest of a slot's sections end."""
    bucket = Bucket(True, 8, 8, 3)
    graph, step = Layout.of(bucket.sizes(2)), Layout.of(bucket.sizes(2)._replace(samples=5, padding=3, penalties=4))
    assert graph.model_words == step.model_words < step.words
    model = {name for name, (_, end) in graph.starts.items() if end <= graph.model_words}
    assert {name: graph.starts[name] for name in model} == {name: step.starts[name] for name in model}
    assert model == {"token_ids", "positions", "query_starts", "context_lens", "rows", "sample_index", "block_tables"}
