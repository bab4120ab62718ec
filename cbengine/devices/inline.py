"""The reference device: every operation runs when it is launched, on the calling thread."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from cbengine.devices.base import Event, Stream
from cbengine.devices.host import Health, HostDevice, run_operation


class InlineStream(Stream):
    """The name of a queue that is always empty, and what its open span raised."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: BaseException | None = None


class InlineEvent(Event):
    """A mark that is reached as soon as it is recorded."""

    def __init__(self, name: str, health: Health) -> None:
        self.name = name
        self._health = health
        self.error: BaseException | None = None

    def synchronize(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error
        self._health.check()

    def query(self) -> bool:
        return True


class InlineDevice(HostDevice):
    """Runs everything at once, under `torch.inference_mode()`. `launch` and `copy` raise nothing that `fn` raised:
    as on any other device it is raised by `synchronize()` of the event that closes the span, once.
    """

    overlaps = False

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[str, InlineStream] = {}

    def stream(self, name: str) -> InlineStream:
        """The stream of this name, made by the first call."""
        self._health.check_open()
        return self._streams.setdefault(name, InlineStream(name))

    def event(self, name: str = "") -> InlineEvent:
        return InlineEvent(name, self._health)

    def launch(
        self,
        stream: Stream,
        fn: Callable[[], Any],
        *,
        name: str = "",
        reads: Iterable[Hashable | torch.Tensor] = (),
        writes: Iterable[Hashable | torch.Tensor] = (),
    ) -> None:
        own = self._own(stream)
        self._health.check_open()
        if own.error is None:
            with torch.inference_mode():
                own.error = run_operation(fn, self._health)

    def copy(self, stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.launch(stream, lambda: dst.copy_(src), name="copy")

    def record(self, event: Event, stream: Stream) -> None:
        own = self._own(stream)
        self._health.check_open()
        if not isinstance(event, InlineEvent):
            raise TypeError(f"an event of another device was recorded: {event!r}")
        event.error, own.error = own.error, None

    def wait(self, stream: Stream, event: Event) -> None:
        self._own(stream)
        self._health.check_open()  # nothing to wait for: the mark was reached when it was recorded

    def synchronize(self) -> None:
        self._health.check()

    def close(self) -> None:
        self._health.closed = True

    def _own(self, stream: Stream) -> InlineStream:
        if not isinstance(stream, InlineStream) or self._streams.get(stream.name) is not stream:
            raise TypeError(f"a stream of another device was used: {stream!r}")
        return stream
