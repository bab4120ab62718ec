"""A toy language model whose answers are known without running it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from cbengine.cache.geometry import WRITE_BLOCK, group_of_layers
from cbengine.models.base import LayerSpec, ModelSpec
from cbengine.testing.fake_tokenizer import FakeTokenizer

if TYPE_CHECKING:
    from cbengine.execution.inputs import StepInputs

_EXACT = 2**24  # float32 holds every integer up to here

# An entry of the cache weighs w**4 mod prime, where w is the weighted sum of what K and V of every layer hold there and
# of the place in the context where it was found. (With w**2 the same swap would weigh the same at every place.) All of
# it stays below 2**63.
_PRIME = 2**31 - 1
_WEIGHTS = (  # [layer][K or V][2]; further layers have multiples of these
    ((1_203_117_911, 385_281_523), (972_663_749, 911_382_323)),
    ((1_226_874_159, 742_938_285), (630_360_016, 950_706_376)),
)
_PLACE_WEIGHT = 397_204_094
_LENGTH_WEIGHT = 48_271
_RUNNER_UP_DIVISORS = (1, 1_009, 1_018_081)
_PEAKS = (8.0, 7.0, 6.5, 6.0)  # logits of the best token and of the runners-up; all others are in (-1, 0]


class FakeModel:
    """A deterministic toy language model for tests: no weights, and `reference` says what it answers.

    The next token is a hash of every token of the sequence, read back from the pages of the cache through the block
    tables: K and V of both layers hold token id and position. A page that is mixed up, overwritten, given back too
    early or written too late changes the tokens that follow. The best token's logit is 8, three runners-up have 7, 6.5
    and 6, so sampling with a temperature makes sense too.

    Args:
        vocab_size: at least 8.
        max_model_len: longest sequence, prompt and answer together.
        eos_token_ids: what ends an answer. About one token in `vocab_size` is one of them, for each id.
        generation_defaults: sampling defaults, as a checkpoint's generation config gives them. Default: greedy.
        delay: seconds that each forward sleeps.
        fault: called at the head of each forward with the step's inputs; what it raises is raised there.
        windows: one entry for each layer: its sliding window in tokens (one for all layers that have one), or None for
            full attention. Default: two layers with full attention.
        free: cost nothing: touch no pages and give the same logits for every row. For measuring everything else.

    It can be captured in graphs.

    `delay`, `fault` and `tokenizer` (a `FakeTokenizer`) may be replaced at any time. `forwards` counts the forwards.
    """

    capturable = True

    def __init__(
        self,
        *,
        vocab_size: int = 97,
        max_model_len: int = 4096,
        eos_token_ids: Sequence[int] = (0,),
        generation_defaults: Mapping[str, float | int] | None = None,
        delay: float = 0.0,
        fault: Callable[[StepInputs], None] | None = None,
        windows: Sequence[int | None] = (None, None),
        free: bool = False,
    ) -> None:
        if not 8 <= vocab_size < _EXACT or not 1 <= max_model_len < _EXACT:
            raise ValueError(
                f"vocab_size must be from 8, max_model_len from 1, and both below {_EXACT}: "
                f"got {vocab_size} and {max_model_len}"
            )
        self.spec = ModelSpec(
            name="fake",
            layers=tuple(_layer(window) for window in windows),
            num_heads=1,
            hidden_size=2,
            intermediate_size=8,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            kv_dtype=torch.float32,
            weight_bytes=0,
            eos_token_ids=tuple(eos_token_ids),
            generation_defaults={"temperature": 0.0} if generation_defaults is None else dict(generation_defaults),
        )
        self.tokenizer = FakeTokenizer(vocab_size, special_ids=self.spec.eos_token_ids)
        self.delay = delay
        self.fault = fault
        self.free = free
        self.forwards = 0
        self._kv: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._page_size = 0
        self._background = -torch.arange(vocab_size, dtype=torch.float32) / vocab_size  # no ties: argmax has one answer
        self._group_of = group_of_layers(self.spec.layers)
        self._windows = [windows[self._group_of.index(group)] for group in sorted(set(self._group_of))]
        self._layer_weights = [_layer_weights(layer) for layer in range(len(windows))]
        self._weight_tensors = [torch.tensor(weights) for weights in self._layer_weights]
        # Any token that does not end the answer.
        self._free_token = next(i for i in range(2, vocab_size + 2) if i % vocab_size not in self.spec.eos_token_ids)
        self._free_logits = self._peaked(0)

    def bind(self, kv: list[tuple[torch.Tensor, torch.Tensor]], page_size: int) -> None:
        """See `ModelRunner.bind`. K and V are float32 [num_blocks, page_size, 1, 2]."""
        layers = len(self.spec.layers)
        assert len(kv) == layers, f"the model has {layers} layers, the cache {len(kv)}"
        self._kv = list(kv)
        self._page_size = page_size

    def release(self) -> None:
        """See `ModelRunner.release`."""
        self._kv = []

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits, float32 [num_samples, vocab_size]. Runs on the compute stream."""
        self.forwards += 1
        if self.fault is not None:
            self.fault(inputs)
        if self.delay:
            time.sleep(self.delay)
        if self.free:
            if len(self._free_logits) < inputs.num_samples:
                self._free_logits = self._peaked(2 * inputs.num_samples)
            return self._free_logits[: inputs.num_samples]
        assert self._kv, "forward was called before bind or after release"
        starts = inputs.query_starts.long()
        tokens = torch.arange(inputs.num_tokens)
        # [T] the sequence of each token; padded tokens come after the last one
        sequences = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
        self._write(inputs, sequences)
        samples = inputs.sample_index.long()
        sampled = sequences[samples].clamp(max=inputs.num_seqs - 1)
        # As in attention: the last query sees the whole context, the one before it a token less, and so on.
        lengths = inputs.context_lens[sampled] - (starts[sampled + 1] - 1 - samples)
        total = torch.zeros_like(lengths)
        contexts = inputs.host_context_lens  # a captured step has none, but block tables of a fixed width
        most = int(contexts.max()) if len(contexts) else inputs.max_context_len
        for group, window in enumerate(self._windows):
            tables = inputs.of_group(group).block_tables[sampled].long()
            total = total + self._read(group, tables, lengths, window, most)
        mixed = (total % _PRIME + lengths * _LENGTH_WEIGHT) % _PRIME
        return self._logits(mixed * mixed % _PRIME)

    def reference(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        min_new_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> list[int]:
        """The greedy answer to a prompt, in plain Python: the stop or end-of-sequence token that ends it is its last.

        It has at most `max_new_tokens` tokens, and no more than `max_model_len` leaves room for. The parameters mean
        what they mean in `SamplingParams`.
        """
        ends = {*stop_token_ids, *(() if ignore_eos else self.spec.eos_token_ids)}
        tokens = list(prompt_ids)
        total = sum(self._weight(token, place, len(tokens)) for place, token in enumerate(tokens))
        length = len(tokens)
        answer: list[int] = []
        while len(answer) < max_new_tokens and length < self.spec.max_model_len:
            banned = ends if len(answer) < min_new_tokens else set[int]()
            token = next(token for token in self._best(total % _PRIME, length) if token not in banned)
            answer.append(token)
            if token in ends:
                break
            tokens.append(token)
            length += 1
            total += self._weight(token, length - 1, length)
            for window in self._windows:
                if window is not None and length > window:  # a token has left the window
                    place = length - 1 - window
                    total += self._weight(tokens[place], place, length) - self._weight(tokens[place], place, length - 1)
        return answer

    def _best(self, total: int, length: int) -> list[int]:
        """All tokens, the most likely first. Some may come twice."""
        vocab_size = self.spec.vocab_size
        if self.free:
            return [self._free_token, *range(vocab_size)]
        mixed = (total + length * _LENGTH_WEIGHT) % _PRIME
        mixed = mixed * mixed % _PRIME
        best = mixed % vocab_size
        others = [(best + 1 + mixed // d % (vocab_size - 1)) % vocab_size for d in _RUNNER_UP_DIVISORS]
        return [best, *others, *range(vocab_size)]

    def _write(self, inputs: StepInputs, sequences: torch.Tensor) -> None:
        """Put K and V of the step's tokens into their pages."""
        positions = inputs.positions.long()
        in_step = sequences < inputs.num_seqs
        sequences = sequences.clamp(max=inputs.num_seqs - 1)
        tables = [inputs.of_group(group).block_tables for group in range(len(self._windows))]
        blocks = [table[sequences, positions // self._page_size].long() * in_step for table in tables]
        blocks = [block.clamp(min=WRITE_BLOCK) for block in blocks]  # where padding is written
        offsets = positions % self._page_size
        entry = torch.stack((inputs.token_ids.long(), positions), dim=-1).float().unsqueeze(1)  # [T, 1, 2]
        for layer, (k, v) in enumerate(self._kv):
            shifted = entry + layer  # so that the layers, and K and V, are not interchangeable
            own = blocks[self._group_of[layer]]
            k[own, offsets] = shifted
            v[own, offsets] = shifted.flip(-1)

    def _read(
        self, group: int, tables: torch.Tensor, lengths: torch.Tensor, window: int | None, most: int
    ) -> torch.Tensor:
        """What `lengths` [N] entries (at most `most`) found through `tables` [N, W] weigh, in the layers of one attention type:
        int64 [N] below the prime. With a window, its pages alone are looked at."""
        starts = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0)
        places = starts[:, None] + torch.arange(most if window is None else min(window, most))
        seen = places < lengths[:, None]
        blocks = tables.gather(1, (places // self._page_size).clamp(max=tables.shape[1] - 1)) * seen
        offsets = places % self._page_size
        mixed = places * _PLACE_WEIGHT
        for layer, cache in enumerate(self._kv):
            if self._group_of[layer] == group:
                for part, weight in zip(cache, self._weight_tensors[layer], strict=True):
                    mixed = (mixed + (part[blocks, offsets, 0].long() * weight).sum(-1)) % _PRIME
        mixed = mixed * mixed % _PRIME
        return (mixed * mixed % _PRIME * seen).sum(-1) % _PRIME

    def _weight(self, token: int, place: int, length: int) -> int:
        """What a token adds to the hash of `length` tokens where it is found at its own place; the counterpart of `_read`."""
        total = 0
        for group, window in enumerate(self._windows):
            if window is not None and place < length - window:
                continue
            mixed = place * _PLACE_WEIGHT
            for layer, ((k0, k1), (v0, v1)) in enumerate(self._layer_weights):
                if self._group_of[layer] == group:
                    mixed += (token + layer) * (k0 + v1) + (place + layer) * (k1 + v0)
            total += pow(mixed, 4, _PRIME)
        return total

    def _logits(self, mixed: torch.Tensor) -> torch.Tensor:
        vocab_size = self.spec.vocab_size
        logits = self._background.repeat(len(mixed), 1)
        best = mixed % vocab_size
        # The highest peak last: runners-up may be the same token.
        for peak, divisor in zip(reversed(_PEAKS[1:]), reversed(_RUNNER_UP_DIVISORS), strict=True):
            token = (best + 1 + mixed // divisor % (vocab_size - 1)) % vocab_size
            logits.scatter_(1, token.unsqueeze(1), peak)
        return logits.scatter_(1, best.unsqueeze(1), _PEAKS[0])

    def _peaked(self, num_rows: int) -> torch.Tensor:
        """Rows that all say `_free_token`. float32 [num_rows, vocab_size]."""
        with torch.inference_mode(False):
            logits = self._background.repeat(num_rows, 1)
            logits[:, self._free_token] = _PEAKS[0]
        return logits


def _layer(window: int | None) -> LayerSpec:
    return LayerSpec("full_attention" if window is None else "sliding_attention", 1, 2, window)


def _layer_weights(layer: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of K and of V."""
    factor = 1 + layer // 2 * 7_919
    (k0, k1), (v0, v1) = _WEIGHTS[layer % 2]
    return (k0 * factor % _PRIME, k1 * factor % _PRIME), (v0 * factor % _PRIME, v1 * factor % _PRIME)
