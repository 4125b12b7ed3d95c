"""The world of a run with one rank: every collective is a copy, and nothing is imported."""

from __future__ import annotations

from collections.abc import Sequence

from ops.comm.base import U8, check_partition
from ops.comm.collectives import Collectives, Messages
from ops.comm.stats import CommStats
from ops.errors import CommError


class SingleRank(Collectives):
    """`World` of one rank. Messages to other ranks are impossible and refused."""

    kind = "single"

    def __init__(self, name: str = "world", stats: CommStats | None = None) -> None:
        super().__init__(name, 0, (0,), stats or CommStats(), checked=False)

    def split(self, groups: Sequence[Sequence[int]], name: str) -> SingleRank:
        check_partition(groups, 1)
        return SingleRank(name, self.stats)

    def abort(self, code: int) -> None:
        raise SystemExit(code)

    def free(self) -> None:
        return None

    def _exchange(self, sends: Messages, receives: Messages, what: str) -> None:
        raise CommError(f"{what}: there is no other rank")

    def _post(self, message: U8, to: int, tag: int, what: str) -> None:
        raise CommError(f"{what}: there is no other rank")

    def _take(self, message: U8, source: int, tag: int, what: str) -> None:
        raise CommError(f"{what}: there is no other rank")
