"""Errors as values: they go through copies and between processes with everything that they say."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

import cbengine.errors as errors
from cbengine.errors import CBEngineError, QueueFullError

KINDS: list[type[CBEngineError]] = [
    kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, CBEngineError)
]


def _make(kind: type[CBEngineError]) -> CBEngineError:
    if issubclass(kind, QueueFullError):
        return kind("it is like this", retry_after=2.5, request_id="mine")
    return kind("it is like this", request_id="mine")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_survives_pickle(kind: type[CBEngineError], protocol: int) -> None:
    _check(kind, pickle.loads(pickle.dumps(_make(kind), protocol)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_survives_copies(kind: type[CBEngineError]) -> None:
    error = _make(kind)
    error.add_note("and a note")
    for twin in (copy.copy(error), copy.deepcopy(error)):
        assert twin is not error
        _check(kind, twin)
        assert twin.__notes__ == ["and a note"]


def _check(kind: type[CBEngineError], twin: Any) -> None:
    assert type(twin) is kind and str(twin) == "it is like this" and twin.args == ("it is like this",)
    assert twin.request_id == "mine"
    assert getattr(twin, "retry_after", 2.5) == 2.5
