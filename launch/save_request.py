"""`touch RUN_DIR/save-now`: how somebody outside asks a run to save.

The file is removed as soon as it is seen, so that one touch is one save. One that cannot be removed
counts once, until it is touched again.
"""

from __future__ import annotations

import logging
from pathlib import Path

SAVE_NOW_FILE = "save-now"

_log = logging.getLogger(__name__)


class SaveRequest:
    """Looks for the file in the directory of a run; call it for whether it was asked for anew."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / SAVE_NOW_FILE
        self._stuck: tuple[int, int] | None = None  # the file that was seen and could not go

    def __call__(self) -> bool:
        """Whether the file is there; removes it. Never raises: a save is no reason to end a run."""
        try:
            found = self._path.lstat()
        except OSError:
            self._stuck = None
            return False
        mark = (found.st_ino, found.st_mtime_ns)
        if mark == self._stuck:
            return False
        self._stuck = None
        try:
            self._path.unlink()
        except FileNotFoundError:  # somebody else has removed it; it was asked for all the same
            pass
        except OSError as error:
            self._stuck = mark
            _log.warning(
                "%s cannot be removed (%s): it counts once, until it is touched again",
                self._path,
                error.strerror or error,
            )
        return True
