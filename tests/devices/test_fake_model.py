"""`FakeModel` against its own reference: through shuffled pages, in chunks of any size, alone and packed."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch

from cbengine.execution.inputs import SamplingInputs, StepInputs
from cbengine.testing import FakeModel, FakeTokenizer

PAGE_SIZE = 4
NUM_BLOCKS = 64
RESERVED = 2


@dataclass
class Growing:
    """A sequence that is being computed: its known tokens, how many are in the cache, and its pages."""

    tokens: list[int]
    table: list[int]
    computed: int = 0
    answer: list[int] = field(default_factory=list[int])


class Runner:
    """Pages by hand: a pool that is full of noise, and pages in a random order."""

    def __init__(self, model: FakeModel, seed: int) -> None:
        self.model = model
        self.rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        # As in the engine, the layers are views into one pool: [block][layer][K or V][token][head][dim].
        self.pool = torch.randint(0, 97, (NUM_BLOCKS, 2, 2, PAGE_SIZE, 1, 2), generator=generator).float()
        self.kv = [(self.pool[:, layer, 0], self.pool[:, layer, 1]) for layer in range(2)]
        model.bind(self.kv, PAGE_SIZE)
        self.free = self.rng.sample(range(RESERVED, NUM_BLOCKS), NUM_BLOCKS - RESERVED)

    def sequence(self, prompt: Sequence[int]) -> Growing:
        return Growing(list(prompt), [])

    def step(self, work: Sequence[tuple[Growing, int]], padding: int = 0) -> torch.Tensor:
        """Compute some more tokens of each sequence; those that are complete get a token. Returns the logits.

        `padding` adds that many sequences of the dummy row, with one token each.
        """
        ids, positions, starts, lengths, tables, samples = list[int](), list[int](), [0], list[int](), [], list[int]()
        complete: list[Growing] = []
        for sequence, count in work:
            end = sequence.computed + count
            while len(sequence.table) * PAGE_SIZE < end:
                sequence.table.append(self.free.pop())
            ids += sequence.tokens[sequence.computed : end]
            positions += range(sequence.computed, end)
            starts.append(len(ids))
            lengths.append(end)
            tables.append(sequence.table)
            sequence.computed = end
            if end == len(sequence.tokens):
                samples.append(len(ids) - 1)
                complete.append(sequence)
        for _ in range(padding):
            ids.append(0)
            positions.append(0)
            starts.append(len(ids))
            lengths.append(1)
            tables.append([0])
            samples.append(len(ids) - 1)
        logits = self.model.forward(_inputs(ids, positions, starts, lengths, tables, samples))
        assert logits.shape == (len(samples), self.model.spec.vocab_size) and logits.dtype == torch.float32
        for sequence, token in zip(complete, logits.argmax(-1).tolist(), strict=False):
            sequence.answer.append(token)
            sequence.tokens.append(token)
        return logits


def _inputs(
    ids: list[int],
    positions: list[int],
    starts: list[int],
    lengths: list[int],
    tables: list[list[int]],
    samples: list[int],
) -> StepInputs:
    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def none(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(len(samples), dtype=dtype)

    width = max(map(len, tables)) + 2
    padded = [table + [0] * (width - len(table)) for table in tables]
    floats, integers = none(torch.float32), none(torch.int32)
    counts = np.diff(starts)
    return StepInputs(
        num_tokens=len(ids),
        num_seqs=len(lengths),
        num_decodes=0,
        num_samples=len(samples),
        max_query_len=int(counts.max()),
        max_context_len=max(lengths),
        token_ids=ints(ids),
        positions=ints(positions),
        query_starts=ints(starts),
        context_lens=ints(lengths),
        block_tables=ints(padded),
        rows=ints(list(range(len(lengths)))),
        sample_index=ints(samples),
        host_query_starts=np.array(starts, np.int32),
        host_context_lens=np.array(lengths, np.int32),
        host_block_tables=np.array(padded, np.int32),
        sampling=SamplingInputs(
            floats, integers, floats, floats, floats, integers[:0], integers[:0], False, False, False, False
        ),
    )


def _prompt(rng: random.Random, length: int, vocab_size: int = 97) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]


def _generate(runner: Runner, prompt: list[int], max_new_tokens: int, chunk: int) -> list[int]:
    sequence = runner.sequence(prompt)
    while len(sequence.answer) < max_new_tokens:
        runner.step([(sequence, min(chunk, len(sequence.tokens) - sequence.computed))])
    return sequence.answer


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 1000])
def test_chunks_of_any_size_give_the_reference(chunk: int) -> None:
    model = FakeModel()
    for length in (1, 2, 4, 5, 23):
        prompt = _prompt(random.Random(length), length)
        answer = _generate(Runner(model, seed=length), prompt, 12, chunk)
        assert answer == model.reference(prompt, 12, ignore_eos=True)


@pytest.mark.parametrize("seed", range(5))
def test_packed_sequences_give_what_they_give_alone(seed: int) -> None:
    model, rng = FakeModel(vocab_size=50), random.Random(seed)
    runner = Runner(model, seed)
    prompts = [_prompt(rng, rng.randint(1, 15), 50) for _ in range(5)]
    sequences = [runner.sequence(prompt) for prompt in prompts]
    with torch.inference_mode():
        while any(len(s.answer) < 8 for s in sequences):
            unfinished = [s for s in sequences if len(s.answer) < 8]
            chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
            work = [(s, rng.randint(1, len(s.tokens) - s.computed)) for s in chosen]
            runner.step(work, padding=rng.choice((0, 0, 2)))
    assert [s.answer for s in sequences] == [model.reference(p, 8, ignore_eos=True) for p in prompts]


def test_every_earlier_token_counts() -> None:
    model, prompt = FakeModel(vocab_size=5000), _prompt(random.Random(0), 30)
    answers = {tuple(model.reference(prompt, 4))}
    for place in range(len(prompt)):
        changed = list(prompt)
        changed[place] = (changed[place] + 1) % 97
        answers.add(tuple(model.reference(changed, 4)))
    for place in range(len(prompt) - 1):
        if prompt[place] != prompt[place + 1]:
            swapped = list(prompt)
            swapped[place : place + 2] = reversed(prompt[place : place + 2])
            answers.add(tuple(model.reference(swapped, 4)))
    assert len(answers) == 1 + len(prompt) + sum(a != b for a, b in pairwise(prompt))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("part", [0, 1])
def test_a_page_that_is_overwritten_changes_the_answer(layer: int, part: int) -> None:
    model = FakeModel(vocab_size=5000)
    prompt = _prompt(random.Random(3), 9)
    for page in range(3):
        runner = Runner(model, seed=page)
        sequence = runner.sequence(prompt)
        runner.step([(sequence, 9)])
        runner.kv[layer][part][sequence.table[page], 0] += 1
        runner.step([(sequence, 1)])
        expected = model.reference(prompt, 2, ignore_eos=True)
        assert sequence.answer[0] == expected[0]
        assert sequence.answer[1] != expected[1]


def test_pages_in_the_wrong_order_change_the_answer() -> None:
    model = FakeModel(vocab_size=5000)
    prompt = _prompt(random.Random(4), 9)
    runner = Runner(model, seed=0)
    sequence = runner.sequence(prompt)
    runner.step([(sequence, 9)])
    sequence.table[:2] = reversed(sequence.table[:2])
    runner.step([(sequence, 1)])
    assert sequence.answer[1] != model.reference(prompt, 2, ignore_eos=True)[1]


def test_what_lies_past_the_context_does_not_count() -> None:
    model, prompt = FakeModel(), _prompt(random.Random(5), 6)
    first, second = Runner(model, seed=0), Runner(model, seed=1)  # different noise in the pool
    second.pool[:] = float("nan")
    for runner in (first, second):
        assert _generate(runner, prompt, 5, chunk=100) == model.reference(prompt, 5, ignore_eos=True)


def test_any_token_of_a_chunk_may_be_sampled() -> None:
    runner, prompt = Runner(FakeModel(), seed=0), _prompt(random.Random(6), 11)
    table = [9, 4, 7]
    places = list(range(11))
    for start, end in ((0, 5), (5, 11)):
        chunk = prompt[start:end], places[start:end]
        logits = runner.model.forward(_inputs(*chunk, [0, end - start], [end], [table], places[: end - start]))
        expected = [runner.model.reference(prompt[: i + 1], 1)[0] for i in places[start:end]]
        assert logits.argmax(-1).tolist() == expected


def test_a_step_may_sample_nothing() -> None:
    runner = Runner(FakeModel(), seed=0)
    sequence = runner.sequence(_prompt(random.Random(0), 10))
    assert runner.step([(sequence, 5)]).shape == (0, 97)


def test_logits_have_one_peak_and_runners_up() -> None:
    model = FakeModel()
    runner = Runner(model, seed=0)
    logits = torch.cat([runner.step([(runner.sequence([i]), 1)]) for i in range(20)])
    best = logits.sort(-1, descending=True).values
    assert torch.all(best[:, 0] == 8.0)
    assert torch.all(best[:, 1] < 8.0) and torch.all(best[:, 1] >= 6.0)
    assert torch.all(best[:, 4] <= 0.0)
    assert all(len(set(row.tolist())) == 97 for row in logits)  # no ties: the order is known
    assert len({int(i) for i in logits.argmax(-1)}) > 10


def test_reference_stops_where_the_engine_has_to() -> None:
    model = FakeModel(eos_token_ids=(3, 4), max_model_len=200)
    rng = random.Random(0)
    ended_by_eos = 0
    for _ in range(50):
        prompt = _prompt(rng, 5)
        free, answer = model.reference(prompt, 60, ignore_eos=True), model.reference(prompt, 60)
        ends = [i for i, token in enumerate(free) if token in (3, 4)]
        assert answer == (free[: ends[0] + 1] if ends else free)
        ended_by_eos += bool(ends)
    assert 10 < ended_by_eos < 50
    prompt = _prompt(rng, 5)
    free = model.reference(prompt, 20, ignore_eos=True)
    first = free.index(free[6])
    assert model.reference(prompt, 20, stop_token_ids=(free[6],), ignore_eos=True) == free[: first + 1]
    assert len(model.reference(_prompt(rng, 190), 60, ignore_eos=True)) == 10


def test_reference_follows_the_logits_where_the_end_is_banned() -> None:
    model = FakeModel(vocab_size=8, eos_token_ids=(3,))
    rng, met = random.Random(0), 0
    for seed in range(20):
        prompt = _prompt(rng, 4, 8)
        runner = Runner(model, seed)
        sequence, answer = runner.sequence(prompt), list[int]()
        while len(answer) < 10:
            logits = runner.step([(sequence, len(sequence.tokens) - sequence.computed)])[0]
            met += int(logits.argmax() == 3)
            logits[3] = -torch.inf
            answer.append(int(logits.argmax()))
            sequence.tokens[-1] = answer[-1]
        assert answer == model.reference(prompt, 10, min_new_tokens=10)
    assert met > 5


def test_a_fault_is_raised_at_the_head_of_forward() -> None:
    seen: list[StepInputs] = []

    def fault(inputs: StepInputs) -> None:
        seen.append(inputs)
        if len(seen) == 2:
            raise RuntimeError("planted")

    runner = Runner(FakeModel(fault=fault), seed=0)
    sequence = runner.sequence([1, 2, 3])
    runner.step([(sequence, 2)])
    before = runner.pool.clone()
    with pytest.raises(RuntimeError, match="planted"):
        runner.step([(sequence, 1)])
    assert torch.equal(runner.pool, before)
    assert [inputs.num_tokens for inputs in seen] == [2, 1]
    assert runner.model.forwards == 2


def test_a_delay_is_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    runner = Runner(FakeModel(delay=0.25), seed=0)
    runner.step([(runner.sequence([1]), 1)])
    assert slept == [0.25]


def test_free_of_charge() -> None:
    model = FakeModel(free=True, eos_token_ids=(0, 2))
    runner = Runner(model, seed=0)
    before = runner.pool.clone()
    few = runner.step([(runner.sequence([1, 2]), 2)])
    many = runner.step([(runner.sequence([1]), 1)], padding=40)
    again = runner.step([(runner.sequence([1]), 1)], padding=40)
    assert torch.equal(runner.pool, before)
    assert many.data_ptr() == again.data_ptr()
    assert {int(i) for logits in (few, many) for i in logits.argmax(-1)} == {3}
    assert model.reference([1, 2], 5) == [3] * 5


def test_bind_and_release() -> None:
    model = FakeModel()
    with pytest.raises(AssertionError, match="layers"):
        model.bind([(torch.zeros(1), torch.zeros(1))], PAGE_SIZE)
    runner = Runner(model, seed=0)
    model.release()
    model.release()
    with pytest.raises(AssertionError, match="bind"):
        runner.step([(runner.sequence([1]), 1)])
    assert _generate(Runner(model, seed=1), [1, 2], 3, chunk=2) == model.reference([1, 2], 3, ignore_eos=True)


def test_spec() -> None:
    spec = FakeModel(vocab_size=50, max_model_len=77, eos_token_ids=[3, 4]).spec
    assert (spec.vocab_size, spec.max_model_len, spec.eos_token_ids) == (50, 77, (3, 4))
    assert [(layer.kind, layer.num_kv_heads, layer.head_dim) for layer in spec.layers] == [("full_attention", 1, 2)] * 2
    assert spec.kv_dtype == torch.float32
    assert spec.generation_defaults == {"temperature": 0.0}
    assert FakeModel(generation_defaults={"top_k": 3}).spec.generation_defaults == {"top_k": 3}
    for vocab_size, max_model_len in ((7, 100), (2**24, 100), (8, 0), (8, 2**24)):
        with pytest.raises(ValueError, match="max_model_len"):
            FakeModel(vocab_size=vocab_size, max_model_len=max_model_len)


# The tokenizer


def test_encode_and_decode_are_inverse() -> None:
    tokenizer = FakeTokenizer()
    text = "".join(map(chr, range(32, 127))) + "\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = list(range(1, 97))
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


def test_a_large_vocabulary_has_a_character_for_every_id() -> None:
    tokenizer = FakeTokenizer(70_000)
    text = tokenizer.decode(range(1, 70_000))
    assert len(set(text)) == len(text) == 69_999
    assert text.encode().decode() == text  # no surrogates
    assert tokenizer.encode(text) == list(range(1, 70_000))


def test_special_ids_have_no_text() -> None:
    tokenizer = FakeTokenizer(97, special_ids=(0, 67))
    assert tokenizer.decode([0, 67, 68, 0]) == "b"
    assert tokenizer.encode("a") != [67]
    assert all(i not in (0, 67) for i in tokenizer.encode("abc é 漢\t"))
    assert len(tokenizer.encode("é漢")) == 2
    assert tokenizer.encode("é漢") == tokenizer.encode("é漢", add_special_tokens=False)
    assert FakeModel(eos_token_ids=(9,)).tokenizer.decode([9]) == ""
    with pytest.raises(ValueError, match="special"):
        FakeTokenizer(3, special_ids=(1, 2))
    with pytest.raises(ValueError, match="vocab_size"):
        FakeTokenizer(2)


def test_the_detokenizer_joins_to_the_whole_text() -> None:
    tokenizer = FakeTokenizer()
    detokenizer = tokenizer.detokenizer()
    ids = [0, *tokenizer.encode("Hello, world!\n"), 0]
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == tokenizer.decode(ids) == "Hello, world!\n"


def test_the_chat_template_is_plain_text() -> None:
    tokenizer = FakeTokenizer()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages) == "system: Be brief.\nuser: Hi\nassistant: "
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == "system: Be brief.\nuser: Hi\n"
