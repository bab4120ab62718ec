"""The real calls of FlashAttention 2 and 3 and of torch's kernel, into doubles that are stricter than the kernels.

Then the mistakes that others made here, and those that the kernels take in silence: each is planted, and found.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from cbengine.attention import AttentionBackend, LayerKV
from cbengine.attention.flash import Flash2Backend, Flash3Backend, FlashBackend
from cbengine.attention.packed import PackedStep
from cbengine.attention.settings import AttentionSettings
from cbengine.attention.torch_native import TorchBackend
from cbengine.cache.geometry import READ_BLOCK
from cbengine.execution.inputs import StepInputs
from tests.attention.packing import Work, step
from tests.attention.test_backends import Case, cases, check, make_layer
from tests.support.flash_double import HALF, FlashDouble, FlashDoubleError, install

BACKENDS: list[type[AttentionBackend]] = [Flash2Backend, Flash3Backend, TorchBackend]
FLASH: list[type[FlashBackend]] = [Flash2Backend, Flash3Backend]
DECODES = Case([9, 1, 0, 13, 4], [], dim=16)
MIXED = Case([9, 0, 1, 13], [(6, 6), (12, 5), (9, 1), (0, 1)], dim=16, padded_tokens=2)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> FlashDouble:
    """Pages of any multiple of 4 and float32, so that small cases have many pages and exact answers."""
    return install(monkeypatch, dtypes=(*HALF, torch.float32), page_multiple=4)


def off(kind: type[FlashBackend]) -> FlashBackend:
    """Without the fast path."""
    return kind(AttentionSettings(max_blocks_per_request=0))


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases())
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_step(double: FlashDouble, backend: type[AttentionBackend], case: Case) -> None:
    layout = "pool" if case.layout == "odd" else case.layout  # the engine makes no blocks that are not aligned
    page_size = 8 if case.page_size == 5 else case.page_size
    softcap = case.softcap if backend.supports_softcap else None
    check(replace(case, dim=8, page_size=page_size, layout=layout, softcap=softcap, sinks=False), backend())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_decoding_and_mixed_steps(double: FlashDouble, backend: type[AttentionBackend], window: int | None) -> None:
    for case in (DECODES, MIXED, replace(DECODES, group=1), replace(MIXED, group=1)):
        check(replace(case, window=window), backend())
    # Without a window, or with one that nobody reaches, the kernel must not be told of one: it would not group heads then.
    reached = window is not None and window < 16
    expected = {(window - 1, 0)} if window is not None and reached else {(-1, -1)}
    if backend is TorchBackend and not reached:
        expected.add((-1, 0))  # its word for causal, where that makes a difference
    assert {arguments["window_size"] for _, arguments in double.calls} == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", HALF)
def test_what_the_kernels_themselves_demand(
    monkeypatch: pytest.MonkeyPatch, backend: type[AttentionBackend], dtype: torch.dtype
) -> None:
    """Half precision, and pages of 256."""
    install(monkeypatch)
    decodes = Case([300, 2], [], kv_heads=1, group=2, dim=8, page_size=256, dtype=dtype)
    for case in (decodes, replace(decodes, chunks=[(270, 20)], window=30)):
        check(case, backend(), tolerance=3e-2)


@pytest.mark.parametrize("kind", FLASH)
def test_which_function_is_called(double: FlashDouble, kind: type[FlashBackend]) -> None:
    backend = kind(AttentionSettings(max_blocks_per_request=3))
    fast, packed = f"{kind.name}.kvcache", f"{kind.name}.{'varlen' if kind is Flash2Backend else 'packed'}"
    expected = [(DECODES, packed), (replace(DECODES, decodes=[12, 1, 0]), fast), (MIXED, packed)]
    expected.append((replace(DECODES, decodes=[12, 5], window=3), fast))  # sliding layers take it too
    expected.append((replace(DECODES, decodes=[], chunks=[(1, 1), (4, 1)]), packed))
    for case, _ in expected:
        check(case, backend)
    assert double.names() == [name for _, name in expected]
    assert [c["appends"] for name, c in double.calls if name == fast] == [True, True]
    double.calls.clear()
    check(DECODES, off(kind))
    assert double.names() == [packed]


@pytest.mark.parametrize("kind", FLASH)
def test_tokens_that_somebody_else_wrote(double: FlashDouble, kind: type[FlashBackend]) -> None:
    """A fused kernel may have put keys and values into their pages: nothing is appended then."""
    layer = make_layer(Case([], [], dim=8), 4)
    layer.key[2, :3], layer.value[2, :3] = 1.0, 2.0
    backend = kind()
    backend.begin(step([Work(3, 1, [2])]), 4)
    out = backend.attend(layer, torch.ones(1, 6, 8), scale=1.0)
    torch.testing.assert_close(out, torch.full((1, 6, 8), 2.0))
    assert double.calls[0][1]["appends"] is False


@pytest.mark.parametrize("kind", FLASH)
def test_the_two_ways_agree(double: FlashDouble, kind: type[FlashBackend]) -> None:
    """Appended by the kernel or written by us: the same pages and, bit by bit, the same result."""
    results = []
    for backend in (kind(), off(kind)):
        torch.manual_seed(0)
        layer = make_layer(DECODES, 6)
        layer.key[2:4], layer.value[2:4] = torch.randn(2, 2, 4, 2, 16)
        backend.begin(step([Work(6, 1, [2, 4]), Work(4, 1, [3]), Work(0, 1, [])]), 4)
        layer.key[4, 0] = layer.value[4, 0] = 0.5
        backend.write(layer, *torch.randn(2, 3, 2, 16))
        out = backend.attend(layer, torch.randn(3, 6, 16), scale=0.3, window=3)
        results.append((out[:2], layer.key[2:].nan_to_num(), layer.value[2:].nan_to_num()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(set(double.names())) == 2


# --- planted mistakes ---------------------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch, type[Any]], None]


def argument(name: str, change: Callable[[Any], Any], *also: str) -> Plant:
    """Another value for one argument (under any of these names) of whatever kernel is called."""

    def plant(patch: pytest.MonkeyPatch, kind: type[Any]) -> None:
        before = kind.__init__

        def init(self: Any, *args: Any) -> None:
            before(self, *args)
            for attribute in ("_packed", "_decode", "_function"):
                if hasattr(self, attribute):
                    setattr(self, attribute, changing(getattr(self, attribute), (name, *also), change))

        patch.setattr(kind, "__init__", init)

    return plant


def changing(function: Callable[..., Any], names: tuple[str, ...], change: Callable[[Any], Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name in names:
            if bound.arguments.get(name) is not None:
                bound.arguments[name] = change(bound.arguments[name])
        return function(*bound.args, **bound.kwargs)

    return call


def after_packing(change: Callable[[PackedStep], None]) -> Plant:
    """Something else in what `PackedStep` has computed."""

    def plant(patch: pytest.MonkeyPatch, kind: type[Any]) -> None:
        before = PackedStep.__init__

        def init(self: PackedStep, inputs: StepInputs, page_size: int) -> None:
            before(self, inputs, page_size)
            change(self)

        patch.setattr(PackedStep, "__init__", init)

    return plant


def in_fast_path(name: str, change: Callable[[FlashBackend, StepInputs], Any]) -> Plant:
    """Another value for what the fast path has computed."""

    def plant(patch: pytest.MonkeyPatch, kind: type[Any]) -> None:
        before = kind.begin

        def begin(self: FlashBackend, inputs: StepInputs, page_size: int) -> None:
            before(self, inputs, page_size)
            assert self._fast
            setattr(self, name, change(self, inputs))

        patch.setattr(kind, "begin", begin)

    return plant


def wider(window: tuple[int, int]) -> tuple[int, int]:
    return (window[0] + 1, window[1])


def early_freed(tables: torch.Tensor) -> torch.Tensor:
    """The page of the oldest visible token is gone already."""
    return tables.index_fill(1, torch.tensor([1]), READ_BLOCK)


SLIDING = Case([13], [(14, 3)], dim=16, window=7)
PLANTS: dict[str, tuple[type[Any], Case, Plant]] = {
    # transformers 41184: the mask of sliding layers let a key outside the window in.
    "one key too many": (Flash2Backend, replace(MIXED, window=3), argument("window_size", wider)),
    "one key too many while decoding": (Flash3Backend, replace(DECODES, window=3), argument("window_size", wider)),
    "one key too many in torch": (TorchBackend, replace(MIXED, window=3), argument("window_size", wider)),
    # transformers 47911: what is past the window was read.
    "no window": (Flash3Backend, replace(DECODES, window=3), argument("window_size", lambda _: (-1, -1))),
    # vLLM 47728, 47653: pages freed at the position to come, while this step still reads them.
    "freed too early": (Flash2Backend, SLIDING, argument("block_table", early_freed)),
    "freed too early, FA3": (Flash3Backend, SLIDING, argument("page_table", early_freed)),
    "freed too early, torch": (TorchBackend, SLIDING, argument("block_table", early_freed)),
    # sglang 18746, 26380: the table of the next step under this step's forward.
    "another step's table": (
        Flash2Backend,
        replace(DECODES, decodes=[9, 13, 4]),
        argument("block_table", lambda t: t.roll(1, 0)),
    ),
    # The kernel does not advance lengths, nor does it count the new token in.
    "lengths after the append": (Flash2Backend, DECODES, in_fast_path("_before", lambda b, _: b._lens)),
    "lengths two short": (Flash3Backend, DECODES, in_fast_path("_before", lambda b, _: (b._before - 1).clamp(min=0))),
    "a length of -1": (Flash3Backend, DECODES, in_fast_path("_before", lambda b, _: b._lens - 1)),
    "one int for all lengths": (Flash2Backend, Case([4], [], dim=16), argument("cache_seqlens", lambda t: int(t[0]))),
    "padding appends to what padding reads": (
        Flash2Backend,
        DECODES,
        in_fast_path("_tables", lambda _, i: i.block_tables),
    ),
    "the query head of the next group": (Flash3Backend, DECODES, argument("q", lambda q: q.roll(1, 2))),
    "not causal": (Flash2Backend, MIXED, argument("causal", lambda _: False)),
    "not causal in torch": (TorchBackend, MIXED, argument("window_size", lambda _: (-1, -1))),
    "lengths of the queries as the keys'": (
        Flash2Backend,
        MIXED,
        after_packing(lambda s: setattr(s, "key_starts", s.query_starts)),
    ),
    "sums and lengths that disagree": (TorchBackend, MIXED, argument("seqused_k", lambda t: t + 1)),
    # A graph bakes numbers: those of a step that was smaller.
    "max_seqlen_q of a smaller step": (Flash2Backend, MIXED, argument("max_seqlen_q", lambda _: 2)),
    "max_seqlen_q of a smaller step, FA3": (Flash3Backend, MIXED, argument("max_seqlen_q", lambda _: 2)),
    "max_seqlen_k of a smaller step": (TorchBackend, MIXED, argument("max_k", lambda _: 4)),
    "one query each, and cu_seqlens_q ignored": (
        Flash2Backend,
        Case([], [(4, 1), (9, 1), (0, 1)], dim=16, padded_tokens=2),
        argument("max_seqlen_q", lambda _: 1),
    ),
    "rows of nobody left as they are": (Flash2Backend, MIXED, after_packing(lambda s: setattr(s, "_unowned", None))),
    "rows of nobody, torch": (TorchBackend, MIXED, after_packing(lambda s: setattr(s, "_unowned", None))),
    "64-bit tables": (Flash2Backend, DECODES, argument("block_table", lambda t: t.long())),
    "64-bit lengths": (Flash3Backend, DECODES, argument("cache_seqlens", lambda t: t.long())),
    "lengths with gaps": (Flash3Backend, DECODES, argument("cache_seqlens", lambda t: t.repeat_interleave(2)[::2])),
    "a table with gaps": (Flash2Backend, MIXED, argument("block_table", lambda t: t.repeat_interleave(2, 1)[:, ::2])),
    "a table that is too narrow": (Flash3Backend, DECODES, argument("page_table", lambda t: t[:, :-1])),
    "a block past the pool": (Flash3Backend, MIXED, argument("page_table", lambda t: t + 1000)),
    "softcap forgotten": (Flash2Backend, replace(MIXED, softcap=2.0), argument("softcap", lambda _: 0.0)),
    "softcap None": (Flash2Backend, MIXED, argument("softcap", lambda _: 0)),
    "the kernel's own scale": (Flash3Backend, DECODES, argument("softmax_scale", lambda _: 0.25)),
    "grouped heads not announced": (TorchBackend, MIXED, argument("enable_gqa", lambda _: False)),
    "pages of 6 tokens": (Flash2Backend, replace(MIXED, page_size=6), argument("causal", lambda c: c)),
    "heads of 12": (Flash3Backend, replace(MIXED, dim=12), argument("causal", lambda c: c)),
    "keys that are not aligned": (Flash2Backend, replace(MIXED, layout="odd", dim=8), argument("causal", lambda c: c)),
}


@pytest.mark.parametrize("name", PLANTS)
def test_planted_mistake_is_found(double: FlashDouble, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind, case, plant = PLANTS[name]
    plant(monkeypatch, kind)
    with pytest.raises((AssertionError, FlashDoubleError)):
        check(case, kind())
    assert double.calls  # it was found in the call or by its result, not on the way there


def test_without_a_plant_those_cases_pass(double: FlashDouble) -> None:
    """So what is found above is the plant."""
    served = [(kind, case) for kind, case, _ in PLANTS.values() if case.page_size == 4 and case.dim != 12]
    served = [(kind, case) for kind, case in served if case.layout != "odd"]
    assert len(served) == len(PLANTS) - 3
    for kind, case in served:
        check(case, kind())


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (torch.zeros(2, 4, 2, 16), "two sequences append to one place"),
        (torch.zeros(2, 4, 2, 16, dtype=torch.float16), "same dtype"),
    ],
)
def test_what_the_double_refuses_of_an_append(double: FlashDouble, key: torch.Tensor, message: str) -> None:
    backend = Flash2Backend()
    layer = LayerKV.of(torch.zeros(6, 4, 2, 16), torch.zeros(6, 4, 2, 16))
    backend.begin(step([Work(6, 1, [2, 5]), Work(6, 1, [3, 5])]), 4)
    backend.write(layer, key[:, 0], key[:, 1])
    with pytest.raises(FlashDoubleError, match=message):
        backend.attend(layer, torch.zeros(2, 4, 16), scale=1.0)


# --- torch's own function -----------------------------------------------------------------------------------------------


def test_torchs_function_is_called_by_its_own_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch has here (less in older versions) are parameters of the double too, in the same order."""
    real = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    known = list(inspect.signature(real).parameters)
    ours = list(inspect.signature(FlashDouble().varlen_attn).parameters)
    assert [name for name in ours if name in known] == known


def test_older_torch_has_no_block_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    cpu = torch.device("cpu")
    assert TorchBackend.unavailable(cpu) is None
    module = importlib.import_module("torch.nn.attention.varlen")

    def of_torch_2_11(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int) -> None:
        raise AssertionError

    monkeypatch.setattr(module, "varlen_attn", of_torch_2_11)
    assert "torch 2.12" in str(TorchBackend.unavailable(cpu))


def test_no_sums_of_lengths_beside_tables_for_flash3_inside_torch(
    double: FlashDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`activate_flash_attention_impl("FA3")` puts a kernel in place that refuses both at once."""
    attention = importlib.import_module("torch.nn.attention")
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: "FA3", raising=False)
    backend = TorchBackend()
    backend.begin(step([Work(3, 1, [2])]), 4)
    assert backend._key_starts is None
