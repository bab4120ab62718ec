"""Biases, penalties, masks and logprobs: against transformers' processors, by themselves and through the whole engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from cbengine import AsyncEngine, Completion, InvalidRequestError
from cbengine.devices.inline import InlineDevice
from cbengine.execution import logprobs
from cbengine.execution.processors import PenaltyLoad, PenaltyTables, ProcessorInputs, process
from cbengine.scheduling.edit import pack_mask
from cbengine.testing import FakeModel
from tests.support.models import Reference

VOCAB = 40


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def floats(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float32)


def make_inputs(**given: Any) -> ProcessorInputs:
    nothing: dict[str, Any] = {name: ints([]) for name in ("bias_samples", "bias_tokens", "mask_samples")}
    nothing |= {name: ints([]) for name in ("penalty_samples", "penalty_places", "penalty_lengths")}
    nothing["longest"] = max(given.get("penalty_lengths", ints([0])).tolist())
    nothing |= {name: floats([]) for name in ("bias_values", "repetition", "presence", "frequency")}
    return ProcessorInputs(**{**nothing, "masks": ints([]).view(0, 0), **given})


def tables(*loads: tuple[list[int], list[int]]) -> PenaltyTables:
    made = PenaltyTables(InlineDevice(), VOCAB)
    for place, (prompt, answer) in enumerate(loads):
        made.load([PenaltyLoad(place, np.array(prompt, np.int32), np.array(answer, np.int32))])
    return made


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.lists(
        st.tuples(prompts, tokens, st.floats(0.1, 3.0), st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=4
    ),
)
def test_penalties(seed: int, rows: list[tuple[list[int], list[int], float, float, float]]) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(len(rows) + 1, VOCAB) * 4
    made = tables(*[(prompt, answer) for prompt, answer, *_ in rows])
    # Samples in another order than places, and one sample without penalties.
    order = list(range(len(rows)))[::-1]
    inputs = make_inputs(
        penalty_samples=ints([len(rows) - 1 - place for place in order]),
        penalty_places=ints(order),
        penalty_lengths=ints([len(rows[place][0]) + len(rows[place][1]) for place in order]),
        repetition=floats([rows[place][2] for place in order]),
        presence=floats([rows[place][3] for place in order]),
        frequency=floats([rows[place][4] for place in order]),
    )
    before = logits.clone()
    result = process(logits, inputs, made)
    assert torch.equal(logits, before)
    assert torch.equal(result[len(rows)], logits[len(rows)])
    for place, (prompt, answer, repetition, presence, frequency) in enumerate(rows):
        sample = len(rows) - 1 - place
        said = torch.tensor([prompt + answer], dtype=torch.long)
        expected = RepetitionPenaltyLogitsProcessor(repetition)(said, logits[sample : sample + 1].clone())[0]
        for token in set(answer):
            expected[token] -= presence + frequency * answer.count(token)
        torch.testing.assert_close(result[sample], expected, rtol=1e-5, atol=1e-5)


def test_penalties_count_what_is_drawn() -> None:
    made = tables(([8], []), ([3], [5, 5]))
    inputs = make_inputs(
        penalty_samples=ints([1, 2]),
        penalty_places=ints([1, 0]),
        penalty_lengths=ints([3, 1]),
        repetition=floats([1, 1]),
        presence=floats([0, 0]),
        frequency=floats([1, 1]),
    )
    made.count(ints([9, 5, 7]), inputs)
    inputs = replace(inputs, penalty_lengths=ints([4, 2]), longest=4)
    result = process(torch.zeros(3, VOCAB), inputs, made)
    assert result[1, 5] == -3 and result[2, 7] == -1 and result[0].eq(0).all()


def test_biases_and_masks() -> None:
    logits = torch.randn(3, VOCAB)
    inputs = make_inputs(
        bias_samples=ints([0, 0, 2]),
        bias_tokens=ints([4, 4, 7]),
        bias_values=floats([2.5, float("-inf"), -1.0]),
        mask_samples=ints([1]),
        masks=torch.from_numpy(pack_mask([0, 31, 32, 39], VOCAB)).unsqueeze(0),
    )
    result = process(logits, inputs, tables())
    assert result[0, 4] == float("-inf") and result[2, 7] == logits[2, 7] - 1
    assert torch.equal(result[1].isfinite().nonzero()[:, 0], torch.tensor([0, 31, 32, 39]))


def test_logprob_reports() -> None:
    logits, drawn = torch.randn(3, VOCAB) * 3, ints([1, 2, 3])
    out = torch.zeros(logprobs.words(3, 4), dtype=torch.int32)
    logprobs.write(out, logits, drawn, 4)
    expected = logits.log_softmax(-1)
    for i, report in enumerate(logprobs.read(out.numpy(), 4, np.array([4, 0, 2]))):
        assert report.logprob == pytest.approx(expected[i, drawn[i]].item(), abs=1e-6)
        best = expected[i].topk((4, 0, 2)[i])
        assert [token for token, _ in report.top] == best.indices.tolist()
        assert [value for _, value in report.top] == pytest.approx(best.values.tolist(), abs=1e-6)


LONG = [504, 3575, 282, 4649, 314, 260, 1165, 23588, 28, 284] * 8

# --- through the engine ----------------------------------------------------------------------------------------------


def answers(model: Any, requests: list[tuple[list[int], dict[str, Any]]], **settings: Any) -> list[Completion]:
    """The answers to all requests at once."""

    async def main() -> list[Completion]:
        async with AsyncEngine(model, **settings) as engine:
            streams = [engine.stream(prompt, **arguments) for prompt, arguments in requests]
            return [await stream.result() for stream in streams]

    return asyncio.run(main())


FAKE: dict[str, Any] = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 32, "max_requests_per_batch": 8}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_edits_in_a_mixed_batch(asynchronous: bool) -> None:
    model, prompt = FakeModel(eos_token_ids=()), [5, 6, 7, 8, 9]
    plain = model.reference(prompt, 12)
    best = plain[3]
    requests: list[tuple[list[int], dict[str, Any]]] = [
        (prompt, {}),
        (prompt, {"allowed_token_ids": [11, 12, 13]}),
        (prompt, {"logit_bias": {best: -100.0}}),
        (prompt, {"bad_words": [[plain[0]], [plain[1], plain[2]]]}),
        (prompt, {"logit_bias": {17: 1000.0}, "frequency_penalty": 2.0}),
    ]
    results = answers(
        model, [(p, {"max_new_tokens": 12, **a}) for p, a in requests], use_async_batching=asynchronous, **FAKE
    )
    assert list(results[0].token_ids) == plain
    assert set(results[1].token_ids) <= {11, 12, 13}
    assert best not in results[2].token_ids
    said = list(results[3].token_ids)
    assert plain[0] not in said and (plain[1], plain[2]) not in itertools.pairwise(said)
    assert results[4].token_ids == (17,) * 12


def test_bad_word_sequences_forbid_only_their_end() -> None:
    model, prompt = FakeModel(eos_token_ids=()), [5, 6, 7]
    plain = model.reference(prompt, 8)
    (result,) = answers(model, [(prompt, {"max_new_tokens": 8, "bad_words": [plain[2:5]]})], **FAKE)
    said = list(result.token_ids)
    assert said[:4] == plain[:4] and said[4] != plain[4]


def test_penalties_survive_preemption() -> None:
    model = FakeModel(eos_token_ids=())
    requests = [
        (
            [5, 6, 7, i],
            {"max_new_tokens": 30, "frequency_penalty": 1.5, "presence_penalty": 1.0, "repetition_penalty": 1.5},
        )
        for i in range(1, 7)
    ]
    quiet = [answers(model, [request], **FAKE)[0].token_ids for request in requests]
    tight = {**FAKE, "num_blocks": 12, "safety_margin": 0.0}

    async def main() -> list[Completion]:
        async with AsyncEngine(model, **tight) as engine:
            streams = [engine.stream(prompt, **arguments) for prompt, arguments in requests]
            results = [await stream.result() for stream in streams]
            assert engine.stats().preemptions > 0
            return results

    assert [result.token_ids for result in asyncio.run(main())] == quiet


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"repetition_penalty": 0}, "above 0"),
        ({"presence_penalty": 3}, "from -2 to 2"),
        ({"frequency_penalty": "much"}, "number"),
        ({"logit_bias": [1]}, "mapping"),
        ({"logit_bias": {1: float("nan")}}, "finite"),
        ({"logit_bias": {97: 1.0}}, "ends at 96"),
        ({"bad_words": "word"}, "list"),
        ({"bad_words": [[]]}, "empty word"),
        ({"allowed_token_ids": []}, "no token could be drawn"),
        ({"allowed_token_ids": [1000]}, "ends at 96"),
        ({"logprobs": 21}, "from 0 to 20"),
    ],
)
def test_bad_values(arguments: dict[str, Any], says: str) -> None:
    async def main() -> None:
        async with AsyncEngine(FakeModel(), **FAKE) as engine:
            with pytest.raises(InvalidRequestError, match=says):
                engine.stream([1, 2, 3], **arguments)

    asyncio.run(main())


def test_prompt_logprobs_of_a_prompt_of_one_token() -> None:
    scored, plain = answers(
        FakeModel(), [([5], {"max_new_tokens": 1, "prompt_logprobs": 0}), ([5], {"max_new_tokens": 1})], **FAKE
    )
    assert scored.prompt_logprobs == (None,) and plain.prompt_logprobs is None


@pytest.mark.parametrize("asynchronous", [True, False])
def test_prompt_logprobs_of_a_split_and_preempted_prompt(asynchronous: bool) -> None:
    """The toy model's logits depend on every token before, so each report must come from the right position."""
    model = FakeModel(eos_token_ids=())
    prompts = [[(7 * i + j * j) % 90 + 1 for j in range(40)] for i in range(4)]
    tight = {**FAKE, "num_blocks": 26, "safety_margin": 0.0, "max_batch_tokens": 16, "use_async_batching": asynchronous}
    alone = [answers(model, [(p, {"max_new_tokens": 1, "prompt_logprobs": 2})], **FAKE)[0] for p in prompts]
    crowd = answers(model, [(p, {"max_new_tokens": 20, "prompt_logprobs": 2}) for p in prompts], **tight)
    again = answers(model, [(p, {"max_new_tokens": 2, "prompt_logprobs": 2}) for p in [*prompts, *prompts]], **FAKE)
    for prompt, quiet, result, second in zip(prompts, alone, crowd, again[4:], strict=True):
        assert quiet.prompt_logprobs == result.prompt_logprobs == second.prompt_logprobs
        assert quiet.prompt_logprobs is not None and len(quiet.prompt_logprobs) == len(prompt)
        assert quiet.prompt_logprobs[0] is None
        for at, report in enumerate(quiet.prompt_logprobs[1:], 1):
            assert report is not None and report.top[0][0] == model.reference(prompt[:at], 1)[0]


