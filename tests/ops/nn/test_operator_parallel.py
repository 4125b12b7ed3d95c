"""Stages of ranks that hold a part of every operator, against the stages of one rank."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from ops.backend import tensor_on
from ops.comm.single import SingleRank
from ops.errors import ConfigError
from ops.nn.dims import StageDims
from ops.nn.operator_stages import OperatorStages, make_stages
from ops.nn.stages import AttnWeights, Stages, merge_slices
from ops.nn.warm_up import warm_up
from tests import reference as ref
from tests.ranks_in_turns import run_in_turns

SHAPE = ref.Shape(24, 4, 2, 6, 5, 2, 10)
OP = 2
FFN = 8
DTYPES = [("float64", 1e-12), ("float32", 1e-6)]
NORMS = ("ln", "qn", "kn", "ln2", "wr")
SPLIT_ROWS = ("wq", "wk", "wv")


def with_and_without_norm(tolerance64, tolerance32):
    """Dtypes with and without the norms of heads: whether the formulas are right shows in fp64."""
    return [
        ("float64", tolerance64, True),
        ("float64", tolerance64, False),
        ("float32", tolerance32, True),
        pytest.param("float32", tolerance32, False, marks=pytest.mark.long),
    ]


def whole_dims(qk_norm=True):
    return StageDims(**asdict(SHAPE), qk_norm=qk_norm)


def rank_dims(qk_norm=True):
    return replace(whole_dims(qk_norm), num_heads=2, num_kv_heads=1)


def part(array, index, axis, size=OP):
    """Block `index` of `size` along an axis, or the whole array without one."""
    return array if axis is None else np.split(array, size, axis)[index]


def axis_of(name):
    return 0 if name in SPLIT_ROWS else (1 if name == "wo" else None)


def attention_weights(p, index=None):
    """Weights of one rank (or of all, without `index`) as tensors."""
    found = []
    for name in AttnWeights._fields:
        value = p[name]
        if value is not None and index is not None:
            value = part(value, index, axis_of(name))
        found.append(None if value is None else tensor_on(np.ascontiguousarray(value)))
    return AttnWeights(*found)


class Case:
    """Weights and inputs of a layer in one dtype, and how near is near enough."""

    def __init__(self, dtype, tolerance, qk_norm=True, seed=1):
        self.dtype, self.tolerance, self.qk_norm = dtype, tolerance, qk_norm
        self.rng = np.random.default_rng(seed)
        p = ref.random_layer(self.rng, SHAPE, FFN, qk_norm=qk_norm, shared_size=FFN)
        self.p = {
            name: None if value is None else value.astype(dtype)
            for name, value in p.items()
            if name not in ("experts", "shared")
        }
        self.swiglu = [w.astype(dtype) for w in p["shared"]]
        self.tokens = 2 * SHAPE.seq_len
        self.h, self.dout = self.normal(self.tokens, 24), self.normal(self.tokens, 24)

    def normal(self, *shape):
        return self.rng.standard_normal(shape).astype(self.dtype)

    def stages(self):
        return Stages(whole_dims(self.qk_norm), self.dtype)

    def near(self, got, want, what=""):
        got, want = np.asarray(got), np.asarray(want)
        assert got.shape == want.shape and got.dtype == want.dtype
        error = np.abs(got - want).max() / np.abs(want).max()
        assert error <= self.tolerance, f"{what}: relative error {error:.1e}"


def array(tensor):
    return tensor.asnumpy().copy()


@pytest.mark.parametrize(("dtype", "tolerance", "qk_norm"), with_and_without_norm(1e-12, 1e-6))
def test_parts_of_attention_add_up_to_the_fused_stage(dtype, tolerance, qk_norm):
    case = Case(dtype, tolerance, qk_norm)
    h, dout = tensor_on(case.h), tensor_on(case.dout)
    whole = case.stages()
    weights = attention_weights(case.p)
    want_h, want_saved = whole.attn_fwd(h, weights)
    want_dh, want = whole.attn_bwd(h, weights, want_saved, dout)

    xn = whole.final_norm_fwd(h, weights.ln)
    stages = OperatorStages(rank_dims(qk_norm), dtype, SingleRank())
    outputs, parts = [], []
    for index in range(OP):
        mine = attention_weights(case.p, index)
        out, saved = stages.attn_heads_fwd(xn, mine)
        for name, got, all_heads in zip("qkvo", saved, want_saved):
            case.near(array(got), part(array(all_heads), index, 1), name)
        outputs.append(array(out))
        parts.append([array(x) for x in stages.attn_heads_bwd(xn, mine, saved, dout)])
    case.near(sum(outputs), array(want_h) - case.h, "output")
    dxn, *grads = zip(*parts)
    dh, dln = whole.final_norm_bwd(h, weights.ln, tensor_on(sum(dxn)))
    case.near(case.dout + array(dh), array(want_dh), "dh")
    case.near(array(dln), array(want.ln), "dln")
    for name, got in zip(("wq", "wk", "wv", "wo"), grads):
        case.near(np.concatenate(got, axis_of(name)), array(getattr(want, name)), name)
    if qk_norm:
        case.near(sum(grads[4]), array(want.qn), "qn")
        case.near(sum(grads[5]), array(want.kn), "kn")


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_parts_of_the_weighted_sum_add_up_to_combine(dtype, tolerance, shared):
    case = Case(dtype, tolerance)
    slots = case.tokens * SHAPE.num_experts_per_tok
    pos = tensor_on(case.rng.permutation(slots).reshape(case.tokens, -1).astype(np.int32))
    w = tensor_on(case.normal(case.tokens, SHAPE.num_experts_per_tok))
    y = [case.normal(slots, 24) for _ in range(OP)]
    extra = [case.normal(case.tokens, 24) if shared else None for _ in range(OP)]
    want = case.stages().combine(
        tensor_on(case.h), tensor_on(sum(y)), pos, w, tensor_on(sum(extra)) if shared else None
    )
    stages = OperatorStages(rank_dims(), dtype, SingleRank())
    parts = [
        array(stages.combine_partial(tensor_on(a), pos, w, b if b is None else tensor_on(b)))
        for a, b in zip(y, extra)
    ]
    case.near(case.h + sum(parts), array(want))


def whole_layer(stages, case, index=None):
    """Attention, router, a shared expert and the head, by the calls that a step makes.

    Everything comes back with all tokens, and the gradients of this rank's weights.
    """
    size = OP if index is None else 1
    weights = attention_weights(case.p, index)
    pick = [0, 0, 1] if index is not None else [None] * 3
    swiglu = [tensor_on(np.ascontiguousarray(part(w, index, a))) for w, a in zip(case.swiglu, pick)]
    ln2, wr = tensor_on(case.p["ln2"]), tensor_on(case.p["wr"])
    own_h = stages.own_tokens(tensor_on(case.h))
    h_mid, saved = stages.attn_fwd(own_h, weights)
    xn, logits = stages.router_fwd(h_mid, ln2, wr)
    choice = ref.choose(array(logits), 2).astype(np.int32)
    idx = tensor_on(stages.agree_choice(choice))
    w, _, _ = stages.router_weights(logits, idx)
    slots = 2 * case.tokens
    rng = np.random.default_rng(8)
    pos = tensor_on(rng.permutation(slots).reshape(-1, 2).astype(np.int32))
    # What experts would give: any numbers, a part of them on each rank.
    y, dx, dw = (
        tensor_on(np.full(shape, 0.5, case.dtype) * rng.standard_normal(shape[0])[:, None] * size)
        for shape in ((slots, 24), (slots, 24), (case.tokens, 2))
    )
    y, dx, dw = (tensor_on(x.asnumpy().astype(case.dtype)) for x in (y, dx, dw))
    shared, g, u = stages.shared_fwd(xn, *swiglu)
    h_out = stages.combine(h_mid, y, pos, w, shared)
    xn_out = stages.final_norm_fwd(h_out, ln2)

    dxn = tensor_on(xn_out.asnumpy() * (0.1 if index is None else 0.1 / OP))
    dh, dln_out = stages.final_norm_bwd(h_out, ln2, dxn)
    dx_shared, *dswiglu = stages.shared_bwd(xn, g, u, dh, *swiglu)
    dxn = stages.uncombine(dx, pos, dx_shared)
    dmid, dln2, dwr = stages.router_bwd(h_mid, ln2, wr, logits, idx, dxn, dw, 0.3, 0.2)
    dh_mid = tensor_on(stages.own_tokens(dh).asnumpy() + dmid.asnumpy())
    dh_in, grads = stages.attn_bwd(own_h, weights, saved, dh_mid)
    replicated = {"xn": xn, "logits": logits, "xn_out": xn_out, "dh": dh, "dh_in": dh_in}
    replicated |= {"dln_out": dln_out, "dln2": dln2, "dwr": dwr, "dln": grads.ln}
    if case.qk_norm:
        replicated |= {"dqn": grads.qn, "dkn": grads.kn}
    split = {name: getattr(grads, name) for name in ("wq", "wk", "wv", "wo")}
    split |= dict(zip(("gate", "up", "down"), dswiglu))
    own = {"h_mid": h_mid, "h_out": h_out}
    return [{name: array(x) for name, x in kind.items()} for kind in (replicated, split, own)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance", "qk_norm"), with_and_without_norm(1e-11, 1e-5))
def test_ranks_together_compute_what_one_rank_computes(
    dtype, tolerance, qk_norm, sequence_parallel
):
    case = Case(dtype, tolerance, qk_norm, seed=4)
    want_replicated, want_split, want_own = whole_layer(case.stages(), case)

    def rank(world):
        stages = make_stages(rank_dims(qk_norm), dtype, world, sequence_parallel=sequence_parallel)
        return whole_layer(stages, case, world.rank)

    replicated, split, own = zip(*run_in_turns(OP, rank))
    for name, want in want_replicated.items():
        case.near(replicated[0][name], want, name)
        assert np.array_equal(replicated[0][name], replicated[1][name]), f"{name} is not agreed"
    for name, want in want_split.items():
        axis = 1 if name in ("wo", "down") else 0
        case.near(np.concatenate([x[name] for x in split], axis), want, name)
    for name, want in want_own.items():
        if sequence_parallel:
            case.near(np.concatenate([x[name] for x in own]), want, name)
        else:
            case.near(own[0][name], want, name)
            assert np.array_equal(own[0][name], own[1][name]), f"{name} is not agreed"


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_parts_of_vocabulary_slices_make_the_same_stream_and_loss(dtype, tolerance):
    """Slices 0..12 and 12..20, each of them split over the ranks."""
    case = Case(dtype, tolerance, seed=6)
    table, whole = case.normal(20, 24), case.stages()
    tokens = case.rng.integers(0, 20, case.tokens).astype(np.int32)
    xn = tensor_on(case.h)
    want_h = sum(
        array(whole.embed_fwd(tensor_on(tokens), tensor_on(table[a:b].copy()), a))
        for a, b in ((0, 12), (12, 20))
    )
    ends = whole.head_slice_fwd(xn, tensor_on(table), tensor_on(tokens), 0)
    want_lse, want_loss = merge_slices([tuple(array(x) for x in ends)])

    def rank(world):
        stages = make_stages(rank_dims(), dtype, world)
        slices, h = [], np.zeros_like(want_h)
        for first, rows in ((0, 6), (12, 4)):
            row0 = first + world.rank * rows
            w = tensor_on(table[row0 : row0 + rows].copy())
            h += array(stages.embed_fwd(tensor_on(tokens), w, row0))
            found = stages.head_slice_fwd(xn, w, tensor_on(tokens), row0)
            slices.append(tuple(array(x) for x in found))
        gathered = stages.gather_slices(slices)
        return array(stages.complete_embedding(tensor_on(h))), *merge_slices(gathered)

    ranks = run_in_turns(OP, rank)
    for h, lse, loss in ranks:
        assert np.array_equal(h, want_h), "every row comes from one rank, the rest are zeros"
        case.near(lse, want_lse, "lse")
        case.near(loss, want_loss, "loss")
        assert np.array_equal(loss, ranks[0][2])


def test_all_ranks_use_the_choice_of_the_first():
    def rank(world):
        stages = make_stages(rank_dims(), "float64", world)
        return stages.agree_choice(np.full((3, 2), world.rank, np.int32)).copy()

    assert all((found == 0).all() for found in run_in_turns(OP, rank))


def test_one_rank_gets_the_fused_stages_and_wrong_weights_are_refused():
    assert type(make_stages(whole_dims(), "float32", SingleRank())) is Stages
    stages = OperatorStages(rank_dims(), "float32", SingleRank())
    with pytest.raises(ConfigError, match="head norms are missing"):
        stages.attn_heads_fwd(None, AttnWeights(1, 2, 3, 4, 5))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_warm_up_meets_every_shape_of_a_layer_over_ranks(sequence_parallel):
    case = Case("float32", 0)

    def rank(world):
        stages = make_stages(rank_dims(), "float32", world, sequence_parallel=sequence_parallel)
        shapes, run = set(), stages._run

        def watched(name, *args):
            shapes.add((name, *(tuple(x.shape) for x in args)))
            return run(name, *args)

        stages._run = watched
        warm_up(stages, 2, ffn_size=0, shared_ffn_size=FFN // OP)
        warm = set(shapes)
        shapes.clear()
        whole_layer(stages, case, world.rank)
        return shapes - warm, len(shapes)

    for cold, met in run_in_turns(OP, rank):
        assert met > 10 and not cold
