"""What the reference decoder weighs and costs, from its configuration alone; needs no torch.

Per layer and token, with w = width, a = heads x head_width, k = kv_heads x head_width, f = hidden, kept from
forward to backward:

    elements of the compute precision
        2w          inputs of the two norms
        a + 2k      output of qkv, which the norms of q and k read and of which v is a part
        a           where 1 < kv_heads < heads: queries, brought together from their groups
        a + k       q and k, turned
        a           output of attention
        3f          output of gate_up, and silu(gate)
    inputs of the linears   w + a + w + f: codes in fp8, a tensor of the compute precision in bf16
    bytes                   4 (2 + heads + kv_heads) of the norms' roots, 4 heads of softmax sums

and once per token: w elements into the last norm and w into the head, the fp32 log-softmax of the logits and,
at the turn from forward to backward, as much again for the logits or their gradient, 16 bytes of tokens and
targets. Attention and norms are taken to be fused, as on a GPU: no matrix of T x T is kept, and norms keep
their input only (torch's CPU norm keeps the normalized input in fp32, too). Peaks inside a layer come on top.

Floating-point operations per token, forward and backward: 6 for each weight of a linear or of the head, and
6 T a per layer for causal attention (two products of T/2 positions on average, 2 operations each, three
times). The look-up in the embedding, norms and what is recomputed are not counted.
"""

from typing import TYPE_CHECKING

from fp8scope_trainer.cut import linears_of
from fp8scope_trainer.estimate import ModelSize, Weights

if TYPE_CHECKING:
    from fp8scope_trainer.decoder import DecoderConfig


def size_of(config: "DecoderConfig") -> ModelSize:
    """Parameters and activations of the decoder; see the module."""
    c, attention, keys = config, config.heads * config.head_width, config.kv_heads * config.head_width
    gathered = attention if 1 < c.kv_heads < c.heads else 0
    per_layer = 2 * c.width + 3 * attention + 3 * keys + gathered + 3 * c.hidden
    roots = 4 * (2 + c.heads + c.kv_heads) + 4 * c.heads
    return ModelSize(
        weights=(
            Weights(rows=c.vocabulary, columns=c.width, count=2, exempt=True),
            *(Weights(rows=rows, columns=columns, count=c.layers, linear=True)
              for rows, columns in linears_of(c).values()),
            Weights(rows=1, columns=c.width, count=2 * c.layers + 1, exempt=True),
            *([Weights(rows=1, columns=c.head_width, count=2 * c.layers, exempt=True)] if c.qk_norm else []),
        ),
        layers=c.layers,
        decoder=c,
        activation_bytes=(c.layers * per_layer + 2 * c.width,
                          c.layers * roots + 8 * c.vocabulary + 16 + 4),
        linear_input_elements=c.layers * (2 * c.width + attention + c.hidden),
    )


def flops_per_token(config: "DecoderConfig") -> float:
    """Of forward and backward over sequences of `config.context` tokens."""
    size = size_of(config)
    products = sum(one.elements for one in size.weights if one.linear) + config.vocabulary * config.width
    return 6.0 * products + 6.0 * config.layers * config.context * config.heads * config.head_width
