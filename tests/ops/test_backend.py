"""The backends: sharing memory, waiting, settings and the NumPy check."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ops.backend import MindSporeBackend
from ops.device import NumpyBackend, check_numpy
from ops.errors import ConfigError


@pytest.fixture(params=[NumpyBackend, MindSporeBackend])
def backend(request):
    return request.param()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, np.int32])
def test_wrap_shares_memory_both_ways(backend, dtype):
    array = np.arange(6, dtype=dtype).reshape(2, 3)
    tensor = backend.wrap(array)
    array[1, 2] = 40
    view = backend.to_numpy(tensor)
    assert view[1, 2] == 40
    view[0, 0] = 7
    assert array[0, 0] == 7 and view.dtype == dtype


def test_wrap_keeps_the_array_alive(backend):
    tensor = backend.wrap(np.full(1 << 16, 3.0, np.float32))
    np.full(1 << 16, 5.0, np.float32)
    assert (backend.to_numpy(tensor) == 3).all()


def test_threads_below_one_are_refused(backend):
    with pytest.raises(ConfigError, match="compute threads is 0"):
        backend.configure(threads=0)


def test_versions_name_numpy(backend):
    backend.sync()
    assert backend.versions()["numpy"] == np.__version__


def test_numpy_2_is_refused_in_one_sentence():
    check_numpy("1.26.4")
    with pytest.raises(ConfigError, match=r"NumPy 2\.2\.6 is installed.*pip install"):
        check_numpy("2.2.6")


def test_numpy_is_checked_before_mindspore_is_imported():
    code = (
        "import sys, numpy; numpy.__version__ = '2.0.0'\n"
        "from ops.errors import ConfigError\n"
        "try:\n    import ops.backend\n"
        "except ConfigError:\n    sys.exit(10 + ('mindspore' in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 10


def test_settings_are_reported():
    code = (
        "from ops.backend import MindSporeBackend as B; import numpy as np; b = B('BF16')\n"
        "b.configure(threads=1); b.to_numpy(b.wrap(np.ones(2)) + 1)\n"
        "print(b.versions()['onednn_fpmath_mode'], b.versions()['threads'])"
    )
    env = {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16", "PATH": "", "GLOG_v": "3"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    )
    assert out.stdout.split()[-2:] == ["BF16", "1"]


AFFINITIES = """
import json, os
from pathlib import Path
from ops.backend import MindSporeBackend, pin_workers
MindSporeBackend().configure(2)
pinned, affinities = pin_workers(), []
for task in os.listdir("/proc/self/task"):
    name = Path(f"/proc/self/task/{task}/comm").read_text()
    if name.startswith(("ActorThread", "KernelThread")):
        affinities.append(sorted(os.sched_getaffinity(int(task))))
print(json.dumps([pinned, affinities]))
"""


def test_kernel_threads_sit_on_cores_of_their_own():
    """Two workers left on one core made every other kernel take twice as long."""
    out = subprocess.run(
        [sys.executable, "-c", AFFINITIES], check=True, capture_output=True, text=True, timeout=120
    )
    pinned, affinities = json.loads(out.stdout.splitlines()[-1])
    assert pinned <= len(os.sched_getaffinity(0))
    if pinned:
        assert [len(cores) for cores in affinities] == [1] * pinned
        assert len({core for (core,) in affinities}) == pinned


def test_bf16_mode_reaches_onednn_exactly_where_the_processor_has_amx():
    """Why `launch/environment.py` refuses the mode on processors where it changes nothing."""
    code = (
        "import zlib, numpy as np; from ops.backend import MindSporeBackend\n"
        "import mindspore as ms\n"
        "b = MindSporeBackend(); b.configure(threads=1)\n"
        "a = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)\n"
        "print(zlib.crc32(b.to_numpy(ms.ops.matmul(b.wrap(a), b.wrap(a))).tobytes()))"
    )
    sums = {}
    for mode in ("STRICT", "BF16"):
        env = {"ONEDNN_DEFAULT_FPMATH_MODE": mode, "PATH": "", "GLOG_v": "3"}
        out = subprocess.run(
            [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
        )
        sums[mode] = out.stdout.split()[-1]
    has_amx = "amx_bf16" in Path("/proc/cpuinfo").read_text()
    assert (sums["STRICT"] != sums["BF16"]) == has_amx