@pytest.mark.timeout(240)
def test_smollm2(smollm2: Path, reference_generate: Reference) -> None:
    model = reference_generate.model
    prompt = [504, 3575, 282, 4649, 314]
    ids = torch.tensor([prompt])
    options = {
        "max_new_tokens": 16,
        "do_sample": False,
        "temperature": None,
        "top_p": None,
        "top_k": None,
        "pad_token_id": 0,
    }
    with torch.inference_mode():
        penalised = model.generate(ids, attention_mask=torch.ones_like(ids), repetition_penalty=1.3, **options)
        words = [[plain] for plain in reference_generate(prompt, 3)]
        forbidden = model.generate(ids, attention_mask=torch.ones_like(ids), bad_words_ids=words, **options)
    results = answers(
        str(smollm2),
        [
            (prompt, {"temperature": 0, "max_new_tokens": 16, "repetition_penalty": 1.3}),
            (prompt, {"temperature": 0, "max_new_tokens": 16, "bad_words": words}),
            (prompt, {"temperature": 0, "max_new_tokens": 16, "logprobs": 3}),
            (LONG, {"temperature": 0, "max_new_tokens": 1, "prompt_logprobs": 1}),
            (prompt, {"temperature": 0.8, "seed": 3, "max_new_tokens": 16, "logprobs": 0, "top_p": 0.9}),
        ],
        page_size=16,
        num_blocks=64,
    )
    assert list(results[0].token_ids) == penalised[0, len(prompt) :].tolist()
    assert list(results[1].token_ids) == forbidden[0, len(prompt) :].tolist()
    for result, top in ((results[2], 3), (results[4], 0)):
        with torch.inference_mode():
            whole = model(torch.tensor([prompt + list(result.token_ids)])).logits[0].log_softmax(-1)
        positions = whole[len(prompt) - 1 : -1]
        drawn = positions.gather(1, torch.tensor(result.token_ids).unsqueeze(1))[:, 0]
        assert result.logprobs == pytest.approx(drawn.tolist(), abs=1e-4)
        assert result.top_logprobs is not None and len(result.top_logprobs) == len(result.token_ids)
        for found, position in zip(result.top_logprobs, positions, strict=True):
            assert [value for _, value in found] == pytest.approx(position.topk(top).values.tolist(), abs=1e-4)
    scored = results[3].prompt_logprobs
    with torch.inference_mode():
        whole = model(torch.tensor([LONG])).logits[0].log_softmax(-1)
    expected = whole[:-1].gather(1, torch.tensor(LONG[1:]).unsqueeze(1))[:, 0]
    assert scored is not None and scored[0] is None
    assert [report.logprob for report in scored if report is not None] == pytest.approx(expected.tolist(), abs=1e-4)
