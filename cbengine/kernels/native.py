"""A decoder as one call into the CPU kernels: no Python, no torch and no interpreter lock between its first and last layer."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from cbengine.kernels import library as lib
from cbengine.kernels.batch import StepBatch
from cbengine.kernels.decoder import Decoder, Layer, Linear, Norm, NormKind, RotaryTables
from cbengine.kernels.library import Library
from cbengine.kernels.matrix import PackedMatrix
from cbengine.kernels.pages import pages_of
from cbengine.kernels.table import EmbeddingTable
from cbengine.kernels.team import address, check, team_of_thread

if TYPE_CHECKING:
    from cbengine.execution.inputs import StepInputs

_KINDS = {
    lib.EMBED: "embedding",
    lib.NORM: "norms",
    lib.PRODUCT: "products",
    lib.ROPE: "rotary, writing pages",
    lib.ATTEND: "attention",
    lib.QUANTIZE: "quantizing",
    lib.PICK: "picking samples",
}
_SMALLEST = 64  # tokens that the buffers hold at least
Packed = Callable[[Linear, PackedMatrix | EmbeddingTable], None]


class _PackedLayer:
    """The matrices of one layer."""

    def __init__(self, library: Library, layer: Layer, packed: Packed, int8: bool) -> None:
        self.qkv = _pack(library, layer.qkv, packed, int8)
        self.out = _pack(library, layer.out, packed, int8)
        self.gate_up = _pack(library, layer.gate_up, packed, int8, gated=True)
        self.down = _pack(library, layer.down, packed, int8)


def _pack(library: Library, linear: Linear, packed: Packed, int8: bool, gated: bool = False) -> PackedMatrix:
    matrix = PackedMatrix(library, linear.weights, linear.biases, gated=gated, int8=int8)
    packed(linear, matrix)
    linear.weights, linear.sources = [], []
    return matrix


class NativeDecoder:
    """Packs a decoder's weights, and runs it over a paged cache.

    Args:
        decoder: taken over; its large weights are dropped from it, one by one.
        packed: called for every linear layer once it has been packed, so that its weights can be given up. Any thread.
        int8: the products of linear layers are those of small integers (see `PackedMatrix`). All else stays as it is: the
            embedding, norms, attention, keys and values.

    Raises:
        ValueError: with `int8`, a weight is not finite.

    A token's logits do not depend, bit by bit, on what else is in the step, on how its prompt was cut into chunks, or on the
    number of threads.
    """

    def __init__(self, library: Library, decoder: Decoder, packed: Packed, *, int8: bool = False) -> None:
        self._library = library
        self._decoder = decoder
        self._hidden = decoder.embedding.shape[1]
        self._embedding: EmbeddingTable | PackedMatrix | None = None
        if not decoder.tied:
            self._embedding = EmbeddingTable(decoder.embedding)
            packed(Linear([decoder.embedding], [None]), self._embedding)
        elif int8:  # the output matrix does not have the embedding's rows exactly
            self._embedding = PackedMatrix(library, [decoder.embedding])
        decoder.embedding = torch.empty(0)
        # Looking for how weights can be kept takes a second or two for a billion of them.
        with ThreadPoolExecutor(torch.get_num_threads(), "cbengine-pack") as pool:
            head = pool.submit(_pack, library, decoder.head, packed, int8)
            self._layers = list(pool.map(lambda layer: _PackedLayer(library, layer, packed, int8), decoder.layers))
            self._head = head.result()
        self._norms: list[torch.Tensor] = []  # keeps contiguous copies alive
        self._kv: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tokens = 0
        self._rotary = RotaryTables(decoder.rotaries, decoder.max_positions)
        groups = 1 + max(layer.attention.group for layer in decoder.layers)
        self._batches = (lib.Batch * groups)()
        self._filled = [StepBatch(self._batches[i]) for i in range(groups)]

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        matrices = [m for p in self._layers for m in (p.qkv, p.out, p.gate_up, p.down)]
        rest = 0 if self._embedding is None else self._embedding.nbytes
        return sum(m.nbytes for m in [*matrices, self._head]) + rest

    def bind(self, kv: Sequence[tuple[torch.Tensor, torch.Tensor]], page_size: int) -> None:
        """Give each layer its pages, [blocks, page_size, kv_heads, dim] float32."""
        self._kv = list(kv)
        self._page_size = page_size
        self._tokens = 0  # the operations are made anew

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits of `inputs.sample_index`, float32 [N + P, vocabulary]. Compute thread."""
        rows = max(inputs.num_tokens, len(inputs.sample_index))
        if rows > self._tokens:
            self._allocate(max(_SMALLEST, 1 << (rows - 1).bit_length()))
        if self._rotary.grow(int(inputs.positions.max()) + 1):
            self._point_to_tables()
        for group, batch in enumerate(self._filled):
            batch.fill(inputs.of_group(group), self._page_size)
            self._library.place(batch.pointer)
        logits = torch.empty(len(inputs.sample_index), self._head.columns)
        self._operations[-1].product.out = logits.data_ptr()
        team = team_of_thread(self._library)
        check(
            self._library.run(team, ctypes.byref(self._batches), ctypes.byref(self._operations), len(self._operations))
        )
        return logits

    def profile(self) -> tuple[float, dict[str, float]]:
        """Where the time of a step goes, by running the last one again: seconds of the whole, and of its operations by kind
        where each is a call of its own, which leaves nobody waiting for another. Changes nothing. Compute thread."""
        team = team_of_thread(self._library)
        logits = torch.empty(self._batches[0].samples, self._head.columns)
        self._operations[-1].product.out = logits.data_ptr()
        start = time.perf_counter()
        check(
            self._library.run(team, ctypes.byref(self._batches), ctypes.byref(self._operations), len(self._operations))
        )
        whole, parts = time.perf_counter() - start, dict.fromkeys([*_KINDS.values(), "head"], 0.0)
        for index, operation in enumerate(self._operations):
            start = time.perf_counter()
            check(self._library.run(team, ctypes.byref(self._batches), ctypes.byref(operation), 1))
            name = "head" if index == len(self._operations) - 1 else _KINDS[operation.kind]
            parts[name] += time.perf_counter() - start
        return whole, parts

    def _allocate(self, tokens: int) -> None:
        """Buffers for `tokens` tokens or sampled rows, and the operations that use them."""
        first = self._layers[0]
        widths = {
            "x": self._hidden,
            "normed": self._hidden,
            "qkv": max(p.qkv.columns for p in self._layers),
            "attended": first.out.depth,
            "gated": max(p.gate_up.columns for p in self._layers),
            "product": self._hidden,
            "last": self._hidden,
        }
        self._buffers, self._tokens = {}, 0  # the old ones go before the new ones come
        self._buffers = {name: torch.zeros(tokens, width) for name, width in widths.items()}
        depths = {"normed": self._hidden, "x": self._hidden, "attended": first.out.depth, "gated": first.down.depth}
        self._integers = {
            name: torch.zeros(tokens, self._library.row_words(depth), dtype=torch.int32)
            for name, depth in depths.items()
            if self._head.int8
        }
        if self._integers:  # what the sampled rows are picked into
            self._integers |= {"last": self._integers["x"], "qkv": self._integers["attended"]}
        self._tokens = tokens
        self._norms.clear()
        operations = [self._embed()]
        layers = list(zip(self._decoder.layers, self._layers, self._kv, strict=True))
        for layer, packed, kv in layers[:-1]:
            operations += self._attention(layer, packed, kv) + self._after_attention(layer, packed)
        operations += self._attention(*layers[-1])
        operations += self._of_samples(*layers[-1][:2])
        self._operations = (lib.Operation * len(operations))(*operations)
        self._point_to_tables()

    def _attention(
        self, layer: Layer, packed: _PackedLayer, kv: tuple[torch.Tensor, torch.Tensor]
    ) -> list[lib.Operation]:
        """attended = attention(rope(clip(qkv(before_attention(x)))))"""
        source, operations = self._before(layer.before_attention, "x")
        operations.append(self._product(packed.qkv, source, "qkv"))
        return [*operations, self._rope(layer, kv), self._attend(layer, kv)]

    def _after_attention(
        self, layer: Layer, packed: _PackedLayer, x: str = "x", attended: str = "attended"
    ) -> list[lib.Operation]:
        """The rest of the layer: x += after_attention(out(attended)), then x += after_mlp(mlp(before_mlp(x)))"""
        operations = self._quantized(attended, packed.out.depth)
        operations += self._add(packed.out, attended, x, layer.after_attention)
        source, before = self._before(layer.before_mlp, x)
        operations += before
        operations.append(self._product(packed.gate_up, source, "gated", activation=layer.activation.value))
        operations += self._quantized("gated", packed.down.depth)
        return operations + self._add(packed.down, "gated", x, layer.after_mlp)

    def _of_samples(self, layer: Layer, packed: _PackedLayer) -> list[lib.Operation]:
        """What is left after the last attention: nobody asks for more than the logits of the sampled tokens, so from here on
        it is computed for those alone (of a prompt, for its last one). Their rows are picked into buffers that are free."""
        width = packed.out.depth
        operations = [self._pick("attended", "qkv", width), self._pick("x", "last", self._hidden)]
        operations += self._after_attention(layer, packed, "last", "qkv")
        operations.append(self._norm(self._decoder.norm, "last", "normed"))
        operations.append(self._product(self._head, "normed", None, cap=self._decoder.head_cap))
        for operation in operations:
            operation.rows_of = lib.SAMPLES
        return operations

    def _before(self, norm: Norm | None, x: str) -> tuple[str, list[lib.Operation]]:
        """The buffer that a product reads norm(x) from, and what puts it there."""
        if norm is None:
            return x, self._quantized(x, self._hidden)
        return "normed", [self._norm(norm, x, "normed")]

    def _add(self, matrix: PackedMatrix, source: str, x: str, after: Norm | None) -> list[lib.Operation]:
        """x += after(source times the matrix)"""
        if after is None:
            return [self._product(matrix, source, x, add=True)]
        return [self._product(matrix, source, "product"), self._norm(after, "product", x, add=True)]

    def _embed(self) -> lib.Operation:
        out, table = self._buffers["x"], self._embedding
        rows = table.data.data_ptr() if isinstance(table, EmbeddingTable) else None  # else columns of a packed matrix
        embed = lib.Embed(
            out=out.data_ptr(),
            out_stride=out.stride(0),
            matrix=self._head.structure if table is None else table.structure,
            table=rows,
            scale=self._decoder.embedding_scale,
        )
        return lib.Operation(kind=lib.EMBED, embed=embed)

    def _norm(self, norm: Norm, source: str, target: str, *, add: bool = False) -> lib.Operation:
        x, out, integers = self._buffers[source], self._buffers[target], self._integers.get(target)
        structure = lib.Norm(
            x=x.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            width=self._hidden,
            weight=self._kept(norm.weight),
            bias=self._kept(norm.bias),
            integers=None if add else address(integers),
            integers_stride=0 if integers is None else integers.stride(0),
            eps=norm.eps,
            kind=lib.LAYER if norm.kind is NormKind.LAYER else lib.RMS,
            add=add,
        )
        return lib.Operation(kind=lib.NORM, norm=structure)

    def _pick(self, source: str, target: str, width: int) -> lib.Operation:
        """The sampled tokens' rows of one buffer, from the first row of another on."""
        x, out = self._buffers[source], self._buffers[target]
        pick = lib.Pick(x.data_ptr(), out.data_ptr(), x.stride(0), out.stride(0), width)
        return lib.Operation(kind=lib.PICK, pick=pick)

    def _quantized(self, source: str, depth: int) -> list[lib.Operation]:
        """What makes a buffer fit for a product, if anything: its rows as integers. A norm does that itself."""
        if source not in self._integers:
            return []
        x, out = self._buffers[source], self._integers[source]
        structure = lib.Quantize(x.data_ptr(), out.data_ptr(), x.stride(0), out.stride(0), depth)
        return [lib.Operation(kind=lib.QUANTIZE, quantize=structure)]

    def _product(
        self,
        matrix: PackedMatrix,
        source: str,
        target: str | None,
        *,
        add: bool = False,
        activation: str = "none",
        cap: float | None = None,
    ) -> lib.Operation:
        x = self._integers[source] if matrix.int8 else self._buffers[source]
        out = None if target is None else self._buffers[target]
        structure = lib.Product(
            x=x.data_ptr(),
            out=address(out),
            x_stride=x.stride(0),
            out_stride=matrix.columns if out is None else out.stride(0),
            matrix=matrix.structure,
            epilogue=lib.GATED if matrix.gated else lib.ADD if add else lib.STORE,
            activation=lib.ACTIVATIONS[activation],
            cap=cap or 0.0,
        )
        return lib.Operation(kind=lib.PRODUCT, product=structure)

    def _rope(self, layer: Layer, kv: tuple[torch.Tensor, torch.Tensor]) -> lib.Operation:
        a, x = layer.attention, self._buffers["qkv"]
        query_norm, key_norm = a.query_norm, a.key_norm
        structure = lib.Rope(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            heads=a.heads,
            kv_heads=a.kv_heads,
            dim=a.dim,
            rotary=a.rotary,
            query_norm=None if query_norm is None else self._kept(query_norm.weight),
            key_norm=None if key_norm is None else self._kept(key_norm.weight),
            norm_eps=0.0 if query_norm is None else query_norm.eps,
            clip=a.clip or 0.0,
            norm_whole=a.norm_whole,
            pages=pages_of(*kv),
        )
        return lib.Operation(kind=lib.ROPE, group=a.group, rope=structure)

    def _attend(self, layer: Layer, kv: tuple[torch.Tensor, torch.Tensor]) -> lib.Operation:
        a, query, out = layer.attention, self._buffers["qkv"], self._buffers["attended"]
        structure = lib.Attend(
            query=query.data_ptr(),
            out=out.data_ptr(),
            query_stride=query.stride(0),
            out_stride=out.stride(0),
            heads=a.heads,
            kv_heads=a.kv_heads,
            dim=a.dim,
            window=a.window or 0,
            sinks=self._kept(a.sinks),
            scale=a.scale,
            cap=a.softcap or 0.0,
            pages=pages_of(*kv),
        )
        return lib.Operation(kind=lib.ATTEND, group=a.group, attend=structure)

    def _kept(self, tensor: torch.Tensor | None) -> int | None:
        """Address of a small tensor as contiguous float32, which stays alive with the operations."""
        if tensor is None:
            return None
        dense = tensor.detach().float().contiguous()
        self._norms.append(dense)
        return dense.data_ptr()

    def _point_to_tables(self) -> None:
        if not self._rotary.rows:
            return
        layers = iter(self._decoder.layers)
        for operation in self._operations:
            if operation.kind == lib.ROPE:
                cos, sin = self._rotary.tables[next(layers).attention.table]
                operation.rope.cos, operation.rope.sin = cos.data_ptr(), sin.data_ptr()
                operation.rope.table_rows = self._rotary.rows
