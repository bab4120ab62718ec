"""What a graph would freeze, found without a graph.

A captured graph holds the addresses of the memory that was there when it was captured and every Python number that an
operation was called with. Run again with other ones, it quietly computes the old ones. `Baked` runs the function itself each
time and compares every operation with the one at capture.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class BakedValueError(RuntimeError):
    """A replay differs from what was captured in something that a graph would have frozen."""


Call = tuple[str, tuple[object, ...]]
"""Name of an operation, and what it was called with."""


class _Recorder(TorchDispatchMode):
    """Notes every operation: numbers by value; tensors by address and layout, or by which operation made them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._made_by: dict[int, int] = {}  # address of a storage: the operation that made it
        self._kept: list[object] = []  # so that no address is used twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given: list[object] = []
        _flatten(args, given)
        if kwargs:
            _flatten(tuple(kwargs.items()), given)
        arguments = tuple([self._mark(leaf) for leaf in given])
        result = func(*args, **(kwargs or {}))
        known = {_address(leaf) for leaf in given if isinstance(leaf, torch.Tensor)}
        made: list[object] = []
        _flatten((result,), made)
        for leaf in made:
            if isinstance(leaf, torch.Tensor) and _address(leaf) not in known:
                self._made_by.setdefault(_address(leaf), len(self.calls))
        self._kept.append(result)
        self.calls.append((str(func), arguments))
        return result

    def _mark(self, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        layout = (leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.storage_offset())
        made_by = self._made_by.get(_address(leaf))
        if made_by is not None:
            return "the result of operation", made_by, *layout
        # A number that Python turned into a tensor is frozen like any number.
        wrapped = leaf.item() if leaf.ndim == 0 and leaf.device.type == "cpu" and not leaf.is_inference() else None
        return (
            ("memory at", hex(leaf.untyped_storage().data_ptr()), *layout) if wrapped is None else ("number", wrapped)
        )


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _flatten(parts: Sequence[Any], into: list[object]) -> None:
    for part in parts:
        if isinstance(part, (tuple, list)):
            _flatten(part, into)
        else:
            into.append(part)


class Baked:
    """Runs `fn` under inference mode, once when made and again at each call, where it raises `BakedValueError` if anything is
    other than the first time. Values in memory may be. `key` names it in messages."""

    def __init__(self, key: Hashable, fn: Callable[[], Any]) -> None:
        self._key = key
        self._fn = fn
        self._captured = self._run()

    def __call__(self) -> None:
        calls = self._run()
        for index, (now, then) in enumerate(zip(calls, self._captured, strict=False)):
            if now != then:
                raise BakedValueError(f"a replay of {self._key} differs at operation {index}: {_difference(now, then)}")
        if len(calls) != len(self._captured):
            raise BakedValueError(
                f"a replay of {self._key} has {len(calls)} operations, and had {len(self._captured)} when it was captured"
            )

    def _run(self) -> list[Call]:
        recorder = _Recorder()
        with torch.inference_mode(), recorder:
            self._fn()
        return recorder.calls


def _difference(now: Call, then: Call) -> str:
    if now[0] != then[0]:
        return f"{now[0]}, which was {then[0]} when it was captured"
    if len(now[1]) != len(then[1]):
        return f"{now[0]} has {len(now[1])} arguments, and had {len(then[1])} when it was captured"
    parts = [f"{a!r}, which was {b!r}" for a, b in zip(now[1], then[1], strict=True) if a != b]
    return f"{now[0]} has {', and '.join(parts)} when it was captured"
