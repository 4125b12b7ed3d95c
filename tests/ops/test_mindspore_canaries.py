"""Traps of the pinned MindSpore that our code is shaped by.

A failure here after an upgrade is news, not a bug: the code that works around the trap, named in
each test, may be simplified or must be changed.
"""

import re
import time
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import ops
from mindspore.communication import GlobalComm
from mindspore.ops.function import comm_func

from ops.backend import tensor_on
from ops.comm import mindspore as cpu_world
from ops.errors import CommError
from ops.nn.primitives import jit, wait


def test_in_place_operations_do_nothing_on_cpu():
    """Why no `*_` method is used on tensors anywhere."""
    x = tensor_on(np.ones(4, np.float32))
    y = x.add_(1.0)
    wait((x, y))
    assert (y.asnumpy() == 2).all() and (x.asnumpy() == 1).all()


def test_from_numpy_and_asnumpy_share_memory():
    """Why `tensor_on` is zero copy."""
    array = np.zeros(3, np.float32)
    tensor = ms.Tensor.from_numpy(array)
    array[0] = 1
    assert tensor.asnumpy()[0] == 1
    assert np.shares_memory(tensor.asnumpy(), array)


@jit
def _double(x):
    return x * 2


def test_jit_arguments_see_new_data_in_the_same_buffer():
    """Why leases may hand out the same arena slot again."""
    array = np.ones(3, np.float32)
    tensor = tensor_on(array)
    assert (_double(tensor).asnumpy() == 2).all()
    array[:] = 5
    assert (_double(tensor).asnumpy() == 10).all()


def test_jit_keeps_the_parameter_it_captured_first():
    """Why weights are always arguments."""
    weight = ms.Parameter(ms.Tensor(np.ones(3, np.float32)))

    @jit
    def scaled(x):
        return x * weight

    x = tensor_on(np.ones(3, np.float32))
    assert (scaled(x).asnumpy() == 1).all()
    weight.set_data(ms.Tensor(np.full(3, 7, np.float32)))
    assert (scaled(x).asnumpy() == 1).all()


@jit
def _two_products(a):
    b = ops.matmul(a, a)
    return b, ops.matmul(b, a)


def test_a_jit_call_with_two_outputs_returns_before_it_ran():
    """Why `Stages` waits after every call, and why buffers are reused only after that."""
    a = tensor_on(np.full((1024, 1024), 1e-3, np.float32))
    wait(_two_products(a))
    ratios = []
    for _ in range(5):
        start = time.perf_counter()
        outputs = _two_products(a)
        returned = time.perf_counter()
        wait(outputs)
        ratios.append((returned - start) / (time.perf_counter() - start))
    assert min(ratios) < 0.5


def test_waiting_makes_a_reused_input_buffer_safe():
    array = np.full((512, 512), 1e-3, np.float32)
    tensor = tensor_on(array)
    want = [x.asnumpy().copy() for x in _two_products(tensor)]
    for _ in range(10):
        array[:] = 1e-3
        got = _two_products(tensor)
        wait(got)
        array[:] = np.nan
        assert all(np.array_equal(a.asnumpy(), b) for a, b in zip(got, want))


def test_the_version_is_the_one_that_these_tests_are_about():
    """Change it together with `pyproject.toml`, after reading every failure in this file."""
    assert ms.__version__ == "2.10.0"


@pytest.mark.parametrize("name", cpu_world._HELPERS)
def test_a_helper_of_comm_func_binds_ascends_group_at_import(name, monkeypatch):
    """Why `_use_cpu_group` changes its default: the group of `init()` comes too late for it.

    A default of None, or a helper that is gone, means that the patch can go or must change.
    """
    helper = getattr(comm_func, name)
    function = getattr(helper, "fn", helper)
    monkeypatch.setattr(GlobalComm, "WORLD_COMM_GROUP", "mccl_world_group")
    assert function.__defaults__ == ("hccl_world_group",)
    assert function.__code__.co_varnames[: function.__code__.co_argcount] == ("group",)


def test_isend_asks_for_the_default_group_even_when_given_one(monkeypatch):
    """Why passing `group=` is not enough: without the patch MCCL is asked for HCCL's group."""
    asked = []

    def rank_in(*group):
        asked.append(group)
        return 0

    monkeypatch.setattr(comm_func, "get_cache_group_rank", rank_in)
    monkeypatch.setattr(
        comm_func, "_get_group_rank_from_world_rank_from_cache_helper", lambda rank, group: rank
    )
    monkeypatch.setattr(comm_func, "dist_comm_isend_op", lambda *arguments: (None, None))
    comm_func.isend(tensor_on(np.ones(1, np.uint8)), 1, group="mccl_world_group")
    assert asked == [()]


def test_the_current_stream_of_ascend_belongs_to_the_process():
    """Why work on a card is launched under one lock: a stream a thread would need none."""
    folder = Path(ms.__file__).parent / "include/mindspore/ccsrc/plugin/ascend/res_manager"
    manager = (folder / "stream_manager" / "ascend_stream_manager.h").read_text()
    assert "\n  size_t current_stream_id_{0};\n" in manager and "thread_local" not in manager
    resources = (folder / "ascend_res_manager.h").read_text()
    assert "GetCommunicationStreamIDByGroup" in resources


def test_what_the_page_on_ascend_names_exists():
    """MindSpore's names there are all that a port would be written against."""
    page = (Path(__file__).parents[2] / "docs" / "ascend.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(mindspore\.[\w.]+)", page))
    assert len(names) > 20
    missing = []
    for name in sorted(names):
        thing = ms
        for part in name.split(".")[1:]:
            thing = getattr(thing, part, None)
        if thing is None:
            missing.append(name)
    assert not missing


def test_the_patch_refuses_a_helper_of_another_form(monkeypatch):
    """What a user of another MindSpore is told."""
    monkeypatch.setattr(comm_func, cpu_world._HELPERS[0], lambda group, more=1, other=2: group)
    with pytest.raises(CommError, match=r"comm_func\._get_group_size of the known form"):
        cpu_world._use_cpu_group()


def test_bf16_has_no_matmul_on_cpu():
    """Why device weights are expanded to fp32 on CPU."""
    x = ms.Tensor(np.ones((2, 2), np.float32)).astype(ms.bfloat16)
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        ops.matmul(x, x).astype(ms.float32).asnumpy()
