"""The API over SmolLM2, against what transformers itself says."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from cbengine import (
    AsyncEngine,
    DuplicateRequestError,
    EmptyPromptError,
    InvalidRequestError,
    PromptTooLongError,
    TokenStream,
)
from tests.api.fakes import read
from tests.api.real import TEXTS
from tests.support.leaks import idle
from tests.support.loops import aio
from tests.support.models import Reference

NEW = 6


@aio("uvloop", "trio")
async def test_a_text_streams_what_transformers_generates(
    real_engine: AsyncEngine, reference_generate: Reference, encode: Any
) -> None:
    ids = encode(TEXTS[0])
    expected = reference_generate(ids, NEW)
    stream = real_engine.stream(TEXTS[0], max_new_tokens=NEW, temperature=0)
    tokens = await read(stream)
    assert [token.id for token in tokens] == expected
    assert "".join(map(str, tokens)) == real_engine.tokenizer.decode(expected) == stream.text_so_far
    assert "Paris" in stream.text_so_far
    assert stream.usage.prompt_tokens == len(ids) and stream.usage.completion_tokens == len(expected)
    await idle(real_engine)


@aio("asyncio")
async def test_every_view_and_every_call_at_once(
    real_engine: AsyncEngine, reference_generate: Reference, encode: Any
) -> None:
    answers: dict[str, str] = {}

    def start(text: str) -> TokenStream:
        return real_engine.stream(text, max_new_tokens=NEW, temperature=0)

    async def tokens(text: str) -> None:
        answers[text] = "".join([str(token) async for token in start(text)])

    async def texts(text: str) -> None:
        answers[text] = "".join([piece async for piece in start(text).text()])

    async def chunks(text: str) -> None:
        answers[text] = "".join([chunk async for chunk in start(text).chunks()])

    async def generate(text: str) -> None:
        answers[text] = (await real_engine.generate(text, max_new_tokens=NEW, temperature=0)).text

    async def batch(*some: str) -> None:
        completions = await real_engine.generate_batch(some, max_new_tokens=NEW, temperature=0)
        answers.update(zip(some, (c.text for c in completions), strict=True))

    async with anyio.create_task_group() as group:
        for read_it, text in zip((tokens, texts, chunks, generate), TEXTS, strict=False):
            group.start_soon(read_it, text)
        group.start_soon(batch, *TEXTS[4:])
    for text in TEXTS:
        expected = real_engine.tokenizer.decode(reference_generate(encode(text), NEW))
        assert answers[text] == expected, text


@aio("asyncio")
async def test_chat_goes_through_the_models_own_template(
    real_engine: AsyncEngine, reference_generate: Reference, encode: Any
) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = real_engine.tokenizer.apply_chat_template(messages)
    assert "<|im_start|>user\nWhat is the capital of France?<|im_end|>" in text
    completion = await real_engine.chat(messages, max_new_tokens=NEW, temperature=0).result()
    assert list(completion.token_ids) == reference_generate(encode(text), NEW)
    assert "Paris" in completion.text and "<|im_end|>" not in completion.text
    for wrong in ([], "hello", [{"content": "no role"}], [{"role": "user"}]):
        with pytest.raises(InvalidRequestError):
            real_engine.chat(wrong)  # type: ignore[arg-type]


@aio("asyncio")
async def test_an_answer_that_ends_by_itself_has_no_end_token_in_its_text(real_engine: AsyncEngine) -> None:
    messages = [{"role": "user", "content": "Say only: yes"}]
    completion = await real_engine.chat(messages, max_new_tokens=20, temperature=0).result()
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] in (0, 2)  # <|endoftext|> or <|im_end|>
    assert completion.text and "<|" not in completion.text


@aio("asyncio")
async def test_bad_input_beside_a_healthy_stream(
    real_engine: AsyncEngine, reference_generate: Reference, encode: Any
) -> None:
    healthy = real_engine.stream(TEXTS[1], max_new_tokens=NEW, temperature=0, request_id="healthy")
    vocab = real_engine.tokenizer.vocab_size
    bad: list[tuple[type[Exception], Any, dict[str, Any]]] = [
        (EmptyPromptError, "", {}),
        (EmptyPromptError, [], {}),
        (InvalidRequestError, [1, vocab + 100], {}),
        (InvalidRequestError, [-1], {}),
        (PromptTooLongError, [5] * 9000, {}),
        (PromptTooLongError, [5] * 2048, {}),  # 128 blocks of 16
        (InvalidRequestError, TEXTS[0], {"temperature": -1}),
        (InvalidRequestError, TEXTS[0], {"max_new_tokens": 0}),
        (InvalidRequestError, TEXTS[0], {"top_p": 2.0}),
        (DuplicateRequestError, TEXTS[0], {"request_id": "healthy"}),
    ]
    for error, prompt, arguments in bad:
        with pytest.raises(error) as caught:
            real_engine.stream(prompt, **arguments)
        assert type(caught.value) is error
    too_long = real_engine.stream("word " * 2100, max_new_tokens=1)
    assert list((await healthy.result()).token_ids) == reference_generate(encode(TEXTS[1]), NEW)
    with pytest.raises(PromptTooLongError, match="the whole cache 2048"):
        await too_long.result()
    await idle(real_engine)


@aio("asyncio")
async def test_counts_while_a_real_model_runs(real_engine: AsyncEngine) -> None:
    before = real_engine.stats()
    streams = [real_engine.stream(text, max_new_tokens=4, temperature=0, ignore_eos=True) for text in TEXTS]
    await streams[-1].__anext__()
    during = real_engine.stats()
    assert during.running + during.waiting > 0 and during.pages_used > 0 and during.labels > 0
    assert during.pages_used + during.pages_free + during.pages_cached + during.pages_reserved == during.pages_total
    for stream in streams:
        await stream.result()
    await idle(real_engine)
    after = real_engine.stats()
    assert after.generated_tokens - before.generated_tokens == 4 * len(TEXTS)
    assert after.requests_finished - before.requests_finished == len(TEXTS)
    assert after.steps > before.steps and after.tokens_per_second > 0
