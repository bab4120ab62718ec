"""Logprobs as a reader gets them: one for each token, whenever its text comes."""

from __future__ import annotations

import math

import pytest

from cbengine import FinishReason
from cbengine.testing import FakeModel
from tests.api.fakes import running
from tests.support.loops import aio

PROMPT = [5, 6, 7]


@aio
async def test_held_back_text_carries_its_own() -> None:
    """A token whose text waits, since a stop string may begin with it, comes at once, with its id and its logprob."""
    model = FakeModel(eos_token_ids=())
    ids = model.reference(PROMPT, 12)
    text = model.tokenizer.decode(ids)
    stop = text[4:8] + "~"  # four tokens are held back, and then are no stop string
    async with running(model) as engine:
        tokens = [token async for token in engine.stream(PROMPT, max_new_tokens=12, logprobs=2, stop=stop)]
        plain = await engine.generate(PROMPT, max_new_tokens=12, logprobs=2)
        stopped = await engine.generate(PROMPT, max_new_tokens=12, logprobs=0, stop=text[4:8])
    assert [token.id for token in tokens] == ids and "".join(map(str, tokens)) == text
    assert [token.text for token in tokens[4:9]] == ["", "", "", "", text[4:9]]
    assert plain.logprobs is not None and plain.top_logprobs is not None
    assert [token.logprob for token in tokens] == list(plain.logprobs)
    assert [token.top_logprobs for token in tokens] == list(plain.top_logprobs)
    for token in tokens:  # greedy: the token is the likeliest
        assert token.top_logprobs is not None and token.top_logprobs[0] == (token.id, token.logprob)
    assert stopped.finish_reason == FinishReason.STOP and stopped.text == text[:4]
    assert stopped.logprobs is not None and len(stopped.logprobs) == len(stopped.token_ids) == 8
    assert stopped.logprobs == plain.logprobs[:8] and stopped.top_logprobs == ((),) * 8


@aio("asyncio")
async def test_for_the_whole_engine() -> None:
    model = FakeModel(eos_token_ids=())
    async with running(model, return_logprobs=True, per_request_processors=False) as engine:
        answer = await engine.generate(PROMPT, max_new_tokens=6)
        more = await engine.generate(PROMPT, max_new_tokens=6, logprobs=3)
    assert answer.logprobs is not None and len(answer.logprobs) == 6 and answer.top_logprobs == ((),) * 6
    # The toy model's best logit is 8, and three runners-up have 7, 6.5 and 6; all others are far below.
    best = -math.log(1 + math.exp(-1) + math.exp(-1.5) + math.exp(-2))
    assert answer.logprobs == pytest.approx([best] * 6, abs=0.05)
    assert more.top_logprobs is not None and all(len(top) == 3 for top in more.top_logprobs)
    async with running(model) as engine:
        assert (await engine.generate(PROMPT, max_new_tokens=6)).logprobs is None
