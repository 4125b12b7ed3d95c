"""Imported by the fork server of the kill tests, before it forks: what makes a life start quickly.

Importing it has that one effect; no thread is left behind.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

from tests.offload.kill_child import warm_up

with tempfile.TemporaryDirectory() as folder:
    warm_up(Path(folder))
assert threading.active_count() == 1
