"""Stop strings: where the answer ends, and what may be shown before that is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbengine import AsyncEngine, FinishReason, InvalidRequestError, UnsupportedFeatureError
from cbengine.execution.commit import Committer
from cbengine.testing import FakeModel
from cbengine.text.stop import StopMatcher
from tests.support.leaks import idle
from tests.support.loops import aio
from tests.text.tokenizers import tokenizer_of


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(end, start) of the stop string that is complete first, looked for one character at a time."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return end, min(starts)
    return None


words = st.text(alphabet="ab", min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=8), stops=st.lists(words, min_size=1, max_size=3))
@pytest.mark.parametrize("include", [False, True])
def test_any_text_in_any_pieces(include: bool, pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    matcher = StopMatcher(stops, include=include)
    shown, hit, seen = "", False, ""
    for piece in pieces:
        seen += piece
        new, hit = matcher.push(piece)
        shown += new
        if hit:
            break
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops), "held back without need"
    found = first_stop(text, stops)
    assert hit == (found is not None)
    if found is None:
        assert shown + matcher.flush() == text
    else:
        end, start = found
        assert shown == text[: end if include else start]


PIECES = ["a", "b", " ", "é", "日本", "🌊", "👩‍👧", "e\u0301", "the", "stop"]
stop_words = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join)


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=10),
    stops=st.lists(stop_words, min_size=1, max_size=3),
    own=st.integers(0, 60),
    cut=st.sampled_from(["text", "pieces", "characters"]),
)
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_characters_of_several_tokens(name: str, pieces: list[str], stops: list[str], own: int, cut: str) -> None:
    """Tokens of real tokenizers, some of which are but a part of a character; the request as the engine holds it."""
    text, tokenizer = "".join(pieces), tokenizer_of(name)
    if own < len(text):
        stops = [*stops, text[own : own + 1 + own % 3]]  # one that is there; now and then half of a cluster
    parts = {"text": [text], "pieces": pieces, "characters": list(text)}[cut]
    ids = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]
    text = tokenizer.decode(ids)
    request: Any = SimpleNamespace(detokenizer=tokenizer.detokenizer(), stops=StopMatcher(stops))
    plain, shown, certain, hit = tokenizer.detokenizer(), "", "", False
    for at, token_id in enumerate(ids):
        last = at + 1 == len(ids)
        certain += plain.push(token_id) + (plain.flush() if last else "")
        new, hit = Committer._text(request, token_id, last)
        shown += new
        if hit:
            break
        held = certain[len(shown) :]
        assert certain.startswith(shown)
        assert not held or (not last and any(stop.startswith(held) and stop != held for stop in stops))
    found = first_stop(text, stops)
    assert hit == (found is not None)
    assert shown == (text if found is None else text[: found[1]])


def test_a_character_of_many_tokens_is_a_stop_string() -> None:
    tokenizer = tokenizer_of("smollm2")
    ids = tokenizer.encode("to the 𒀀 sea", add_special_tokens=False)
    request: Any = SimpleNamespace(detokenizer=tokenizer.detokenizer(), stops=StopMatcher(["𒀀"]))
    texts = []
    for token_id in ids:
        text, hit = Committer._text(request, token_id, False)
        texts.append(text)
        if hit:
            break
    assert "".join(texts) == "to the " and len(texts) >= 5 and texts[-2:] == ["", ""]


def test_nothing_is_matched_in_the_first_tokens() -> None:
    matcher = StopMatcher(["x"], after=2)
    assert [matcher.push("x"), matcher.push("ax")] == [("x", False), ("ax", False)]
    assert matcher.push("bx") == ("b", True)


ENGINE: dict[str, Any] = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 32, "max_requests_per_batch": 8}


@aio("asyncio")
@pytest.mark.parametrize("span", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("at", [0, 3, 10, "last"])
async def test_ends_the_request_there(span: int, at: int | str) -> None:
    """The toy model's tokens are single characters, so that a stop string spans as many tokens as it is long."""
    model = FakeModel(eos_token_ids=())
    prompt = [5, 6, 7]
    plain = model.reference(prompt, 20)
    text = model.tokenizer.decode(plain)
    first = 20 - span if isinstance(at, str) else at
    stop = text[first : first + span]
    expected = first_stop(text, [stop])
    assert expected is not None and (span < 3 or expected == (first + span, first))
    async with AsyncEngine(model, **ENGINE) as engine:
        neighbour = engine.stream(prompt, max_new_tokens=20)
        async with engine.stream(prompt, max_new_tokens=20, stop=[stop, "never there"]) as stream:
            tokens = [token async for token in stream]
            assert "".join(map(str, tokens)) == text[: expected[1]]
            # The token that completes it is the last one, and nothing after it was made.
            assert [token.id for token in tokens] == plain[: expected[0]]
            assert tokens[-1].finish_reason == stream.finish_reason == FinishReason.STOP
        included = await engine.generate(prompt, max_new_tokens=20, stop=stop, include_stop_str_in_output=True)
        assert included.text == text[: expected[0]]
        assert list((await neighbour.result()).token_ids) == plain
        await idle(engine)


@aio
async def test_a_near_miss_is_shown_at_the_end() -> None:
    model = FakeModel(eos_token_ids=())
    prompt = [5, 6, 7]
    text = model.tokenizer.decode(model.reference(prompt, 10))
    async with AsyncEngine(model, **ENGINE) as engine:
        answer = await engine.generate(prompt, max_new_tokens=10, stop=text[-3:] + "~")
        assert answer.text == text and answer.finish_reason == FinishReason.LENGTH


@aio("asyncio")
async def test_bad_values() -> None:
    async with AsyncEngine(FakeModel(), **ENGINE) as engine:
        for bad in ([""], 5, ["a", 5], ""):
            with pytest.raises(InvalidRequestError, match="stop must be"):
                engine.stream([1], stop=bad)  # type: ignore[arg-type]
    model = FakeModel()
    model.tokenizer = None  # type: ignore[assignment]
    async with AsyncEngine(model, **ENGINE) as engine:
        with pytest.raises(UnsupportedFeatureError, match="stop_token_ids"):
            engine.stream([1], stop="x")
