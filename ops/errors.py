"""The one exception family; every message names the value, the limit and the key.

The command line turns a `HeadraceError` into one sentence on stderr and its `exit_code`.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of all errors a user can meet; `exit_code` is the process's exit status."""

    exit_code = 1


class ConfigError(HeadraceError):
    """A configuration key or value was refused before any work started."""

    exit_code = 2


class PlanError(HeadraceError):
    """The model and budgets cannot fit; the message holds the arithmetic and the way out."""

    exit_code = 2


class DataError(HeadraceError):
    """Input text, tokenizer or token file cannot be used."""

    exit_code = 2


class StorageError(HeadraceError):
    """A storage operation failed or returned bytes that do not verify.

    Attributes (any may be None): `path` of the file, `offset` in bytes, `block` name,
    `wanted_bytes` and `done_bytes` of the transfer.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        offset: int | None = None,
        block: str | None = None,
        wanted_bytes: int | None = None,
        done_bytes: int | None = None,
    ) -> None:
        self.path = path
        self.offset = offset
        self.block = block
        self.wanted_bytes = wanted_bytes
        self.done_bytes = done_bytes
        fields = ("path", "offset", "block", "wanted_bytes", "done_bytes")
        detail = ", ".join(
            f"{name}={getattr(self, name)}" for name in fields if getattr(self, name) is not None
        )
        super().__init__(f"{message} ({detail})" if detail else message)


class NumericAlarm(HeadraceError):
    """Loss or gradient norm is not finite, or the loss scale collapsed."""

    exit_code = 4


class CommError(HeadraceError):
    """Ranks waited for each other too long, disagreed about what comes next, or one failed."""

    exit_code = 5


class Stopped(HeadraceError):
    """The run was stopped by SIGINT or SIGTERM after finishing its step."""

    exit_code = 130
