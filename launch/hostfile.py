"""Hostfiles of Open MPI's form: which machines a run may use, and how many ranks fit on each.

    # one machine a line; everything after # is a comment
    worker1 slots=4
    me@worker2 slots=4 max_slots=8

Open MPI takes a line without slots for as many as the machine has cores. How many that is cannot
be known before the start, so it is refused here; so are its rarer words. Ranks fill one machine
after the other.

A machine named twice has the sum of its slots. Open MPI refuses that, so mpirun reads a file that
is written anew from what was understood here (`hostfile_text`). What is one machine to it is one
here too: all names and addresses of this machine, and a name with and without its domain.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ops.errors import ConfigError

_ALLOWED = (
    "allowed is `HOST slots=NUMBER` (HOST may be USER@HOST, and max_slots=NUMBER may follow), a "
    "comment after #, or an empty line"
)
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class Host:
    """One machine; `slots` is how many ranks may run, or do run, on it.

    `user` is who logs in there, empty where it does not matter. `is_here` says that it is this
    machine, by its name or by an address of it.
    """

    name: str
    slots: int
    user: str = ""
    is_here: bool = False


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
    machines = _Machines()
    for number, line in enumerate(text.removeprefix(_BYTE_ORDER_MARK).splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if line:
            machines.add(line, f"{source}, line {number}")
    if not machines.hosts:
        raise ConfigError(f"{source} names no machine: {_ALLOWED}, and at least one machine.")
    return tuple(machines.hosts)


def hostfile_text(hosts: Sequence[Host]) -> str:
    """What mpirun reads: a line for each of `hosts`, this machine as `localhost`.

    Raises ConfigError for machines that Open MPI takes for one.
    """
    known: dict[str, str] = {}
    lines = []
    for host in hosts:
        label = _label(host.name)
        if label in known:
            raise ConfigError(
                f"Open MPI takes {known[label]} and {host.name} for one machine, because it does "
                "not look at the domain: allowed are addresses, or names that differ before the "
                "first dot."
            )
        known[label] = host.name
        login = f"{host.user}@{host.name}" if host.user else host.name
        lines.append(f"{'localhost' if host.is_here else login} slots={host.slots}\n")
    return "".join(lines)


def resolves_to_this_machine(name: str) -> bool:
    """Whether the resolver knows `name` for an address of this machine; may wait for it."""
    with contextlib.suppress(OSError):
        found = {str(answer[4][0]) for answer in socket.getaddrinfo(name, None)}
        return any(_address(address.partition("%")[0]) in _own_addresses() for address in found)
    return False


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


class _Machines:
    """The machines of a hostfile, while its lines are read."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self._max_slots: dict[int, int] = {}
        self._places: dict[str, list[int]] = {}  # where in `hosts`, by name before the first dot
        self._is_here = _recognizer()

    def add(self, line: str, where: str) -> None:
        """Add a line's slots to its machine; ConfigError begins with `where`."""
        host, max_slots = _host_of(line, where)
        if self._is_here(host.name):
            host = replace(host, is_here=True, user="")
        place = self._place_of(host)
        known = self.hosts[place]
        if host.user and known.user and host.user != known.user:
            raise ConfigError(
                f"{where}: {host.name} was given to {known.user} before, now to {host.user}: "
                "allowed is one user for a machine."
            )
        slots = known.slots + host.slots
        if max_slots:
            self._max_slots[place] = min(max_slots, self._max_slots.get(place, max_slots))
        limit = self._max_slots.get(place, slots)
        if slots > limit:
            raise ConfigError(
                f"{where}: {host.name} has slots={slots} in all, but max_slots={limit}: allowed "
                f"is 1 to {limit}."
            )
        self.hosts[place] = replace(known, slots=slots, user=known.user or host.user)

    def _place_of(self, host: Host) -> int:
        """Where in `hosts` the machine is, or now is with no slots."""
        places = self._places.setdefault("" if host.is_here else _label(host.name), [])
        for place in places:
            if host.is_here or _is_one(self.hosts[place].name, host.name):
                return place
        places.append(len(self.hosts))
        self.hosts.append(replace(host, slots=0))
        return places[-1]


def _host_of(line: str, where: str) -> tuple[Host, int]:
    """The machine of a line without its comment, and its max_slots; 0 when it has none."""
    first, *rest = line.replace("=", " = ").split()
    user, at, name = first.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise ConfigError(f"{where}: {user!r} is not the name of a user: {_ALLOWED}.")
    address = _address(name)
    if address is None and not _HOST.fullmatch(name):
        inner = name.removeprefix("[").removesuffix("]")
        if inner != name and _address(inner):
            raise ConfigError(f"{where}: {name} has brackets: allowed is {inner} without them.")
        raise ConfigError(f"{where}: {name!r} is not the name of a machine: {_ALLOWED}.")
    found: dict[str, int] = {}
    while rest:
        word = rest[0].replace("-", "_")
        if (
            word not in ("slots", "max_slots")
            or word in found
            or rest[1:2] != ["="]
            or not rest[2:]
        ):
            raise ConfigError(f"{where}: {line!r} is not understood: {_ALLOWED}.")
        number = rest[2]
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(
                f"{where}: {rest[0]}={number}: allowed is a whole number of at least 1, the ranks "
                f"that may run on {name}."
            )
        found[word] = int(number)
        del rest[:3]
    if not found:
        raise ConfigError(f"{where}: {name} does not say how many slots it has: {_ALLOWED}.")
    max_slots = found.get("max_slots", 0)
    return Host(address or name, found.get("slots", max_slots), user), max_slots


def _address(text: str) -> str | None:
    """An IP address in its one shortest form; None for anything else."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return None
        address = address.ipv4_mapped or address
    return str(address)


def _label(name: str) -> str:
    """What Open MPI knows a machine by: an address, or the name before the first dot."""
    return _address(name) or name.partition(".")[0].lower()


def _is_one(first: str, second: str) -> bool:
    """Whether two names of one label are one machine: not so with two domains."""
    first, second = first.lower(), second.lower()
    return first == second or "." not in first or "." not in second


def _recognizer() -> Callable[[str], bool]:
    """What recognizes names and addresses of this machine, without asking a resolver."""
    own_name, own_addresses = socket.gethostname(), _own_addresses()

    def is_here(name: str) -> bool:
        address = _address(name)
        if address:
            return address in own_addresses or ipaddress.ip_address(address).is_loopback
        if name.lower() == "localhost":
            return True
        return _label(name) == _label(own_name) and _is_one(name, own_name)

    return is_here


def _own_addresses() -> set[str | None]:
    interfaces = psutil.net_if_addrs().values()
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        _address(entry.address.partition("%")[0])
        for interface in interfaces
        for entry in interface
        if entry.family in families
    }
