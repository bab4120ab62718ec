"""Every error that cbengine raises on purpose.

    CBEngineError
    ├─ RequestError
    │  ├─ InvalidRequestError (ValueError)
    │  │  ├─ EmptyPromptError
    │  │  ├─ PromptTooLongError
    │  │  ├─ DuplicateRequestError
    │  │  └─ UnsupportedFeatureError
    │  ├─ QueueFullError            .retry_after
    │  ├─ RequestTimeoutError (TimeoutError)
    │  └─ RequestFailedError        .__cause__
    ├─ EngineError
    │  ├─ EngineNotStartedError
    │  ├─ EngineStoppedError
    │  └─ EngineDeadError           .__cause__
    └─ StreamError
       ├─ StreamConsumedError
       └─ StreamClosedError

A `RequestError` touches one request and no other. An `EngineError` says that the engine as a whole cannot serve. A
`StreamError` is a misuse of one `TokenStream`. Each carries `.request_id` where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class CBEngineError(Exception):
    """Base of all errors raised by cbengine. `request_id` is the label of the request concerned, if there is one."""

    request_id: str | None

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id

    def __reduce__(self) -> tuple[Callable[..., CBEngineError], tuple[Any, ...], dict[str, Any]]:
        # By default the arguments of `__init__` would be `args`, which lack those given by name. `__cause__` stays behind,
        # as with every exception.
        return _unpickled, (type(self), self.args), self.__dict__


def _unpickled(kind: type[CBEngineError], args: tuple[Any, ...]) -> CBEngineError:
    """An error without its attributes, which `copy` and `pickle` then put back."""
    error = kind.__new__(kind)
    super(CBEngineError, error).__init__(*args)
    return error


class RequestError(CBEngineError):
    """One request cannot be served; every other request goes on."""


class InvalidRequestError(RequestError, ValueError):
    """The request itself is wrong: the message says what was given, what is allowed and what to do."""


class EmptyPromptError(InvalidRequestError):
    """The prompt has no tokens."""


class PromptTooLongError(InvalidRequestError):
    """The prompt is longer than the model's context or than the whole cache."""


class DuplicateRequestError(InvalidRequestError):
    """A living request already has this `request_id`."""


class UnsupportedFeatureError(InvalidRequestError):
    """This model, device or build cannot do what was asked for."""


class QueueFullError(RequestError):
    """The waiting queue is full. `retry_after` is an estimate, in seconds, of when there will be room."""

    retry_after: float

    def __init__(self, message: str, *, retry_after: float, request_id: str | None = None) -> None:
        super().__init__(message, request_id=request_id)
        self.retry_after = retry_after


class RequestTimeoutError(RequestError, TimeoutError):
    """The request's own deadline passed. The tokens made so far stay readable on the stream."""


class RequestFailedError(RequestError):
    """The step that computed this request raised; `__cause__` is what it raised."""


class EngineError(CBEngineError):
    """The engine as a whole cannot serve."""


class EngineNotStartedError(EngineError):
    """The engine has not been started: use `async with engine` or `await engine.start()`."""


class EngineStoppedError(EngineError):
    """The engine was stopped while this request was alive, or before it was made."""


class EngineDeadError(EngineError):
    """The device or the engine's own thread failed; `__cause__` is the fault. `start()` may be tried again."""


class StreamError(CBEngineError):
    """A `TokenStream` was used in a way that it does not allow."""


class StreamConsumedError(StreamError):
    """The stream is being iterated, or was iterated, by someone else: its tokens are delivered once."""


class StreamClosedError(StreamError):
    """The stream was closed before the answer was complete, so there is no result to give."""
