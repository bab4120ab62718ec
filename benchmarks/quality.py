"""What `quantization="int8"` costs in quality, against float32 on the same text.

    python benchmarks/quality.py MODEL [MODEL …] [--windows 16] [--length 256] [--answers 16] [--tokens 64] [--json FILE]

The text is Python's own documentation (`pydoc_data.topics`), which comes with every Python, cut into windows.

* Teacher-forced: perplexity, and for how many positions the likeliest next token is the same.
* Greedy: answers to the beginnings of windows: the share of them that are the same to the end, where the others part, and
  the share of all tokens that come before that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import pydoc_data.topics
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cbengine import AsyncEngine, Completion

PROMPT = 48


@dataclass(slots=True)
class Scores:
    """One model, one setting."""

    likelihoods: list[float]
    likeliest: list[int]
    answers: list[tuple[int, ...]]

    @property
    def perplexity(self) -> float:
        return math.exp(-statistics.fmean(self.likelihoods))


@dataclass(slots=True)
class Row:
    """What is printed of a model."""

    model: str
    positions: int
    perplexity_float32: float
    perplexity_int8: float
    perplexity_change: float
    logprob_change: float
    """Mean magnitude of the change of a token's log-probability."""
    same_likeliest: float
    answers: int
    answers_same: float
    tokens_before_parting: float
    median_parting: float | None
    """Of the answers that part: after how many tokens."""


def windows(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Pieces of the text as token ids, spread over all of it."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    step = len(text) // count
    bos = getattr(tokenizer, "bos_token_id", None)
    pieces = []
    for i in range(count):
        ids = tokenizer(text[i * step : i * step + 8 * length], add_special_tokens=False)["input_ids"]
        pieces.append(([bos] if bos is not None else []) + ids[:length])
    return pieces


async def measure(model: str, pieces: list[list[int]], args: argparse.Namespace, quantization: str | None) -> Scores:
    """Run one engine over everything, and end it."""
    engine = AsyncEngine.from_pretrained(model, device="cpu", quantization=quantization)
    likelihoods, likeliest = [], []
    async with engine:
        scored = [engine.generate(ids, max_new_tokens=1, temperature=0.0, prompt_logprobs=1) for ids in pieces]
        for result in await asyncio.gather(*scored):
            for found in result.prompt_logprobs or ():
                if found is not None:
                    likelihoods.append(found.logprob)
                    likeliest.append(found.top[0][0])
        prompts = [ids[:PROMPT] for ids in pieces[: args.answers]]
        options = {"max_new_tokens": args.tokens, "temperature": 0.0, "ignore_eos": True}
        asked = [engine.generate(ids, **options) for ids in prompts]
        results: list[Completion] = await asyncio.gather(*asked)
    return Scores(likelihoods, likeliest, [tuple(result.token_ids) for result in results])


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def compare(model: str, exact: Scores, int8: Scores) -> Row:
    shared = [common(a, b) for a, b in zip(exact.answers, int8.answers, strict=True)]
    lengths = [len(answer) for answer in exact.answers]
    parted = [n for n, length in zip(shared, lengths, strict=True) if n < length]
    pairs = list(zip(exact.likelihoods, int8.likelihoods, strict=True))
    same = [a == b for a, b in zip(exact.likeliest, int8.likeliest, strict=True)]
    return Row(
        model=Path(model).name,
        positions=len(pairs),
        perplexity_float32=exact.perplexity,
        perplexity_int8=int8.perplexity,
        perplexity_change=int8.perplexity / exact.perplexity - 1,
        logprob_change=statistics.fmean(abs(a - b) for a, b in pairs),
        same_likeliest=statistics.fmean(same),
        answers=len(shared),
        answers_same=1 - len(parted) / len(shared),
        tokens_before_parting=sum(shared) / sum(lengths),
        median_parting=statistics.median(parted) if parted else None,
    )


def show(rows: list[Row]) -> None:
    print("| model | perplexity float32 | int8 | change | mean change of a logprob | same likeliest token | ", end="")
    print("greedy answers the same | tokens before parting | median parting |\n|" + "---|" * 9)
    for r in rows:
        parting = "-" if r.median_parting is None else f"{r.median_parting:.0f}"
        print(
            f"| {r.model} | {r.perplexity_float32:.3f} | {r.perplexity_int8:.3f} | {r.perplexity_change:+.2%} | "
            f"{r.logprob_change:.3f} | {r.same_likeliest:.1%} of {r.positions} | {r.answers_same:.0%} of {r.answers} | "
            f"{r.tokens_before_parting:.0%} | {parting} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    rows = []
    for model in args.models:
        pieces = windows(AutoTokenizer.from_pretrained(model), args.windows, args.length)
        exact = asyncio.run(measure(model, pieces, args, None))
        rows.append(compare(model, exact, asyncio.run(measure(model, pieces, args, "int8"))))
    show(rows)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
