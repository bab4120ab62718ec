"""The command line itself: options, one-line errors, and the whole commands with a real model."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbengine.cli import main
from cbengine.cli.options import add_model_options, make_engine, sampling_options

COMMAND = [sys.executable, "-m", "cbengine.cli"]


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_model_options(parser, max_new_tokens=64)
    return parser.parse_args(["model", *argv])


def test_options_become_settings_and_sampling_parameters() -> None:
    args = parse(
        "--set", "max_batch_tokens=64", "--set", "scheduler_type=prefill_first", "--temperature", "0", "--seed", "7"
    )
    config = make_engine(args).config
    assert (config.max_batch_tokens, config.scheduler_type) == (64, "prefill_first")
    assert sampling_options(args) == {"max_new_tokens": 64, "temperature": 0.0, "seed": 7}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("page_size", "NAME=VALUE"),
        ("page_size=1", "page_size must be at least 4"),
        ("page_size=big", "page_size must be an integer"),
        ("pagesize=8", "unknown setting pagesize"),
        ("config=5", "unknown setting config"),
        ("tokenizer=abc", "unknown setting tokenizer"),
    ],
)
def test_a_wrong_setting_is_one_line(capsys: pytest.CaptureFixture[str], setting: str, message: str) -> None:
    assert main(["demo", "nowhere", "--set", setting]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("cbengine: ")
    assert message in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("command", ["chat", "demo"])
def test_a_wrong_sampling_parameter_is_found_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, "nowhere", "--temperature", "-1"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "cbengine: temperature must be a finite number of at least 0, got -1.0\n" and not shown.out


@pytest.mark.parametrize("command", ["chat", "demo"])
def test_a_model_that_is_not_there_is_no_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert main([command, str(tmp_path / "empty")]) == 1
    assert "cbengine: " in capsys.readouterr().err


def test_a_missing_rich_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "rich" else find(name, *rest))
    assert main(["chat", "model"]) == 1
    assert "pip install 'cbengine[cli]'" in capsys.readouterr().err


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"cbengine {importlib.metadata.version('cbengine')}\n"
    with pytest.raises(SystemExit, match="2"):
        main([])


@pytest.mark.slow
def test_demo_answers_in_a_pipe(smollm2: Path) -> None:
    command = [*COMMAND, "demo", str(smollm2), "--temperature", "0", "--max-new-tokens", "24"]
    command += ["--prompt", "What is the capital of France?", "--prompt", "Explain what rain is to a child."]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "[1] The capital of France is Paris." in done.stdout
    assert "[2] Rain is " in done.stdout


class Terminal:
    """A program whose input and output are a terminal."""

    def __init__(self, command: list[str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)
        self.shown = ""

    def wait_for(self, pattern: str, *, timeout: float = 90.0) -> str:
        """Read until `pattern` has been shown; returns everything shown up to there, and forgets it."""
        deadline = time.monotonic() + timeout
        while (match := re.search(pattern, self.shown)) is None:
            assert self._read(deadline), f"no {pattern!r} in {self.shown!r}"
        before, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def press_ctrl_c(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def exit_status(self, *, timeout: float = 60.0) -> int:
        """Wait for the end of the program, reading what it still shows: a terminal that is not read blocks it."""
        deadline = time.monotonic() + timeout
        while self._read(deadline):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self, deadline: float) -> bool:
        """Read something; False at the deadline, or when the program has closed its end."""
        if not select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            data = os.read(self._master, 4096)
        except OSError:  # how Linux reports that nobody has the other end open
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


@pytest.fixture
def chat(smollm2: Path) -> Iterator[Terminal]:
    terminal = Terminal([*COMMAND, "chat", str(smollm2), "--temperature", "0"])
    yield terminal
    terminal.close()


def test_chat_in_a_terminal(chat: Terminal) -> None:
    chat.wait_for("you> ")
    chat.type("What is the capital of France?\r")
    assert "Paris" in chat.wait_for(r"\(stop, \d+ tokens")
    chat.wait_for("you> ")
    chat.type("Tell me a very long story.\r")
    chat.wait_for(r"story\.\s+\S+ \S+ ")
    chat.press_ctrl_c()
    chat.wait_for(r"\(stopped\)")
    chat.wait_for("you> ")
    time.sleep(0.3)  # nobody is faster, and readline shows its prompt before it can be interrupted
    chat.press_ctrl_c()
    assert chat.exit_status() == 0


def test_ctrl_c_while_loading_ends_it_quietly(chat: Terminal) -> None:
    chat.wait_for("Loading")
    chat.press_ctrl_c()
    assert chat.exit_status() == 130
