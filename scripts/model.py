"""A Llama-style decoder over bytes, dense or with a mixture of experts.

Pre-norm blocks of RMSNorm, rotary embeddings, causal attention and SwiGLU; no biases.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from train_config import ModelConfig

VOCAB_SIZE = 256
ROPE_BASE = 10_000.0
INIT_STD = 0.02


class Rotary(nn.Module):
    """Rotates each pair (i, i + head_dim / 2) of a head by an angle that grows with position."""

    def __init__(self, head_dim: int, max_seq_len: int) -> None:
        super().__init__()
        frequency = ROPE_BASE ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        angle = torch.outer(torch.arange(max_seq_len).float(), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)  # [max_seq_len, head_dim / 2]
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, heads, seq, head_dim]"""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        first, second = x.float().chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.type_as(x)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig, max_seq_len: int) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.rotary = Rotary(config.dim // config.num_heads, max_seq_len)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim]"""
        q, k, v = rearrange(
            self.qkv(x),
            "batch seq (three heads head_dim) -> three batch heads seq head_dim",
            three=3,
            heads=self.num_heads,
        )
        y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        return self.out(rearrange(y, "batch heads seq head_dim -> batch seq (heads head_dim)"))


class SwiGLU(nn.Module):
    """out(silu(gate(x)) * up(x))"""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.out = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.gate(x)) * self.up(x))


class MixtureOfExperts(nn.Module):
    """Sends each token to its top_k experts and sums what they say, weighted by the router.

    An expert that no token of this rank chose is not run, so on that step its parameters get no
    gradient here.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.dim, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            SwiGLU(config.dim, config.hidden_dim) for _ in range(config.num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim]"""
        tokens = rearrange(x, "batch seq dim -> (batch seq) dim")
        weights, chosen = self.router(tokens).float().softmax(dim=-1).topk(self.top_k, dim=-1)
        output = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, slots = (chosen == index).nonzero(as_tuple=True)
            if rows.numel():
                weighted = expert(tokens[rows]) * weights[rows, slots, None].type_as(tokens)
                output = output.index_add(0, rows, weighted)
        return output.view_as(x)


class Block(nn.Module):
    """One layer; what FSDP2 shards and reduces together."""

    def __init__(self, config: ModelConfig, max_seq_len: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config, max_seq_len)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = (
            MixtureOfExperts(config)
            if config.num_experts
            else SwiGLU(config.dim, config.hidden_dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: ModelConfig, max_seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, config.dim)
        self.blocks = nn.ModuleList(Block(config, max_seq_len) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, VOCAB_SIZE, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch, seq] -> [batch, seq, VOCAB_SIZE]"""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(config: ModelConfig, max_seq_len: int, seed: int) -> Decoder:
    """A model on the CPU whose weights depend on `config` and `seed` alone."""
    model = Decoder(config, max_seq_len)
    generator = torch.Generator().manual_seed(seed)
    # Projections into the residual stream start smaller, so that its variance does not grow
    # with depth.
    residual_std = INIT_STD / math.sqrt(2 * config.num_layers)
    for name, parameter in model.named_parameters():
        if name == "embedding.weight":
            # At the scale that the norms bring it to; a small one would make its gradient large.
            nn.init.normal_(parameter, generator=generator)
        elif parameter.ndim == 2:
            std = residual_std if name.endswith("out.weight") else INIT_STD
            nn.init.normal_(parameter, std=std, generator=generator)
    return model
