"""The reference decoder: RMSNorm, rotary positions, grouped-query attention with QKNorm, SwiGLU.

Shapes: tokens [B, T] -> logits [B, T, vocabulary]. Query, key and value share one projection (`qkv`), gate
and up another (`gate_up`): the input is quantized once and its codes are saved once, where separate
projections would each save their own copy. Their rows are ordered so that any whole number of ranks can each
take a run of them: by key/value head (its queries, then its key and its value), and gate and up in turns of
`RUN` rows. Softmax, norms, embedding and head stay in high precision.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.swiglu import swiglu

RUN = 64
"""Rows of gate, then as many of up, where the inner size is a multiple of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Shape of a decoder. FP8 needs the linears' widths to be multiples of 128; others still train."""

    width: int
    """Size of the residual stream."""
    layers: int
    heads: int
    kv_heads: int
    """Key/value heads; each serves heads / kv_heads query heads."""
    head_width: int
    hidden: int
    """Inner size of SwiGLU."""
    context: int
    """Longest sequence, in tokens."""
    vocabulary: int = 256
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    qk_norm: bool = True
    """Queries and keys are normalized per head: bounds the logits of attention."""

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "kv_heads", "head_width", "hidden", "context", "vocabulary"):
            if getattr(self, name) < 1:
                raise Invalid(name, getattr(self, name), "must be at least 1")
        if self.heads % self.kv_heads:
            raise Invalid("kv_heads", self.kv_heads, f"must divide heads = {self.heads}")
        if self.head_width % 2:
            raise Invalid("head_width", self.head_width, "must be even: rotary positions turn pairs")

    @property
    def run(self) -> int:
        """Rows of gate that are followed by as many of up."""
        return math.gcd(RUN, self.hidden)


def demo() -> DecoderConfig:
    """1.05 M parameters: two CPU ranks take 0.3 s for a step of 512 bytes, measured without a probe."""
    return DecoderConfig(width=128, layers=4, heads=4, kv_heads=2, head_width=64, hidden=384, context=128)


def hundred_million() -> DecoderConfig:
    """101 M parameters, for one GPU."""
    return DecoderConfig(width=768, layers=16, heads=12, kv_heads=4, head_width=64, hidden=2048, context=1024)


def billion() -> DecoderConfig:
    """1.33 B parameters, for one GPU of 80 GB."""
    return DecoderConfig(width=2048, layers=24, heads=16, kv_heads=16, head_width=128, hidden=5376,
                         context=2048, vocabulary=32768)


SHAPES = {"demo": demo, "hundred_million": hundred_million, "billion": billion}
"""Configurations by name."""


class Decoder(nn.Module):
    """Tokens [B, T] in, logits [B, T, vocabulary] out."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialize()

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[-1] > self.config.context:
            raise Invalid("tokens.shape[-1]", tokens.shape[-1], f"must be at most {self.config.context}")
        x = self.embedding(tokens)
        cos, sin = turns(tokens.shape[-1], self.config, x.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return cast(Tensor, self.head(self.norm(x)))

    def _initialize(self) -> None:
        """Normal(0, 0.02); what writes to the residual stream is scaled down by the number of writers."""
        residual = 0.02 / (2 * self.config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=residual if writes else 0.02)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). x [B, T, width]; cos and sin as `turns` gives them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class Attention(nn.Module):
    """Causal grouped-query attention with QKNorm: queries and keys are normalized per head, learnably."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        heads = config.heads + 2 * config.kv_heads
        self.qkv = nn.Linear(config.width, heads * config.head_width, bias=False)
        self.out = nn.Linear(config.heads * config.head_width, config.width, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else nn.Identity()
            for _ in range(2)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.config
        served = c.heads // c.kv_heads
        groups = self.qkv(x).unflatten(-1, (-1, served + 2, c.head_width))  # [B, T, kv heads, q.. k v, width]
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in groups.split([served, 1, 1], dim=3))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=c.heads != c.kv_heads)
        return cast(Tensor, self.out(y.transpose(1, 2).flatten(2)))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.run = config.run
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(swiglu(self.gate_up(x), self.run)))


def turns(length: int, config: DecoderConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, fp32 [T, head_width / 2]: pair i turns
    by t base^(-2i / head_width).

    Once for all layers: compiled into each of them, sines of large angles took 440 us on an H200 where
    reading them takes less than 100. FSDP hands them on in BF16, which the layers would round them to.
    """
    half = config.head_width // 2
    position = torch.arange(length, device=device, dtype=torch.float32)
    frequency = config.rope_base ** -(torch.arange(half, device=device, dtype=torch.float32) / half)
    angle = torch.outer(position, frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, T, head_width] with pairs (i, i + head_width / 2) turned as `turns` says."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
