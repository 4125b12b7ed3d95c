"""The start-up checks speak in sentences, before anything heavy is imported."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import types
from pathlib import Path

import pytest

from launch import environment
from launch.config import RuntimeConfig
from ops.errors import ConfigError
from tests.launch.helpers import ROOT, run_python

VARIABLES = (
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "GLOG_v",
)


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without our variables, put back afterwards; the cores stay as they are."""
    monkeypatch.setattr(environment, "confine", lambda threads: None)
    for name in VARIABLES:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)


def pretend_version(monkeypatch: pytest.MonkeyPatch, name: str, version: str | None) -> None:
    """Let `importlib.metadata` find `name` in `version`, or not at all."""
    real = importlib.metadata.version

    def found(asked: str) -> str:
        if asked != name:
            return real(asked)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)


@pytest.mark.parametrize("version", ["2.0.0", "2.4.1", "3.0.0rc1"])
def test_numpy_2_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend_version(monkeypatch, "numpy", version)
    with pytest.raises(ConfigError, match=rf"NumPy {version} is installed, but MindSpore 2.10"):
        environment.check_numpy()


def test_numpy_1_is_accepted_and_a_missing_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(monkeypatch, "numpy", "1.26.4")
    environment.check_numpy()
    pretend_version(monkeypatch, "numpy", None)
    with pytest.raises(ConfigError, match="NumPy is not installed"):
        environment.check_numpy()


def test_train_with_numpy_2_exits_2_before_mindspore_is_imported(tmp_path: Path) -> None:
    # A newer NumPy's metadata, found before the installed one's.
    info = tmp_path / "numpy-2.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 2.1.0\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    code = (
        "import sys; from launch.cli import main\n"
        "sys.argv = ['headrace', 'train', 'tiny-moe']\n"
        "try: main()\n"
        "finally: print([name for name in ('mindspore', 'numpy') if name in sys.modules])\n"
    )
    result = run_python(code, env=os.environ | {"PYTHONPATH": path})
    assert result.returncode == 2
    assert result.stderr.startswith("headrace: NumPy 2.1.0 is installed, but MindSpore 2.10 fails")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("version", [(3, 9, 1), (3, 13, 0)])
def test_other_pythons_are_refused(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...]
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(ConfigError, match=r"needs Python 3\.10, 3\.11 or 3\.12 on Linux"):
        environment.check_python()


def pretend_mindspore(monkeypatch: pytest.MonkeyPatch, tag: str | None) -> None:
    """Let MindSpore be installed from a wheel with `tag`, or not at all."""

    def distribution(name: str) -> types.SimpleNamespace:
        if tag is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return types.SimpleNamespace(read_text=lambda file: f"Wheel-Version: 1.0\nTag: {tag}\n")

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)


def test_a_missing_or_foreign_mindspore_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    pretend_mindspore(monkeypatch, None)
    with pytest.raises(ConfigError, match="MindSpore is not installed"):
        environment.check_mindspore()
    pretend_mindspore(monkeypatch, "cp311-cp311-manylinux_2_17_aarch64")
    with pytest.raises(ConfigError, match="aarch64, but this machine is x86_64"):
        environment.check_mindspore()
    pretend_mindspore(monkeypatch, "cp311-none-any")
    environment.check_mindspore()


@pytest.mark.usefixtures("clean_environment")
def test_prepare_sets_threads_and_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mindspore", raising=False)
    monkeypatch.setattr(environment, "check_mindspore", lambda: None)
    monkeypatch.setattr(environment, "check_fpmath", lambda runtime: None)  # any processor
    environment.prepare(RuntimeConfig(threads=3, onednn_fpmath="bf16"))
    found = {name: os.environ[name] for name in VARIABLES}
    assert found.pop("ONEDNN_DEFAULT_FPMATH_MODE") == "BF16"
    assert found.pop("GLOG_v") == "3"
    assert set(found.values()) == {"3"}


@pytest.mark.usefixtures("clean_environment")
def test_a_mode_that_comes_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mindspore", types.ModuleType("mindspore"))
    monkeypatch.setattr(environment, "check_mindspore", lambda: None)
    environment.prepare(RuntimeConfig(onednn_fpmath="strict"))
    monkeypatch.setattr(environment, "check_fpmath", lambda runtime: None)  # any processor
    with pytest.raises(ConfigError, match="onednn_fpmath = bf16 cannot take effect"):
        environment.prepare(RuntimeConfig(onednn_fpmath="bf16"))


@pytest.mark.usefixtures("clean_environment")
def test_the_users_log_level_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOG_v", "1")
    monkeypatch.setattr(environment, "check_mindspore", lambda: None)
    environment.prepare(RuntimeConfig())
    assert os.environ["GLOG_v"] == "1"  # noqa: SIM112


def test_versions_name_what_determines_the_bits() -> None:
    found = environment.versions()
    assert {"python", "system", "numpy"} <= set(found)


def test_bf16_products_are_refused_where_they_would_change_nothing(monkeypatch):
    """C56: a key without effect is an error."""
    monkeypatch.setattr(environment.platform, "machine", lambda: "x86_64")
    bf16 = RuntimeConfig(onednn_fpmath="bf16")
    with pytest.raises(ConfigError, match="onednn_fpmath = bf16 has no effect"):
        environment.check_fpmath(bf16, "flags : avx2 avx512_bf16")
    environment.check_fpmath(bf16, "flags : avx512_bf16 amx_bf16 amx_tile")
    environment.check_fpmath(RuntimeConfig(), "flags : avx2")
    monkeypatch.setattr(environment.platform, "machine", lambda: "aarch64")
    environment.check_fpmath(bf16, "Features : asimd bf16")
