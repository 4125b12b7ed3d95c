"""The seed that changes from run to run: printed at the end, and settable to repeat a failure."""

from __future__ import annotations

import secrets

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rotating-seed",
        type=int,
        default=secrets.randbelow(1 << 31),
        help="seed of the tests that draw anew every time (crash images, kills)",
    )


@pytest.fixture(scope="session")
def rotating_seed(pytestconfig: pytest.Config) -> int:
    """Another number in every run of the tests."""
    return pytestconfig.getoption("--rotating-seed")


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    seed = config.getoption("--rotating-seed")
    terminalreporter.write_line(f"rotating seed: {seed} (repeat with --rotating-seed {seed})")
