"""The peer of `bench_compute`: the same MoE Transformer in torch, fp32, eager, fused AdamW.

Written as a careful torch user would: scaled_dot_product_attention, experts in a loop over those
that have tokens, one fused optimizer, gradient accumulation over micro-batches.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from moe.config import ModelConfig, TrainConfig
from offload.config import OptimizerConfig


class Attention(nn.Module):
    """Grouped-query attention with query/key norm and rotary positions."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.q = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.qn = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.kn = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [B, S, D] to [B, S, D]."""
        B, S, _ = x.shape
        q = self.qn(self.q(x).view(B, S, -1, self.c.head_dim)).transpose(1, 2)
        k = self.kn(self.k(x).view(B, S, -1, self.c.head_dim)).transpose(1, 2)
        v = self.v(x).view(B, S, -1, self.c.head_dim).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(B, S, -1))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Experts(nn.Module):
    """Router and SwiGLU experts, dropless."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.router = nn.Linear(c.hidden_size, c.num_experts, bias=False)
        sizes = (c.hidden_size, c.moe_intermediate_size)
        self.gate = nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(c.num_experts))
        self.up = nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(c.num_experts))
        self.down = nn.ModuleList(nn.Linear(*sizes[::-1], bias=False) for _ in range(c.num_experts))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, S, D] to (y [B, S, D], balance and z loss of the micro-batch)."""
        B, S, D = x.shape
        flat = x.reshape(-1, D)
        logits = self.router(flat)
        probs = logits.softmax(-1)
        w, idx = probs.topk(self.c.num_experts_per_tok, -1)
        if self.c.norm_topk_prob:
            w = w / w.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for expert in range(self.c.num_experts):
            token, choice = torch.where(idx == expert)
            if len(token):
                rows = flat[token]
                hidden = F.silu(self.gate[expert](rows)) * self.up[expert](rows)
                y = self.down[expert](hidden) * w[token, choice, None]
                out = out.index_add(0, token, y)
        E = self.c.num_experts
        chosen = F.one_hot(idx, E).sum(1).view(B, S, E).float().mean(1)
        balance = (chosen * probs.view(B, S, E).mean(1)).sum() * E / self.c.num_experts_per_tok
        z = logits.logsumexp(-1).square().view(B, S).mean(1).sum()
        return out.view(B, S, D), (
            self.c.moe_aux_loss_coeff * balance + self.c.moe_z_loss_coeff * z
        ) / B


class Model(nn.Module):
    """The decoder with a tied head."""

    def __init__(self, c: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        layers = range(c.num_hidden_layers)
        self.norm1 = nn.ModuleList(nn.RMSNorm(c.hidden_size) for _ in layers)
        self.norm2 = nn.ModuleList(nn.RMSNorm(c.hidden_size) for _ in layers)
        self.attention = nn.ModuleList(Attention(c) for _ in layers)
        self.experts = nn.ModuleList(Experts(c) for _ in layers)
        self.norm = nn.RMSNorm(c.hidden_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=c.initializer_range)
        half = torch.arange(c.head_dim // 2) / (c.head_dim // 2)
        angles = torch.outer(torch.arange(seq_len).float(), c.rope_theta**-half).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean token loss plus router losses of tokens [B, S]."""
        h = self.embed(tokens)
        extra = h.new_zeros(())
        for layer in range(self.c.num_hidden_layers):
            h = h + self.attention[layer](self.norm1[layer](h), self.cos, self.sin)
            y, losses = self.experts[layer](self.norm2[layer](h))
            h, extra = h + y, extra + losses
        logits = F.linear(self.norm(h), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + extra


class TorchStep:
    """One optimizer step after another on the same model."""

    def __init__(
        self, model: ModelConfig, train: TrainConfig, optimizer: OptimizerConfig, threads: int
    ) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        self._train, self._limit = train, optimizer.max_grad_norm
        self._model = Model(model, train.seq_len)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )

    @property
    def num_parameters(self) -> int:
        """Number of parameters, the tied head counted once."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def __call__(self, tokens: np.ndarray, targets: np.ndarray) -> None:
        """Forward, backward, clip and update on i32 [batch_sequences, seq_len]."""
        self._optimizer.zero_grad(set_to_none=True)
        size, parts = self._train.micro_batch_size, self._train.gradient_accumulation_steps
        for first in range(0, len(tokens), size):
            inputs = torch.from_numpy(tokens[first : first + size]).long()
            wanted = torch.from_numpy(targets[first : first + size]).long()
            (self._model(inputs, wanted) / parts).backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), self._limit)
        self._optimizer.step()
