"""Declared memory of stages against resident memory, each in a process of its own.

The processes are forks of one that has imported MindSpore, which takes longer than a stage, and has
computed nothing yet: MindSpore starts its threads and its pool with the first kernel.
"""

import json
import subprocess
import sys

import pytest

from ops.nn.dims import StageDims
from ops.nn.workspace import STAGES, query_block, workspace_bytes

DIMS = StageDims(512, 8, 2, 64, 16, 2, 512)
SHORT = StageDims(1024, 4, 4, 64, 32, 4, 64, qk_norm=False)
SIZES = {"num_tokens": 2048, "rows": 1024, "ffn_size": 1024, "vocab_rows": 4096}

# What a first call leaves behind besides its tensors: compiled code, thread stacks, pool headers.
COMPILED_BYTES = 20 << 20

MEASURE = r"""
import json, os, signal, sys
import numpy as np
from ops.backend import tensor_on
from ops.nn.dims import StageDims
from ops.comm.single import SingleRank
from ops.nn.operator_stages import OperatorStages
from ops.nn.stages import AttnSaved, AttnWeights, Stages
from ops.nn.workspace import workspace_bytes

def next_case():
    "Return the case that a fork is to measure."
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.alarm(300)
            return json.loads(line)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)
    sys.exit()

stage, dims, sizes, dtype, over_ranks = next_case()
dims = StageDims(**dims)
T, N, F, R = (sizes[n] for n in ("num_tokens", "rows", "ffn_size", "vocab_rows"))
ct, st = np.dtype(dtype), np.float32

def c(*shape, kind=ct):
    return tensor_on(np.full(shape, 0.01, kind))

def f(*shape):
    return c(*shape, kind=st)

def i(*shape):
    return tensor_on(np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape).copy())

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(x.split()[1]) << 10 for x in lines if x.startswith(key))

def weights(d):
    D, q, kv = d.hidden_size, d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    E, K = d.num_experts, d.num_experts_per_tok
    norm = f(d.head_dim) if d.qk_norm else None
    attn = AttnWeights(f(D), c(q, D), c(kv, D), c(kv, D), c(D, q), norm, norm)
    return attn, (c(F, D), c(F, D), c(D, F)), f(E, D), c(R, D)

def arguments(d, attn, swiglu, router, head):
    D, q, kv = d.hidden_size, d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    E, K = d.num_experts, d.num_experts_per_tok
    return {
        "attn_fwd": lambda: (f(T, D), attn),
        "attn_bwd": lambda: (f(T, D), attn, AttnSaved(c(T, q), c(T, kv), c(T, kv), c(T, q)),
                             f(T, D)),
        "router_bwd": lambda: (f(T, D), f(D), router, f(T, E), i(T, K), f(T, D), f(T, K), 1., 1.),
        "expert_bwd": lambda: (c(N, D), c(N, F), c(N, F), f(N), f(N, D), *swiglu),
        "combine": lambda: (f(T, D), c(T * K, D), i(T, K), f(T, K)),
        "final_norm_bwd": lambda: (f(T, D), f(D), f(T, D)),
        "head_slice_bwd": lambda: (c(T, D), head, i(T), 0, f(T), f(T)),
    }[stage]()

Stages(StageDims(32, 2, 1, 16, 2, 1, 16)).final_norm_fwd(f(16, 32), f(32))
stages = OperatorStages(dims, dtype, SingleRank()) if over_ranks else Stages(dims, dtype)
held = weights(dims)
before, files = status("VmRSS"), status("RssFile")
args = arguments(dims, *held)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
out = getattr(stages, stage)(*args)
# A fork meets the pages of libraries anew, which are nobody's workspace.
used = status("VmHWM") - before - (status("RssFile") - files)
declared = workspace_bytes(stage, dims, dtype, over_ranks=over_ranks, **sizes)
print(json.dumps([used, declared]), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def measure():
    """A function that measures a case: bytes that a stage used, and those it declares."""
    server = subprocess.Popen(
        [sys.executable, "-c", MEASURE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )

    def measured(*case):
        server.stdin.write(json.dumps(case) + "\n")
        said = []
        while not said or isinstance(said[-1], list):
            said.append(json.loads(server.stdout.readline()))
        *numbers, status = said
        assert status == 0, f"measuring {case} ended with {status}"
        return numbers[0]

    yield measured
    server.stdin.close()
    assert server.wait(timeout=60) == 0


def check(measure, stage, dims, dtype, over_ranks):
    used, declared = measure(stage, vars(dims), SIZES, dtype, over_ranks)
    used -= COMPILED_BYTES
    assert used <= declared, f"{used >> 20} MiB used, {declared >> 20} MiB declared"
    if dtype == "float32":
        assert declared <= 3 * used + (16 << 20), "a bound this loose would refuse models that fit"


@pytest.mark.parametrize(
    "stage",
    ["attn_fwd", "attn_bwd", "router_bwd", "expert_bwd", "combine", "head_slice_bwd"],
)
@pytest.mark.parametrize("dims, dtype", [(DIMS, "float32"), (SHORT, "float32"), (DIMS, "float16")])
def test_a_stage_takes_no_more_than_it_declares(measure, stage, dims, dtype):
    check(measure, stage, dims, dtype, over_ranks=False)


@pytest.mark.parametrize("stage", ["attn_fwd", "attn_bwd", "router_bwd", "combine"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_stage_over_several_ranks_takes_no_more_than_it_declares(measure, stage, dtype):
    check(measure, stage, DIMS, dtype, over_ranks=True)


def test_every_stage_declares_and_more_tokens_never_take_less():
    more = SIZES | {"num_tokens": 4096, "rows": 2048}
    for stage in STAGES:
        small = workspace_bytes(stage, DIMS, **SIZES)
        assert 0 < small < workspace_bytes(stage, DIMS, **more)
        assert small < workspace_bytes(stage, DIMS, "float64", **SIZES)
        assert small < workspace_bytes(stage, DIMS, over_ranks=True, **SIZES)
    with pytest.raises(KeyError):
        workspace_bytes("dispatch", DIMS, **SIZES)


def test_long_sequences_are_cut_in_at_most_eight_blocks_of_queries():
    for seq_len in (1, 16, 256, 300, 2048, 5000, 32768):
        assert -(-seq_len // query_block(seq_len)) <= 8
