"""From the C++ sources in `cpu/` to a shared library: found, or compiled once for each machine.

Looked for in this order: a library that was built into the package (`cpu/lib/`, see `hatch_build.py`) and fits this CPU,
one that this machine compiled before, and the system's compiler. The library needs no header of Python or torch, so that
compiling takes seconds and the result works with every version of both.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "cpu"
BUILT_IN = SOURCES / "lib"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_TIMEOUT = 600  # seconds; a compiler that hangs must not hang the engine for ever

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
VARIANTS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    # Name: flags of the compiler, and what a CPU has to have, in the words of /proc/cpuinfo. The best first.
    "avx512-vnni": (("-march=x86-64-v4", "-mavx512vnni"), frozenset({*_AVX512, "avx512_vnni"})),
    "avx512": (("-march=x86-64-v4",), frozenset(_AVX512)),
    "avx2": (("-march=x86-64-v3",), frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})),
    "portable": ((), frozenset()),
}
"""What a package is built with. A build for this machine alone has the flags of `native_flags` instead."""


class BuildError(Exception):
    """No library could be had; the message says why, in one line."""


def find_or_build() -> Path:
    """The library for this machine. Blocks for some seconds when it has to be compiled.

    Raises:
        BuildError: there is no compiler, or it failed, or the result could not be stored.
    """
    for name in _fitting_variants():
        path = BUILT_IN / library_name(name, source_hash())
        if path.is_file():
            return path
    compiler = find_compiler()
    flags = native_flags()
    key = hashlib.sha256(
        "\n".join((source_hash(), _version(compiler), *flags, *sorted(cpu_flags()))).encode()
    ).hexdigest()[:20]
    path = _cache_folder() / library_name("native", key)
    if not path.is_file():
        try:
            compile_library(compiler, path, flags)
        except BuildError:
            compile_library(compiler, path, ())  # a compiler too old to know this CPU
    return path


def library_name(variant: str, key: str) -> str:
    """File name of a library. The key changes with everything that it was made from."""
    return f"cbengine-{variant}-{platform.machine().lower()}-{key[:20]}.so"


@functools.cache
def source_hash() -> str:
    """Over all sources and flags, 64 hexadecimal digits."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def find_compiler() -> str:
    """Path of the C++ compiler: $CXX, else g++, clang++ or c++ from the PATH.

    Raises:
        BuildError: none of them is there, or the platform is not one that the sources are written for.
    """
    if sys.platform == "win32":
        raise BuildError("the kernels are written for Linux and macOS")
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    for name in wanted:
        found = shutil.which(name)
        if found is not None:
            return found
    raise BuildError(f"no C++ compiler found (looked for {', '.join(wanted)})")


def native_flags() -> tuple[str, ...]:
    """Flags that make the most of the CPU that this runs on."""
    return ("-mcpu=native",) if platform.machine().lower() in ("arm64", "aarch64") else ("-march=native",)


def compile_library(compiler: str, target: Path, flags: tuple[str, ...]) -> None:
    """Compile all sources to `target`, which appears whole or not at all, whoever else does the same at the same time.

    Raises:
        BuildError: the compiler failed, or the folder cannot be written.
    """
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
            made = Path(folder, target.name)
            command = [compiler, *FLAGS, *flags, "-o", str(made), *sources]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
                raise BuildError(f"{compiler} failed: {lines[0] if lines else f'exit status {done.returncode}'}")
            os.replace(made, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"compiling with {compiler} failed: {error}") from error


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU, in the words of /proc/cpuinfo; empty where that does not exist."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        pass
    return frozenset()


def _fitting_variants() -> list[str]:
    return [name for name, (_, needed) in VARIANTS.items() if needed <= cpu_flags()]


@functools.cache
def _version(compiler: str) -> str:
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} does not run: {error}") from error
    return done.stdout


def _cache_folder() -> Path:
    """$XDG_CACHE_HOME/cbengine/kernels, or ~/.cache/…

    Code is loaded from there, so a folder that others can write to is refused.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "cbengine" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except (OSError, RuntimeError) as error:
        raise BuildError(f"no folder to keep the compiled kernels in: {error}") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise BuildError(f"{folder} can be written by others; code is not loaded from there")
    return folder
