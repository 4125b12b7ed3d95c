"""A process of its own for each side of a comparison, stopped while the other is measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Worker:
    """Runs `python -m module arguments`; `call` sends it a request and returns the answer.

    The process is stopped (SIGSTOP) whenever it is not answering.
    """

    def __init__(self, module: str, arguments: list[str]) -> None:
        env = dict(os.environ, PYTHONPATH=str(Path(__file__).resolve().parents[1]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self._answer()  # it is ready
        self._process.send_signal(signal.SIGSTOP)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"answer":'):
                return json.loads(line)["answer"]
        raise RuntimeError(f"the worker ended with code {self._process.wait()}")

    def call(self, name: str, *arguments: Any) -> Any:
        """The answer of the worker's function `name`."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End the process."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(functions: dict[str, Callable[..., Any]]) -> None:
    """Answer requests on standard input until it ends."""
    print(json.dumps({"answer": None}), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps({"answer": functions[name](*arguments)}), flush=True)
