"""The directory of an export: who may fill it, and that nobody empties a finished one."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from moe.weights import directory as directory_module
from moe.weights.directory import ExportDirectory
from moe.weights.export import Export, ExportOptions, facts_of
from moe.weights.reading import WeightFiles
from ops.errors import ConfigError, StorageError
from ops.kernels.pool import KernelPool
from tests.moe.weights.saved_weights import OPTIMIZER_STEP, make_run, numbers_of, parts_in_memory
from tests.moe.weights.test_export import loaded, reader_of, same


def contents(folder):
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


@pytest.mark.parametrize("step", ["open", "flock"])
def test_an_export_that_another_one_finishes_meanwhile_is_left_whole(tmp_path, monkeypatch, step):
    """The second had listed the directory while the first wrote. It then opened the marker before
    the first published and locked it after (`flock`), or opened it after, which made a new one
    (`open`). Either way it took the finished files for leftovers, removed them, and put an index
    of its own over what was missing."""
    run, meta = make_run()
    chosen, out = ExportOptions(), tmp_path / "out"
    facts = facts_of(run, meta, OPTIMIZER_STEP, chosen, {})
    first = ExportDirectory(str(out))
    module = directory_module.os if step == "open" else directory_module.fcntl
    original, before = getattr(module, step), {}

    def late(*arguments, **options):
        if step == "flock" or str(arguments[0]).endswith(".unfinished"):
            monkeypatch.setattr(module, step, original)
            with first, KernelPool(1) as pool:
                reader = reader_of(run, meta, parts_in_memory(run, numbers_of(run)), pool)
                work = Export(run, chosen)
                work.write(reader, OPTIMIZER_STEP, first, facts, lambda nbytes: None)
            before.update(contents(out))
        return original(*arguments, **options)

    monkeypatch.setattr(module, step, late)
    with pytest.raises(ConfigError, match="not empty"):
        ExportDirectory(str(out))
    assert before and contents(out) == before
    same(loaded(out), numbers_of(run)["master"])
    WeightFiles(str(out), "it").close()


@pytest.mark.parametrize("publishes", [True, False])
def test_of_exports_that_begin_at_once_one_writes_and_the_others_are_refused(tmp_path, publishes):
    """Whatever the interleaving: never two owners, and who comes late finds a finished export."""
    refusals = set()
    for round_ in range(40):
        out = tmp_path / str(round_)
        start, done = threading.Barrier(4), threading.Barrier(4)

        def claim(out=out, start=start, done=done):
            start.wait()
            try:
                with ExportDirectory(str(out)) as directory:
                    directory.write_json("headrace.json", {})
                    if publishes:
                        directory.publish({"metadata": {}, "weight_map": {}})
                    else:
                        done.wait()
                    return True
            except ConfigError as error:
                refusals.add(str(error))
                if not publishes:
                    done.wait()
                return False

        with ThreadPoolExecutor(4) as threads:
            won = [future.result() for future in [threads.submit(claim) for _ in range(4)]]
        assert won.count(True) == 1
        last = "" if publishes else ".unfinished"
        wanted = ["headrace.json", f"model.safetensors.index.json{last}"]
        assert sorted(os.listdir(out)) == wanted
    assert all("not empty" in text or "another export is writing" in text for text in refusals)


def test_a_marker_that_is_left_beside_a_finished_export_goes_and_the_export_stays(tmp_path):
    """What a process leaves that is killed where the second one above was refused."""
    out = tmp_path / "out"
    with ExportDirectory(str(out)) as directory:
        directory.publish({"metadata": {}, "weight_map": {}})
    (out / "model.safetensors.index.json.unfinished").touch()
    with pytest.raises(ConfigError, match="not empty"):
        ExportDirectory(str(out))
    assert os.listdir(out) == ["model.safetensors.index.json"]


def test_what_others_put_beside_an_unfinished_export_is_left_alone(tmp_path):
    out = tmp_path / "out"
    with ExportDirectory(str(out)) as directory:
        directory.write_json("headrace.json", {})
    (out / ".probe-12345").touch()  # of a process that was killed while it tried direct I/O
    with ExportDirectory(str(out)) as directory:
        directory.write_json("headrace.json", {})
        assert not (out / ".probe-12345").exists()
    (out / "notes.txt").write_text("mine")
    before = contents(out)
    with pytest.raises(ConfigError, match="not empty"):
        ExportDirectory(str(out))
    assert contents(out) == before


def test_an_export_whose_directory_was_taken_away_publishes_nothing(tmp_path):
    """Another export had begun in a new directory of that name: its marker became the index."""
    out = tmp_path / "out"
    with ExportDirectory(str(out)) as directory:
        os.rename(out, tmp_path / "away")
        with ExportDirectory(str(out)):
            with pytest.raises(StorageError, match="taken away"):
                directory.publish({"metadata": {}, "weight_map": {}})
            assert os.listdir(out) == ["model.safetensors.index.json.unfinished"]
