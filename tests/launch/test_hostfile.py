"""Hostfiles are read as Open MPI reads them, and refused in one sentence where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.hostfile import Host, parse_hostfile, place, read_hostfile
from ops.errors import ConfigError

CLUSTER = "\n".join(f"worker{number} slots=4" for number in range(1, 9))


def test_the_target_cluster_holds_32_ranks_machine_by_machine() -> None:
    hosts = parse_hostfile(CLUSTER, "hosts")
    assert place(hosts, 32, "hosts") == hosts
    assert hosts[0] == Host("worker1", 4) and hosts[-1] == Host("worker8", 4)
    assert place(hosts, 6, "hosts") == (Host("worker1", 4), Host("worker2", 2))


def test_comments_empty_lines_spaces_and_repeated_machines() -> None:
    text = (
        "# the lab\n\n  node-1.lab   slots = 2  # two cards\nfe80::1 slots=1\nnode-1.lab slots=3\n"
    )
    assert parse_hostfile(text, "hosts") == (Host("node-1.lab", 5), Host("fe80::1", 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=4\nb slots=0", "hosts, line 2: slots=0: allowed is a whole number of at least 1"),
        ("a slots=four", "line 1: slots=four: allowed is a whole number"),
        ("a slots=-1", "line 1: slots=-1: allowed is a whole number"),
        ("a", "line 1: a does not say how many slots it has: allowed is `HOST slots=NUMBER`"),
        ("a slots=", "line 1: 'a slots=' is not understood: allowed is `HOST slots=NUMBER`"),
        ("a slots=4 max_slots=8", "line 1: 'a slots=4 max_slots=8' is not understood"),
        ("a cpus=4", "line 1: 'a cpus=4' is not understood"),
        ("a:4 slots=2 slots=2", "line 1: 'a:4 slots=2 slots=2' is not understood"),
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
