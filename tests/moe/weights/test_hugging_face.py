"""`config.json`, and an exported model computed by programs that are not ours."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moe.config import ModelConfig
from moe.mesh import ParallelConfig
from moe.weights.hugging_face import hugging_face_config
from ops.kernels.pool import KernelPool
from tests import reference
from tests.moe.harness import MODEL
from tests.moe.weights.saved_weights import make_run, numbers_of
from tests.moe.weights.test_export import export_numbers

BASE = MODEL | {"n_shared_experts": 0, "vocab_size": 64}
CASES = [
    {"norm_topk_prob": True, "tie_word_embeddings": True, "rope_theta": 10000.0},
    {"norm_topk_prob": False, "tie_word_embeddings": False, "rope_theta": 500.0},
]


@pytest.mark.parametrize("changes", CASES)
def test_every_field_of_the_model_has_its_word(changes):
    model = ModelConfig(**BASE | changes)
    config = hugging_face_config(model, 128, "float32")
    same = set(MODEL) | set(changes) - {"rope_theta"}
    for name in same - {"vocab_slice_rows", "n_shared_experts"}:
        assert config[name] == getattr(model, name)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == model.rope_theta
    assert config["router_aux_loss_coef"] == model.moe_aux_loss_coeff
    assert (config["model_type"], config["max_position_embeddings"]) == ("qwen3_moe", 128)
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]


@pytest.mark.parametrize("changes", [{"qk_norm": False}, {"n_shared_experts": 1}])
def test_what_no_published_architecture_is_like_claims_to_be_none(changes):
    config = hugging_face_config(ModelConfig(**BASE | changes), 128, "float32")
    assert config["model_type"] == "headrace_moe" and "architectures" not in config
    assert config.items() >= changes.items()


def exported(folder: Path, **options) -> tuple[Path, dict[str, np.ndarray], ModelConfig]:
    """An export of random weights of about the size that training makes."""
    changes = options.pop("model")
    run, meta = make_run(
        ParallelConfig(data_parallel=2), model=BASE | changes, weight_dtype="float32"
    )
    numbers = numbers_of(run)
    for name, array in numbers["master"].items():
        array *= np.float32(0.2)
        if "norm" in name:
            array += 1
    with KernelPool(1) as pool:
        export_numbers(folder, numbers, run, meta, pool, **options)
    return folder, numbers["master"], run.model


def ours(model: ModelConfig, weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """fp64 logits [sequence, vocabulary], by the reference that our stages agree with."""
    shape = reference.Shape(
        hidden_size=model.hidden_size,
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        num_experts=model.num_experts,
        num_experts_per_tok=model.num_experts_per_tok,
        seq_len=len(tokens),
        norm_topk_prob=model.norm_topk_prob,
        rope_theta=model.rope_theta,
        rms_norm_eps=model.rms_norm_eps,
    )
    embedding = weights["model.embed_tokens.weight"]
    h = embedding[tokens].astype(np.float64)
    for layer in range(model.num_hidden_layers):
        of = {
            name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): x
            for name, x in weights.items()
        }
        kinds = ("gate_proj", "up_proj", "down_proj")
        params = {
            "ln": of["input_layernorm"],
            "wq": of["self_attn.q_proj"],
            "wk": of["self_attn.k_proj"],
            "wv": of["self_attn.v_proj"],
            "wo": of["self_attn.o_proj"],
            "qn": of["self_attn.q_norm"],
            "kn": of["self_attn.k_norm"],
            "ln2": of["post_attention_layernorm"],
            "wr": of["mlp.gate"],
            "experts": [
                [of[f"mlp.experts.{expert}.{kind}"] for kind in kinds]
                for expert in range(model.num_experts)
            ],
        }
        h = reference.block(h, params, shape)[0]
    h = reference.rms_norm(h, weights["model.norm.weight"], model.rms_norm_eps)
    return h @ weights.get("lm_head.weight", embedding).T


@pytest.mark.parametrize("changes", CASES)
@pytest.mark.parametrize("options", [{}, {"packed": "out-in"}], ids=str)
def test_transformers_loads_it_and_computes_the_same(tmp_path, changes, options):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if options and int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("packed experts are read by transformers 5")
    folder, weights, model = exported(tmp_path / "out", model=changes, **options)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert type(loaded).__name__ == "Qwen3MoeForCausalLM"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = np.random.default_rng(5).integers(0, model.vocab_size, (2, 12))
    with torch.no_grad():
        result = loaded(torch.from_numpy(tokens), labels=torch.from_numpy(tokens))
    wanted = np.stack([ours(model, weights, row) for row in tokens])
    np.testing.assert_allclose(result.logits.numpy(), wanted, rtol=2e-4, atol=2e-4)
    rest = wanted[:, :-1] - wanted[:, :-1].max(-1, keepdims=True)
    chosen = np.take_along_axis(rest, tokens[:, 1:, None], -1)[..., 0]
    loss = (np.log(np.exp(rest).sum(-1)) - chosen).mean()
    assert float(result.loss) == pytest.approx(loss, rel=1e-5)


def test_the_configuration_is_plain_json(tmp_path):
    folder, _, model = exported(tmp_path / "out", model={})
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == model.vocab_size
