"""Commands beside training, ended by a signal: status 130, nothing held, the unfinished marked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from launch.signals import terminate_as_interrupt
from offload.nvme.hold import held_generation
from ops.errors import ConfigError
from tests.launch.helpers import ROOT
from tests.launch.test_export_command import MODEL, invoke
from tests.moe.weights.saved_weights import commit_to, make_run, numbers_of

# The command says `working` in the middle of its work, and then does not go on. Tests may have been
# started where SIGINT is ignored (in the background), which children inherit.
CHILD = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from launch.cli import main
from moe.weights import importing
from moe.weights.writing import ShardWriter
from offload.checkpoint.part_copy import PartCopy

def work(*arguments):
    print("working", flush=True)
    time.sleep(60)

ShardWriter.take_buffer = PartCopy.run = importing._fill = work
sys.argv[0] = "headrace"
main()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A commit of one rank, and an export of it with moments."""
    path = tmp_path_factory.mktemp("made")
    run, meta = make_run(model=MODEL)
    commit_to(path / "store", run, meta, numbers_of(run))
    invoke("export", path / "store", "--out", path / "export", "--moments")
    return path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
@pytest.mark.parametrize("command", ["export", "copy", "import"])
def test_either_signal_ends_a_command_in_good_order(made, tmp_path, command, number):
    """SIGTERM ended it with -15, and the file that held the commit stayed where it was."""
    source, out = made / ("export" if command == "import" else "store"), tmp_path / "out"
    arguments = ["checkpoint", command, str(source), "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout.readline() == "working\n"
            held = [x for x in os.listdir(made / "store/rank-00000") if held_generation(x)]
            assert len(held) == (command != "import")
            child.send_signal(number)
            _, told = child.communicate(timeout=30)
        finally:
            child.kill()
    assert child.returncode == 130, told
    assert "Traceback" not in told
    assert not [x for x in os.listdir(made / "store/rank-00000") if held_generation(x)]
    if command == "export":
        assert (out / "model.safetensors.index.json.unfinished").exists()
        assert not (out / "model.safetensors.index.json").exists()
    elif command == "copy":
        assert (out / "commits.json.unfinished").exists()
    else:
        with pytest.raises(ConfigError, match="no checkpoint"):
            invoke("list", out)
    invoke(command, source, "--out", out)  # nothing stands in the way of the next try


def test_what_sigterm_did_before_it_does_again_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
