"""Counting what is alive: objects of our classes, threads, resident memory."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable

import psutil

from cbengine import CompletionIterator, TokenStream
from cbengine.bridge.buffer import StreamBuffer
from cbengine.bridge.inbox import Submit
from cbengine.execution.build import Built
from cbengine.execution.loop import StepLoop
from cbengine.execution.pipeline import Pipeline
from cbengine.execution.worker import Worker
from cbengine.scheduling.request import Request
from cbengine.testing.fake_tokenizer import FakeDetokenizer

Record = Callable[[str, object], None]
"""pytest's `record_property`."""

PER_REQUEST = (CompletionIterator, FakeDetokenizer, Request, StreamBuffer, Submit, TokenStream)
"""Classes with one object, or a few, for each request."""
PER_RUN = (Built, Pipeline, StepLoop, Worker)
"""Classes with one object for each run of an engine."""


def living(*classes: type) -> dict[str, int]:
    """How many objects of these classes are alive, those left out of which there are none."""
    gc.collect()
    counts = Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in classes)
    return dict(counts)


def threads() -> set[str]:
    """Names of the living threads."""
    return {thread.name for thread in threading.enumerate()}


def resident() -> int:
    """Bytes of RAM that the process has."""
    return psutil.Process().memory_info().rss
