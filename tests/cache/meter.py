"""Counts the bytes of the tensors that are alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """Sees every storage that an operation of the entering thread makes, and when it goes.

    What a kernel of torch's allocates within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._keep(storage, storage.nbytes())
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """These do not count, and an operation that returns a view of them makes nothing new."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.live -= self._known.get(storage._cdata, (0, None))[0]
            self._keep(storage, 0)

    def start_again(self) -> None:
        """The peak is from here on."""
        self.peak = self.live

    def _keep(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        self._known[key] = (size, weakref.ref(storage, partial(self._gone, key)))

    def _gone(self, key: int, _: object) -> None:
        self.live -= self._known.pop(key)[0]
