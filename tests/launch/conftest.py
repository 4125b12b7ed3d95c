"""What several tests of `launch/` start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.launched import Launched


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    """A launch that has not started yet; it does not outlive the test."""
    launch = Launched(tmp_path)
    yield launch
    if launch.process is not None and launch.process.poll() is None:
        launch.process.kill()
        launch.process.communicate()
