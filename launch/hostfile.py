"""Hostfiles of Open MPI's form: which machines a run may use, and how many ranks fit on each.

    # one machine a line; everything after # is a comment
    worker1 slots=4
    worker2 slots=4

Open MPI takes a line without slots for as many as the machine has cores. How many that is cannot
be known before the start, so it is refused here; so are its rarer words. A machine named twice has
the sum of its slots, as there. Ranks fill one machine after the other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ops.errors import ConfigError

_ALLOWED = "allowed is `HOST slots=NUMBER`, a comment after #, or an empty line"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class Host:
    """One machine; `slots` is how many ranks may run, or do run, on it."""

    name: str
    slots: int


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The machines of a hostfile. Raises ConfigError when it cannot be read or is malformed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"--hostfile {path} cannot be read: {reason}.") from None
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, source: str) -> tuple[Host, ...]:
    """The machines of a hostfile's text in their order; `source` names it in errors.

    Raises ConfigError that names the line and what is allowed there.
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].replace("=", " = ").split()
        if not words:
            continue
        name, *rest = words
        where = f"{source}, line {number}"
        if not _HOST.fullmatch(name):
            raise ConfigError(f"{where}: {name!r} is not the name of a machine: {_ALLOWED}.")
        if not rest:
            raise ConfigError(f"{where}: {name} does not say how many slots it has: {_ALLOWED}.")
        if rest[:2] != ["slots", "="] or len(rest) != 3:
            found = line.partition("#")[0].strip()
            raise ConfigError(f"{where}: {found!r} is not understood: {_ALLOWED}.")
        if not rest[2].isdecimal() or int(rest[2]) < 1:
            raise ConfigError(
                f"{where}: slots={rest[2]}: allowed is a whole number of at least 1, the ranks "
                f"that may run on {name}."
            )
        slots[name] = slots.get(name, 0) + int(rest[2])
    if not slots:
        raise ConfigError(f"{source} names no machine: {_ALLOWED}, and at least one machine.")
    return tuple(Host(name, number) for name, number in slots.items())


def place(hosts: Sequence[Host], num_ranks: int, source: str) -> tuple[Host, ...]:
    """The machines that `num_ranks` ranks use, with the ranks on each in `slots`.

    Raises ConfigError when there are fewer slots than ranks.
    """
    available = sum(host.slots for host in hosts)
    if num_ranks > available:
        listed = " + ".join(str(host.slots) for host in hosts[:16])
        listed += " + ..." if len(hosts) > 16 else ""
        raise ConfigError(
            f"-n {num_ranks} is more than the {available} slots of {source} ({len(hosts)} "
            f"machines: {listed}): allowed is 1 to {available}, or a hostfile with more slots."
        )
    used = []
    left = num_ranks
    for host in hosts:
        if left == 0:
            break
        used.append(replace(host, slots=min(host.slots, left)))
        left -= used[-1].slots
    return tuple(used)
