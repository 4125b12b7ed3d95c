"""What ranks are about to do, as short messages that they compare before they do it.

Used by communicators made with `checked`. Every rank sees the messages of all, so all of them
raise the same error, which names what each rank entered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ops.comm.base import U8
from ops.errors import CommError

_MESSAGE_BYTES = 64


def message(text: str) -> U8:
    """`text` as a message of fixed length; a longer text is cut."""
    out = empty()
    raw = np.frombuffer(text.encode("ascii")[:_MESSAGE_BYTES], np.uint8)
    out[: raw.size] = raw
    return out


def empty() -> U8:
    """Room for a message."""
    return np.zeros(_MESSAGE_BYTES, np.uint8)


def _text(raw: U8) -> str:
    return raw.tobytes().rstrip(b"\0").decode("ascii", "replace")


def require_same(messages: U8, ranks: Sequence[int], call: str) -> None:
    """Raise `CommError` naming all ranks unless the rows of `messages` are equal."""
    if (messages == messages[0]).all():
        return
    entered: dict[str, list[int]] = {}
    for rank, row in zip(ranks, messages):
        entered.setdefault(_text(row), []).append(rank)
    said = "; ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {text}"
        for text, who in entered.items()
    )
    raise CommError(f"ranks disagree about {call}: {said}")


def require_message(sent: U8, wanted: str, call: str) -> None:
    """Raise `CommError` unless the sender's message says `wanted`."""
    if not np.array_equal(sent, message(wanted)):
        raise CommError(f"{call}: the sender sent {_text(sent)}, the receiver waits for {wanted}")


def require_counts(sent: np.ndarray, wanted: np.ndarray, ranks: Sequence[int], call: str) -> None:
    """Raise `CommError` unless `sent` [i, j], of rank i to j, is `wanted` [j, i] everywhere."""
    wrong = np.argwhere(sent != wanted.T)
    if wrong.size:
        i, j = wrong[0]
        raise CommError(
            f"{call}: rank {ranks[i]} sends {sent[i, j]} elements to rank {ranks[j]}, "
            f"which expects {wanted[j, i]}"
        )
