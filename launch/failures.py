"""What a process says when it fails, and the exit status that follows; the same in every command.

Of several ranks, each begins with its number, because they may share a terminal.
"""

from __future__ import annotations

import os
import sys
import traceback

from launch.ranks import rank_prefix
from ops.errors import HeadraceError


def show_failure(error: BaseException) -> int:
    """Write `error` to stderr and return the exit status of the process.

    A HeadraceError is one sentence, with the traceback after it when HEADRACE_TRACEBACK=1. Of
    anything else the first line comes first, then the traceback.
    """
    prefix = rank_prefix()
    if isinstance(error, HeadraceError):
        first = f"{prefix}headrace: {' '.join(str(error).split())}"
        wanted = os.environ.get("HEADRACE_TRACEBACK") == "1"
        status = error.exit_code
    else:
        first = f"{prefix}{type(error).__name__}: {error}".splitlines()[0]
        wanted = True
        status = 1
    trace = "".join(traceback.format_exception(error)) if wanted else ""
    # One write, so that lines of other ranks do not come between.
    sys.stderr.write(f"{first}\n{trace}")
    sys.stderr.flush()
    return status
