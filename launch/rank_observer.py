"""What ranks other than the first tell of a run: their warnings, each with the rank's number.

Progress and the files of the run are rank 0's. What others have to say is either the same there, or
a warning about their own machine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from launch.ranks import rank_prefix

_WARNING = "warning: "


class RankObserver:
    """Observer that is silent but for warnings, which go to `output` (default stderr)."""

    def __init__(self, output: TextIO | None = None) -> None:
        self._output = output or sys.stderr

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Nothing."""

    def on_step(self, record: Mapping[str, Any]) -> None:
        """Nothing."""

    def on_eval(self, record: Mapping[str, Any]) -> None:
        """Nothing."""

    def on_message(self, text: str) -> None:
        """Write a warning in one line."""
        if text.startswith(_WARNING):
            self._output.write(f"{rank_prefix()}{' '.join(text.split())}\n")
            self._output.flush()

    def on_end(self, report: Mapping[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
