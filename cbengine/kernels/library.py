"""The compiled kernels as Python sees them: structures, functions, and whether they can be had at all.

Called through ctypes with the addresses of tensors, which releases the interpreter lock for the length of the call.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from pathlib import Path
from typing import Any

from cbengine.kernels.build import BuildError, find_or_build

logger = logging.getLogger("cbengine")

_i32, _i64, _f32, _ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

# Values of the enumerations in cpu/*.h.
F32, BF16, F16, CODES4, CODES8, CODES8_SHORT, INT8 = 0, 1, 2, 3, 4, 5, 6
WHOLE, GATE, UP = 0, 1, 2
STORE, ADD, GATED = 0, 1, 2
EMBED, NORM, PRODUCT, ROPE, ATTEND, QUANTIZE, PICK = 0, 1, 2, 3, 4, 5, 6
TOKENS, SAMPLES = 0, 1
RMS, LAYER = 0, 1
ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2, "relu": 3}


class Matrix(ctypes.Structure):
    """cpu/matrix.h"""

    _fields_ = [("data", _ptr), ("bias", _ptr), ("columns", _i64), ("depth", _i64), ("format", _i32), ("gated", _i32)]


class Product(ctypes.Structure):
    """cpu/matrix.h"""

    _fields_ = [
        *((name, _ptr) for name in ("x", "out")),
        *((name, _i64) for name in ("x_stride", "out_stride", "rows")),
        ("matrix", Matrix),
        ("epilogue", _i32),
        ("activation", _i32),
        ("cap", _f32),
    ]


class Batch(ctypes.Structure):
    """cpu/rows.h"""

    _fields_ = [
        *((name, _i64) for name in ("tokens", "seqs", "samples", "page_size", "table_stride", "table_width")),
        *(
            (name, _ptr)
            for name in ("token_ids", "positions", "query_starts", "context_lens", "tables", "sample_index")
        ),
        *((name, _ptr) for name in ("slots", "order", "alike")),
    ]


class Pages(ctypes.Structure):
    """cpu/rows.h"""

    _fields_ = [("key", _ptr), ("value", _ptr), ("block_stride", _i64), ("token_stride", _i64), ("head_stride", _i64)]


class Embed(ctypes.Structure):
    """cpu/rows.h"""

    _fields_ = [("out", _ptr), ("out_stride", _i64), ("matrix", Matrix), ("table", _ptr), ("scale", _f32)]


class Norm(ctypes.Structure):
    """cpu/rows.h"""

    _fields_ = [
        *((name, _ptr) for name in ("x", "out")),
        *((name, _i64) for name in ("x_stride", "out_stride", "width")),
        *((name, _ptr) for name in ("weight", "bias")),
        *(("integers", _ptr), ("integers_stride", _i64)),
        ("eps", _f32),
        *((name, _i32) for name in ("kind", "add")),
    ]


class Rope(ctypes.Structure):
    """cpu/rows.h"""

    _fields_ = [
        ("x", _ptr),
        *((name, _i64) for name in ("x_stride", "heads", "kv_heads", "dim", "rotary")),
        *((name, _ptr) for name in ("cos", "sin")),
        ("table_rows", _i64),
        *((name, _ptr) for name in ("query_norm", "key_norm")),
        *((name, _f32) for name in ("norm_eps", "clip")),
        ("norm_whole", _i32),
        ("pages", Pages),
    ]


class Attend(ctypes.Structure):
    """cpu/attention.h"""

    _fields_ = [
        *((name, _ptr) for name in ("query", "out")),
        *((name, _i64) for name in ("query_stride", "out_stride", "heads", "kv_heads", "dim", "window")),
        ("sinks", _ptr),
        *((name, _f32) for name in ("scale", "cap")),
        ("pages", Pages),
    ]


class Quantize(ctypes.Structure):
    """cpu/int8.h"""

    _fields_ = [("x", _ptr), ("out", _ptr), *((name, _i64) for name in ("x_stride", "out_stride", "depth"))]


class Pick(ctypes.Structure):
    """cpu/rows.h"""

    _fields_ = [("x", _ptr), ("out", _ptr), *((name, _i64) for name in ("x_stride", "out_stride", "width"))]


class _AnyOperation(ctypes.Union):
    _fields_ = [
        *(("embed", Embed), ("norm", Norm), ("product", Product), ("rope", Rope), ("attend", Attend)),
        *(("quantize", Quantize), ("pick", Pick)),
    ]


class Operation(ctypes.Structure):
    """cpu/api.cpp. The fields of the union can be reached directly: `operation.norm`."""

    _anonymous_ = ("any",)
    _fields_ = [*((name, _i32) for name in ("kind", "rows_of", "group", "unused")), ("any", _AnyOperation)]


_STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    *(Matrix, Batch, Embed, Norm, Product, Rope, Attend),
    *(Quantize, Pick, Operation),
)

_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "cb_size_of": (_i64, (_i32,)),
    "cb_panel_width": (_i32, ()),
    "cb_instructions": (ctypes.c_char_p, ()),
    "cb_team_new": (_ptr, (_i32,)),
    "cb_team_free": (None, (_ptr,)),
    "cb_packed_bytes": (_i64, (_i64, _i64, _i32, _i32)),
    "cb_pack": (_i32, (_ptr, _ptr, _ptr, _i64, _i64, _i32)),
    "cb_unpack": (None, (_ptr, _ptr, _i64, _i64, _i32)),
    "cb_run": (_i32, (_ptr, _ptr, _ptr, _i64)),
    "cb_attend": (_i32, (_ptr, _ptr, _ptr)),
    "cb_product": (_i32, (_ptr, _ptr, _ptr)),
    "cb_row_words": (_i64, (_i64,)),
    "cb_place": (None, (_ptr,)),
    "cb_write_pages": (None, (_ptr, _ptr, _ptr, _ptr, _i64, _i64, _i64, _i64)),
}


class Library:
    """The functions of one shared library, under their names in cpu/api.cpp without the prefix.

    Raises (constructor):
        BuildError: the file is no library for this machine, or one that was made from other sources.
    """

    def __init__(self, path: Path) -> None:
        try:
            handle = ctypes.CDLL(str(path))
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(handle, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name.removeprefix("cb_"), function)
        except (OSError, AttributeError) as error:
            raise BuildError(f"{path} cannot be loaded: {error}") from error
        self.path = path
        sizes = [self.size_of(which) for which in range(len(_STRUCTURES))]
        if sizes != [ctypes.sizeof(structure) for structure in _STRUCTURES]:
            raise BuildError(f"{path} was built from other sources")
        self.width: int = self.panel_width()
        """Columns of one panel of a packed matrix."""
        self.instructions_name: str = self.instructions().decode()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # for type checkers: the functions are attributes, set above


_lock = threading.Lock()


@functools.cache
def _load() -> Library | BuildError:
    """Tried once for each process; what failed will fail again."""
    try:
        library = Library(find_or_build())
    except BuildError as error:
        logger.warning(
            "no CPU kernels: %s. Attention and linear layers run through torch instead, which makes a step two to three "
            "times as long and takes more memory",
            error,
        )
        return error
    logger.debug("CPU kernels: %s (%s)", library.path, library.instructions_name)
    return library


def get_library() -> Library | None:
    """The kernels, or None where they cannot be had; then one warning has said why. May compile, for some seconds."""
    with _lock:
        found = _load()
    return found if isinstance(found, Library) else None
