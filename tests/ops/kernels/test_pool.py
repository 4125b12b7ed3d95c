import threading

import numpy as np
import pytest

from ops.kernels.pool import BLOCK, CHUNK_MAX, CHUNK_MIN, KernelPool, run_chunks
from ops.kernels.warm_up import warm_up


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, 10 * BLOCK + 3, CHUNK_MIN * 3 + 1])
@pytest.mark.parametrize("chunk", [None, BLOCK, 3 * BLOCK])
def test_every_element_is_visited_once_in_chunks_that_start_on_blocks(threads, size, chunk):
    seen, starts, lock = np.zeros(size, np.int64), [], threading.Lock()

    def visit(lo, hi):
        with lock:
            starts.append(lo)
            seen[lo:hi] += 1

    with KernelPool(threads) as pool:
        pool.run(visit, size, chunk)
    assert (seen == 1).all()
    assert all(start % BLOCK == 0 for start in starts)
    assert size > 0 or not starts


def test_large_work_is_cut_into_fewer_larger_chunks():
    lengths = []
    with KernelPool(1) as pool:
        pool.run(lambda lo, hi: lengths.append(hi - lo), 100 * CHUNK_MAX)
        assert max(lengths) == CHUNK_MAX
        lengths.clear()
        pool.run(lambda lo, hi: lengths.append(hi - lo), 10 * CHUNK_MIN)
    assert CHUNK_MIN <= max(lengths) < 2 * CHUNK_MIN


def test_one_thread_runs_inline_and_starts_none():
    before = threading.active_count()
    names = set()
    with KernelPool(1) as pool:
        pool.run(lambda lo, hi: names.add(threading.get_ident()), 10 * BLOCK, BLOCK)
        assert threading.active_count() == before
    assert names == {threading.get_ident()}


def test_the_callers_thread_and_the_helpers_work_at_the_same_time():
    barrier, seen = threading.Barrier(3, timeout=20), set()

    def meet(lo, hi):
        seen.add(threading.get_ident())
        barrier.wait()

    with KernelPool(3) as pool:
        pool.run(meet, 3 * BLOCK, BLOCK)
    assert len(seen) == 3 and threading.get_ident() in seen


def test_threads_persist_between_runs():
    idents = []
    with KernelPool(2) as pool:
        for _ in range(20):
            barrier = threading.Barrier(2, timeout=20)

            def meet(lo, hi, barrier=barrier):
                idents.append(threading.get_ident())
                barrier.wait()

            pool.run(meet, 2 * BLOCK, BLOCK)
    assert len(set(idents)) == 2


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_error_reaches_the_caller_and_later_chunks_are_not_begun(threads):
    begun, lock = [], threading.Lock()

    def fail(lo, hi):
        with lock:
            begun.append(lo)
        raise ArithmeticError(f"chunk {lo}")

    with KernelPool(threads) as pool:
        with pytest.raises(ArithmeticError, match="chunk"):
            pool.run(fail, 1_000 * BLOCK, BLOCK)
        assert 1 <= len(begun) <= threads
        visited = []
        pool.run(lambda lo, hi: visited.append(lo), 4 * BLOCK, BLOCK)
        assert sorted(visited) == [0, BLOCK, 2 * BLOCK, 3 * BLOCK]


def test_an_error_is_raised_only_after_every_thread_left_the_buffers():
    """A failed call returned while a helper still wrote into a buffer that was then reused."""
    entered, release, left = threading.Event(), threading.Event(), []

    def work(lo, hi):
        if lo == 0:
            assert entered.wait(20)
            release.set()
            raise ArithmeticError
        entered.set()
        assert release.wait(20)
        left.append(lo)

    with KernelPool(2) as pool:
        with pytest.raises(ArithmeticError):
            pool.run(work, 2 * BLOCK, BLOCK)
        assert left == [BLOCK]


def test_nested_and_concurrent_runs_do_not_deadlock():
    totals, lock = [], threading.Lock()

    def outer(lo, hi):
        def inner(low, high):
            with lock:
                totals.append(high - low)

        pool.run(inner, 8 * BLOCK, BLOCK)

    with KernelPool(2) as pool:
        callers = [
            threading.Thread(target=pool.run, args=(outer, 8 * BLOCK, BLOCK)) for _ in range(3)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
            assert not caller.is_alive()
    assert sum(totals) == 3 * 8 * 8 * BLOCK


def test_a_closed_pool_refuses_work_and_closing_twice_is_harmless():
    before = threading.active_count()
    pool = KernelPool(3)
    pool.run(lambda lo, hi: None, 8 * BLOCK, BLOCK)
    pool.close()
    pool.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(lambda lo, hi: None, BLOCK)


def test_bad_thread_counts_and_chunk_lengths_are_refused():
    with pytest.raises(ValueError, match="threads is 0"):
        KernelPool(0)
    with KernelPool(1) as pool:
        for chunk in (0, -BLOCK, BLOCK + 1):
            with pytest.raises(ValueError, match=f"chunk_elements is {chunk}"):
                pool.run(lambda lo, hi: None, BLOCK, chunk)


def test_without_a_pool_a_kernel_runs_in_one_piece():
    calls = []
    run_chunks(None, lambda *args: calls.append(args), 10 * CHUNK_MAX, "x")
    run_chunks(None, lambda *args: calls.append(args), 0, "x")
    assert calls == [("x", 0, 10 * CHUNK_MAX)]


def test_after_warm_up_no_kernel_is_compiled_again():
    from ops.kernels import adamw, reduce, split

    warm_up()
    kernels = [
        item
        for module in (adamw, reduce, split)
        for item in vars(module).values()
        if hasattr(item, "signatures")
    ]
    before = [len(item.signatures) for item in kernels]
    assert len(before) > 15
    warm_up()
    master, grad = np.ones(100, np.float32), np.zeros(100, np.uint16)
    moments = np.zeros(100, np.float32), np.zeros(100, np.float32)
    adamw.update_master(master, *moments, grad, 0.5, adamw.AdamW().scalars(1, 0.1, 0.1))
    assert [len(item.signatures) for item in kernels] == before
