"""The kernels as they are compiled for different CPUs, as far as this one can run them."""

from __future__ import annotations

import functools
import hashlib

from cbengine.kernels import build
from cbengine.kernels.library import Library

NAMES = [
    "native",
    *(name for name, (_, needed) in build.VARIANTS.items() if needed <= build.cpu_flags() and "avx512" not in name),
]
"""AVX-512 is left out: where it exists, "native" has it."""


@functools.cache
def variant(name: str) -> Library:
    """Compiled once for each state of the sources, which takes some seconds."""
    if name == "native":
        return Library(build.find_or_build())
    flags = build.VARIANTS[name][0]
    key = hashlib.sha256("\n".join((build.source_hash(), *flags)).encode()).hexdigest()
    path = build._cache_folder() / build.library_name(f"test-{name}", key)
    if not path.is_file():
        build.compile_library(build.find_compiler(), path, flags)
    return Library(path)
