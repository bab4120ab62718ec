"""CUDA graphs of the forward: captured in warm-up, replayed when a step fits one. Engine thread; replays on `compute`.

One set of graphs serves both slots. A graph reads its inputs where they were when it was captured, so at the head of a step
the slot's are copied into buffers that belong to the graphs, on `compute`: after the replay before, and after that slot's
`inputs_ready` (I7). All graphs share these inputs, the memory of their intermediate results and the logits that they leave
behind: none of it outlives the step, and steps follow each other on `compute`.

What a graph has in it: taking the newest tokens from the device, the model, and its logits. Sampling follows eagerly: what it
does depends on what the batch asks for. Nothing is captured later than in warm-up, so that no request ever waits for it; a
step that fits no graph runs as if there were none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from cbengine.config import EngineConfig
from cbengine.devices.base import Device, DeviceLostError
from cbengine.errors import UnsupportedFeatureError
from cbengine.execution.buckets import Bucket, Buckets, Limits, largest, pad, plan_buckets
from cbengine.execution.host_reads import NoHostReads
from cbengine.execution.inputs import SamplingInputs, StepInputs
from cbengine.execution.slots import Layout
from cbengine.models.base import ModelRunner

logger = logging.getLogger("cbengine")

GRAPHS = "graphs"
"""The race check's name for what the graphs share."""
_NO_HOST_ARRAY = np.zeros(0, np.int32)
"""A captured forward may not look at the host's arrays: what it saw would be frozen."""


@dataclass(frozen=True, slots=True)
class GraphPaths:
    """Which steps are to be run by graphs, and whether the user said so."""

    varlen: bool
    decode: bool
    asked: bool

    @classmethod
    def of(cls, config: EngineConfig, device: Device, runner: ModelRunner) -> GraphPaths:
        """`use_cuda_graph`, or what is best: graphs on both paths where the device has them and the model can be captured.

        As in transformers, a padding interval asks for graphs too.

        Raises:
            UnsupportedFeatureError: graphs were asked for and the model cannot be captured.
        """
        wanted = config.use_cuda_graph
        if wanted is None and (config.q_padding_interval_size or config.kv_padding_interval_size):
            wanted = True
        capturable = bool(getattr(runner, "capturable", False))
        if wanted is None:
            return cls(device.graphs and capturable, device.graphs and capturable, False)
        varlen, decode = wanted if isinstance(wanted, tuple) else (wanted, wanted)
        if (varlen or decode) and not capturable:
            names = ("use_cuda_graph", "q_padding_interval_size", "kv_padding_interval_size")
            asked = [name for name in names if getattr(config, name) not in (None, 0)]
            raise UnsupportedFeatureError(
                f"{', '.join(f'{name}={getattr(config, name)!r}' for name in asked)}: {runner.spec.name} cannot be captured as "
                "it is run here: its attention backend reads lengths on the host; leave "
                f"{' and '.join(asked)} out, or choose another attention_backend"
            )
        return cls(varlen, decode, varlen or decode)


