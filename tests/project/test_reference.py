"""The truth of the parity tests: what transformers answers, remembered."""

from __future__ import annotations

from typing import Any

from tests.support.models import Reference


def test_reference_is_the_greedy_answer(reference_generate: Reference, hf_model: Any) -> None:
    import torch

    prompt = [504, 3575, 282, 4649, 314]  # "The capital of France is"
    answer = reference_generate(prompt, 4)
    ids = list(prompt)
    with torch.inference_mode():
        for token in answer:
            assert int(hf_model(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)
    assert len(answer) == 4


def test_shorter_answers_come_from_longer_ones(hf_model: Any) -> None:
    reference_generate = Reference(hf_model)  # one that remembers nothing of other tests
    prompt = [504, 3575, 282, 4649, 314]
    longer = reference_generate(prompt, 4)
    calls, generate = [], hf_model.generate
    hf_model.generate = lambda *args, **options: calls.append(1) or generate(*args, **options)
    try:
        assert reference_generate(prompt, 3) == longer[:3]
        assert calls == []
        assert reference_generate(prompt, 5)[:4] == longer
        assert calls == [1]
    finally:
        del hf_model.generate


def test_an_answer_is_confirmed_or_put_right(hf_model: Any) -> None:
    """By one forward where all are right; by `generate` for those that are not."""
    prompts = [[504, 3575, 282, 4649, 314], [504, 3575, 282]]
    right = [Reference(hf_model)(prompt, 2, ignore_eos=True) for prompt in prompts]
    reference, calls, generate = Reference(hf_model), [], hf_model.generate
    hf_model.generate = lambda *args, **options: calls.append(1) or generate(*args, **options)
    try:
        assert reference.confirmed(prompts, right) == right
        assert calls == []
        wrong = [right[0], [right[1][0], right[1][1] + 1]]
        assert Reference(hf_model).confirmed(prompts, wrong) == right
        assert calls == [1]
    finally:
        del hf_model.generate


def test_an_answer_ends_with_the_end_token_unless_it_is_ignored(reference_generate: Reference, hf_model: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hf_model.config.name_or_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say hi."}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    ended = reference_generate(prompt, 48)
    assert len(ended) < 48
    assert ended[-1] == hf_model.generation_config.eos_token_id
    ignored = reference_generate(prompt, len(ended) + 2, ignore_eos=True)
    assert ignored[: len(ended)] == ended
    assert len(ignored) == len(ended) + 2
