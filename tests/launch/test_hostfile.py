"""Hostfiles are read as Open MPI reads them, and refused in one sentence where they are not."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from launch.hostfile import (
    Host,
    hostfile_text,
    parse_hostfile,
    place,
    read_hostfile,
    resolves_to_this_machine,
)
from launch.launcher.command import Launch, mpirun_command
from ops.errors import ConfigError
from tests.mpirun import MPIRUN

CLUSTER = "\n".join(f"worker{number} slots=4" for number in range(1, 9))


def test_the_target_cluster_holds_32_ranks_machine_by_machine() -> None:
    hosts = parse_hostfile(CLUSTER, "hosts")
    assert place(hosts, 32, "hosts") == hosts
    assert hosts[0] == Host("worker1", 4) and hosts[-1] == Host("worker8", 4)
    assert place(hosts, 6, "hosts") == (Host("worker1", 4), Host("worker2", 2))


def test_comments_empty_lines_spaces_and_repeated_machines() -> None:
    text = "# the lab\n\n  node-1.lab   slots = 2  # two cards\r\nfe80::1 slots=1\n"
    text += "node-1.lab slots=3\n"
    assert parse_hostfile(text, "hosts") == (Host("node-1.lab", 5), Host("fe80::1", 1))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a slots=2 max_slots=4", (Host("a", 2),)),
        ("a max-slots = 4 slots = 2", (Host("a", 2),)),
        ("a max_slots=4", (Host("a", 4),)),
        ("a slots=2 max_slots=4\na slots=2", (Host("a", 4),)),
        ("::1 slots=2", (Host("::1", 2, is_here=True),)),
        ("2001:DB8:0::7 slots=2", (Host("2001:db8::7", 2),)),
        ("::ffff:203.0.113.9 slots=2", (Host("203.0.113.9", 2),)),
        ("me@a.lab slots=2", (Host("a.lab", 2, "me"),)),
        ("me@fe80::1 slots=2\nfe80::1 slots=1", (Host("fe80::1", 3, "me"),)),
        ("\ufeffa slots=2\nb slots=1", (Host("a", 2), Host("b", 1))),
    ],
)
def test_what_open_mpi_accepts_is_accepted(text: str, hosts: tuple[Host, ...]) -> None:
    """These were refused, though Open MPI takes them; all but the byte order mark, which editors
    write and nobody sees."""
    assert parse_hostfile(text, "hosts") == hosts


def test_a_byte_order_mark_of_a_file_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\n", encoding="utf-8-sig")
    assert read_hostfile(tmp_path / "hosts") == (Host("a", 2),)


def test_names_of_one_machine_are_one_machine() -> None:
    """Open MPI does not look at domains, and knows its own machine by every name."""
    text = "A.lab slots=1\na slots=2\na.LAB slots=4\n"
    text += "b slots=1\nb.lab slots=1\nc.x slots=1\nc.y slots=1"
    found = [(host.name, host.slots) for host in parse_hostfile(text, "hosts")]
    assert found == [("A.lab", 7), ("b", 2), ("c.x", 1), ("c.y", 1)]
    here = f"localhost slots=1\nb slots=1\n127.0.0.1 slots=2\n{socket.gethostname()} slots=4\n"
    first, second = parse_hostfile(here + "me@::1 slots=8", "hosts")
    assert first == Host("localhost", 15, is_here=True) and second == Host("b", 1)
    assert hostfile_text((first, second)) == "localhost slots=15\nb slots=1\n"


def test_the_resolver_is_asked_for_names_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(name: str, port: None) -> list[tuple[object, ...]]:
        if name == "unknown":
            raise socket.gaierror("no such name")
        return [(0, 0, 0, "", ("127.0.0.1" if name == "alias" else "192.0.2.99", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    found = [resolves_to_this_machine(name) for name in ("alias", "other", "unknown")]
    assert found == [True, False, False]


def test_names_that_only_open_mpi_takes_for_one_machine_are_refused_for_it() -> None:
    hosts = parse_hostfile(
        "me@c.x slots=1\nc.y slots=1\n10.0.0.1 slots=1\n10.0.0.2 slots=1", "hosts"
    )
    with pytest.raises(ConfigError, match=r"Open MPI takes c\.x and c\.y for one .*allowed are"):
        hostfile_text(hosts)
    assert hostfile_text(hosts[1:]) == "c.y slots=1\n10.0.0.1 slots=1\n10.0.0.2 slots=1\n"


MIXED = """\ufeff# of an editor of another system\r
me@worker1.lab slots=1 max_slots=8\r
worker2 slots=2\r
worker1 slots=2\r
2001:db8::7 slots=1\r
127.0.0.1 slots=1\r
localhost slots=1\r
unused slots=4\r
"""


@pytest.mark.skipif(not MPIRUN.exists(), reason="mpirun is not installed")
@pytest.mark.parametrize("text", [MIXED, "".join(f"worker{n % 4} slots=2\n" for n in range(8))])
def test_open_mpi_places_ranks_as_the_hostfile_is_read_here(text: str, tmp_path: Path) -> None:
    """A machine named twice was summed here and refused there ("multiple definitions of the slot
    count"), so nothing started. mpirun only says what it would do, and needs no machines."""
    hosts = parse_hostfile(text, "hosts")
    for num_ranks in range(1, 9):
        placed = place(hosts, num_ranks, "hosts")
        (tmp_path / "hostfile").write_text(hostfile_text(placed))
        launch = Launch(num_ranks, ("true",), tmp_path, num_cores=4, hosts=placed)
        mpirun, *command = mpirun_command(launch, str(MPIRUN), {}, is_root=os.geteuid() == 0)
        shown = subprocess.run(
            [mpirun, "--display", "map", "--do-not-launch", *command],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert shown.returncode == 0, shown.stderr
        machines = re.findall(r"Data for node: (\S+)", shown.stdout)
        own = socket.gethostname().partition(".")[0]
        names = [own if host.is_here else host.name.partition(".")[0] for host in placed]
        assert machines == names
        counts = re.findall(r"Num procs: (\d+)", shown.stdout)
        assert [int(count) for count in counts] == [host.slots for host in placed]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=4\nb slots=0", "hosts, line 2: slots=0: allowed is a whole number of at least 1"),
        ("a slots=four", "line 1: slots=four: allowed is a whole number"),
        ("a slots=-1", "line 1: slots=-1: allowed is a whole number"),
        ("a", "line 1: a does not say how many slots it has: allowed is `HOST slots=NUMBER`"),
        ("a slots=", "line 1: 'a slots=' is not understood: allowed is `HOST slots=NUMBER`"),
        (
            "a slots=4 max_slots=2",
            "line 1: a has slots=4 in all, but max_slots=2: allowed is 1 to 2",
        ),
        ("a slots=1 max_slots=1\na slots=1", "line 2: a has slots=2 in all, but max_slots=1"),
        ("a slots=1 max_slots=0", "line 1: max_slots=0: allowed is a whole number of at least 1"),
        ("a slots=1 max_slots=2 max-slots=2", "max-slots=2' is not understood"),
        ("a cpus=4", "line 1: 'a cpus=4' is not understood"),
        ("a slots=2 slots=2", "line 1: 'a slots=2 slots=2' is not understood"),
        ("a slots", "line 1: 'a slots' is not understood"),
        ("slots=2", "line 1: 'slots=2' is not understood"),
        ("a:4 slots=2", "line 1: 'a:4' is not the name of a machine"),
        ("fe80::1%eth0 slots=2", "line 1: 'fe80::1%eth0' is not the name of a machine"),
        ("[fe80::1] slots=2", "line 1: [fe80::1] has brackets: allowed is fe80::1 without them"),
        ("m.e@a slots=2", "line 1: 'm.e' is not the name of a user"),
        ("@a slots=2", "line 1: '' is not the name of a user"),
        ("me@a slots=2\nyou@a slots=2", "line 2: a was given to me before, now to you: allowed"),
        ("^a slots=4", "line 1: '^a' is not the name of a machine"),
        ("-oProxyCommand=x slots=4", "line 1: '-oProxyCommand' is not the name of a machine"),
        ("\n# nothing\n", "hosts names no machine: allowed is"),
    ],
)
def test_a_malformed_line_is_named_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "hosts")
    assert message in str(caught.value)
    assert "allowed is" in str(caught.value) and "\n" not in str(caught.value)


def test_a_hostfile_too_small_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        place(parse_hostfile(CLUSTER, "hosts"), 33, "hosts")
    message = str(caught.value)
    assert "-n 33 is more than the 32 slots of hosts (8 machines: 4 + 4 + 4" in message
    assert "allowed is 1 to 32" in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing cannot be read: No such file"):
        read_hostfile(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary cannot be read: it is not text"):
        read_hostfile(tmp_path / "binary")
    (tmp_path / "hosts").write_text(CLUSTER)
    assert len(read_hostfile(tmp_path / "hosts")) == 8
