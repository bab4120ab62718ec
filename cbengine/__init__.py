"""cbengine: an asyncio-native engine that streams tokens from a language model to many callers at once."""

from cbengine.batching import CompletionIterator
from cbengine.cache.sizing import MemoryPlan
from cbengine.config import EngineConfig
from cbengine.engine import AsyncEngine
from cbengine.errors import (
    CBEngineError,
    DuplicateRequestError,
    EmptyPromptError,
    EngineDeadError,
    EngineError,
    EngineNotStartedError,
    EngineStoppedError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    RequestTimeoutError,
    StreamClosedError,
    StreamConsumedError,
    StreamError,
    UnsupportedFeatureError,
)
from cbengine.observe.counters import EngineStats
from cbengine.observe.health import EngineHealth
from cbengine.options import RequestArguments, RequestOptions
from cbengine.outputs import (
    Completion,
    FinishReason,
    RequestMetrics,
    RequestStatus,
    Token,
    TokenLogprobs,
    ToolCall,
    Usage,
)
from cbengine.sampling import SamplingParams
from cbengine.stream import StreamView, TokenStream
from cbengine.text.parts import ReasoningPart, TextPart, ToolCallPart
from cbengine.text.structured_spec import StructuredSpec

__all__ = [
    "AsyncEngine",
    "CBEngineError",
    "Completion",
    "CompletionIterator",
    "DuplicateRequestError",
    "EmptyPromptError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineHealth",
    "EngineNotStartedError",
    "EngineStats",
    "EngineStoppedError",
    "FinishReason",
    "InvalidRequestError",
    "MemoryPlan",
    "PromptTooLongError",
    "QueueFullError",
    "ReasoningPart",
    "RequestArguments",
    "RequestError",
    "RequestFailedError",
    "RequestMetrics",
    "RequestOptions",
    "RequestStatus",
    "RequestTimeoutError",
    "SamplingParams",
    "StreamClosedError",
    "StreamConsumedError",
    "StreamError",
    "StreamView",
    "StructuredSpec",
    "TextPart",
    "Token",
    "TokenLogprobs",
    "TokenStream",
    "ToolCall",
    "ToolCallPart",
    "UnsupportedFeatureError",
    "Usage",
    "__version__",
]

__version__ = "0.1.0"


def _make_public() -> None:
    """Show the public names under the public module in reprs, tracebacks and docs."""
    for name in __all__:
        if name != "__version__":
            globals()[name].__module__ = "cbengine"


_make_public()