class GraphSet:
    """The graphs of one engine. Empty, and of no cost, until `warm_up`."""

    def __init__(
        self, device: Device, runner: ModelRunner, last_token: torch.Tensor, *, groups: int, page_size: int
    ) -> None:
        self._device = device
        self._runner = runner
        self._last_token = last_token
        self._groups = groups
        self._page_size = page_size
        self._compute = device.stream("compute")
        self._buckets = Buckets()
        self._replays: dict[Bucket, Callable[[], object]] = {}
        self.inputs = device.device_buffer((0,), torch.int32)
        self.logits = device.device_buffer((0, 0), torch.float32)

    def __len__(self) -> int:
        return len(self._replays)

    @property
    def dummy_row(self) -> int:
        """The row that padded sequences name."""
        return len(self._last_token) - 1

    def find(self, *, decode: bool, tokens: int, seqs: int, width: int) -> Bucket | None:
        """The captured shape for such a step, or None: it runs eagerly."""
        if not self._replays:
            return None
        return self._buckets.find(decode=decode, tokens=tokens, seqs=seqs, width=width)

    def run(self, bucket: Bucket, inputs: torch.Tensor) -> torch.Tensor:
        """On `compute`: replay with a slot's `inputs`. Returns logits [S, V], valid until the next replay."""
        words = Layout.of(bucket.sizes(self._groups)).model_words
        self.inputs[:words].copy_(inputs[:words], non_blocking=True)
        self._replays[bucket]()
        return self.logits[: bucket.seqs]

    # --- warm-up ---------------------------------------------------------------------------------------------------

    def warm_up(self, config: EngineConfig, paths: GraphPaths, limits: Limits) -> None:
        """Capture what `config` asks for. At start, when nothing is in flight. Takes about a second for ten graphs.

        Where the model turns out to read values on the host, its path goes on without graphs.

        Raises:
            UnsupportedFeatureError: likewise, if the user asked for graphs.
            DeviceLostError: capturing has ruined the device.
        """
        buckets = plan_buckets(
            limits,
            varlen=paths.varlen,
            decode=paths.decode,
            q_interval=config.q_padding_interval_size,
            kv_interval=config.kv_padding_interval_size,
            most=config.max_cached_graphs,
        )
        if not buckets:
            return
        start = time.perf_counter()
        obstacles = self._capture_all(buckets)
        for decode, obstacle in obstacles.items():
            path = "decode" if decode else "varlen"
            if paths.asked:
                raise UnsupportedFeatureError(
                    f"use_cuda_graph: {self._runner.spec.name} cannot be captured ({path} path): {obstacle}; "
                    f"use_cuda_graph={(False, paths.decode) if not decode else (paths.varlen, False)} leaves it out"
                ) from obstacle
            logger.warning("%s: no graphs on the %s path: %s", self._runner.spec.name, path, obstacle)
        took = time.perf_counter() - start
        logger.info("%s: captured %d graphs in %.1f s", self._runner.spec.name, len(self), took)

    def _capture_all(self, buckets: Sequence[Bucket]) -> dict[bool, Exception]:
        """Capture them in this order. Returns what stood in the way, for each path that it did on."""
        words = max(Layout.of(bucket.sizes(self._groups)).model_words for bucket in buckets)
        self.inputs = self._device.device_buffer((words,), torch.int32)
        host = self._device.host_buffer((words,), torch.int32)
        obstacles: dict[bool, Exception] = {}
        for decode in (False, True):
            bucket = largest(buckets, decode=decode)
            if bucket is not None:
                try:
                    self._try_out(bucket, host, max(b.seqs for b in buckets))
                except DeviceLostError:
                    raise
                except Exception as error:
                    obstacles[decode] = error
        from tqdm.auto import tqdm  # late: most engines capture nothing

        # Shown on a terminal only.
        for bucket in tqdm(buckets, desc="capturing graphs", unit=" graphs", leave=False, disable=None):
            if bucket.decode in obstacles:
                continue
            try:
                self._replays[bucket] = self._capture(bucket, host)
                self._buckets.add(bucket)
            except DeviceLostError:
                raise
            except Exception as error:
                obstacles[bucket.decode] = error
        return obstacles

    def _try_out(self, bucket: Bucket, host: torch.Tensor, most_seqs: int) -> None:
        """Run the largest shape of a path once, to see whether anything makes the host wait, and what logits look like.
        Raises what it met."""
        inputs = self._padding(bucket, host)

        def forward() -> None:
            with NoHostReads():
                logits = self._forward(inputs)
            if len(self.logits) < most_seqs or self.logits.dtype is not logits.dtype:
                self.logits = self._device.device_buffer((most_seqs, logits.shape[1]), logits.dtype)

        self._eagerly(forward, "try out")

    def _capture(self, bucket: Bucket, host: torch.Tensor) -> Callable[[], object]:
        """Run the shape once, so that everything is there that its operations need (workspaces, compiled kernels), and then
        capture it."""
        inputs = self._padding(bucket, host)
        step = partial(self._step, inputs)
        self._eagerly(step, "warm up")
        return self._device.capture(bucket, step)

    def _eagerly(self, fn: Callable[[], None], name: str) -> None:
        device, done = self._device, self._device.event("warm-up")
        device.launch(self._compute, fn, name=name, reads=(GRAPHS,), writes=(GRAPHS,))
        device.record(done, self._compute)
        done.synchronize()

    def _step(self, inputs: StepInputs) -> None:
        """What is captured. On `compute`."""
        self.logits[: inputs.num_seqs].copy_(self._forward(inputs))

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        # Decoding sequences come first and have one token each, so token i is that of sequence i. An id below 0 stands for
        # the row's newest token; chunks have none.
        count = min(inputs.num_tokens, inputs.num_seqs)
        ids = inputs.token_ids[:count]
        ids.copy_(torch.where(ids < 0, self._last_token[inputs.rows[:count].long()], ids))
        return self._runner.forward(inputs)

    def _padding(self, bucket: Bucket, host: torch.Tensor) -> StepInputs:
        """Put nothing but padding into the graphs' inputs; returns them as the model sees them."""
        layout = Layout.of(bucket.sizes(self._groups))
        ints, words = host.numpy(), layout.model_words

        def section(name: str) -> np.ndarray:
            start, end = layout.starts[name]
            return ints[start:end]

        pad(section, bucket, tokens=0, seqs=0, samples=0, dummy_row=self.dummy_row)
        device, ready = self._device, self._device.event("padding")
        device.copy(self._compute, self.inputs[:words], host[:words])
        device.record(ready, self._compute)
        ready.synchronize()  # `host` is written again for the next one
        return self._inputs_of(bucket, layout)

    def _inputs_of(self, bucket: Bucket, layout: Layout) -> StepInputs:
        """The graphs' inputs, cut for one shape. The numbers in it are the shape's: each is an upper bound for every step that
        is padded up to it."""
        view = {
            name: self.inputs[start:end] for name, (start, end) in layout.starts.items() if end <= layout.model_words
        }
        tables = view["block_tables"].view(self._groups, bucket.seqs, bucket.width)
        several = self._groups > 1
        return StepInputs(
            num_tokens=bucket.tokens,
            num_seqs=bucket.seqs,
            num_decodes=bucket.seqs if bucket.decode else 0,
            num_samples=bucket.seqs,
            max_query_len=1 if bucket.decode else bucket.tokens,
            max_context_len=bucket.width * self._page_size,
            token_ids=view["token_ids"],
            positions=view["positions"],
            query_starts=view["query_starts"],
            context_lens=view["context_lens"],
            block_tables=tables[0],
            rows=view["rows"],
            sample_index=view["sample_index"],
            host_query_starts=_NO_HOST_ARRAY,
            host_context_lens=_NO_HOST_ARRAY,
            host_block_tables=_NO_HOST_ARRAY,
            group_tables=tuple(tables) if several else (),
            host_group_tables=(_NO_HOST_ARRAY,) * self._groups if several else (),
            sampling=_NO_SAMPLING,
        )


def _no_sampling() -> SamplingInputs:
    none = torch.zeros(0)
    return SamplingInputs(none, none, none, none, none, none, none, False, False, False, False)


_NO_SAMPLING = _no_sampling()
"""The model does not look at it."""
