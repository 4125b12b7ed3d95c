"""Traps of the pinned MindSpore that our code is shaped by.

A failure here after an upgrade is news, not a bug: the code that works around the trap, named in
each test, may be simplified or must be changed.
"""

import time

import mindspore as ms
import numpy as np
import pytest
from mindspore import ops

from ops.backend import tensor_on
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


def test_bf16_has_no_matmul_on_cpu():
    """Why device weights are expanded to fp32 on CPU."""
    x = ms.Tensor(np.ones((2, 2), np.float32)).astype(ms.bfloat16)
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        ops.matmul(x, x).astype(ms.float32).asnumpy()
