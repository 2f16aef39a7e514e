"""The Llama network of the embedded model, as plain torch modules for training.

Every parameter bears the name that Hugging Face's `LlamaForCausalLM` gives it, so that `state_dict()` is the
checkpoint. Rules: RMSNorm (Zhang & Sennrich, 2019), rotary positions in the half-split layout (Su et al., 2021),
SwiGLU (Shazeer, 2020), grouped-query attention (Ainslie et al., 2023), input and output embeddings tied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of the network."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


def rotary_tables(positions: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each [positions, head_dim] float32, the two halves of the last axis equal."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


# The parts between matrix products are compiled, each by itself, into one pass over memory; the products stay torch's
# own. `torch.compiler.set_stance("force_eager")` runs all of it uncompiled.


@torch.compile(dynamic=False)
def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Apply rotary positions to `heads` [batch, heads, length, head_dim]; the tables are [length, head_dim]."""
    first, second = heads.chunk(2, dim=-1)
    return (heads * cosines + torch.cat((-second, first), dim=-1) * sines).to(heads.dtype)


@torch.compile(dynamic=False)
def normalise(hidden: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Divide the last axis of `hidden` by its root mean square and multiply by `scale`; shape and dtype stay."""
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale).to(hidden.dtype)


@torch.compile(dynamic=False)
def causal_weights(scores: Tensor, scale: float) -> Tensor:
    """Return the causal softmax of `scores` [batch, groups, heads a group, length, length] times `scale`."""
    length = scores.shape[-1]
    allowed = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()
    return torch.softmax((scores.float() * scale).masked_fill(~allowed, -1e9), dim=-1).to(scores.dtype)


@torch.compile(dynamic=False)
def gate(gates: Tensor, values: Tensor) -> Tensor:
    """Return `silu(gates) * values`, all of one shape."""
    return functional.silu(gates) * values


@torch.compile(dynamic=False)
def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of `targets` [tokens] under `logits` [tokens, vocab_size], in nats."""
    logits = logits.float()
    chosen = logits.gather(1, targets[:, None]).squeeze(1)
    return (torch.logsumexp(logits, dim=-1) - chosen).mean()


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend causally: queries and result [batch, heads, length, head_dim], keys and values with fewer heads.

    Written out, since on a CPU the backward of the fused operator takes longer. The query heads of a group stand as
    rows of one matrix, so that keys and values are never repeated.
    """
    batch, heads, length, head_dim = queries.shape
    groups = keys.shape[1]
    scores = queries.reshape(batch, groups, -1, head_dim) @ keys.transpose(-1, -2)
    weights = causal_weights(scores.view(batch, groups, -1, length, length), head_dim**-0.5)
    return (weights.view(batch, groups, -1, length) @ values).view(batch, heads, length, head_dim)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learnt scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last axis of `hidden`; shape and dtype stay."""
        return normalise(hidden, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query self-attention."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        query_size = shape.num_attention_heads * shape.head_dim
        key_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Map `hidden` [batch, length, hidden_size] to the same shape; the tables are [length, head_dim]."""
        batch, length, _ = hidden.shape
        head_dim = self.shape.head_dim
        queries = self.q_proj(hidden).view(batch, length, -1, head_dim).transpose(1, 2)
        keys = self.k_proj(hidden).view(batch, length, -1, head_dim).transpose(1, 2)
        values = self.v_proj(hidden).view(batch, length, -1, head_dim).transpose(1, 2)
        queries = rotate(queries, cosines, sines)
        keys = rotate(keys, cosines, sines)
        mixed = causal_attention(queries, keys, values)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `hidden` [batch, length, hidden_size] to the same shape."""
        return self.down_proj(gate(self.gate_proj(hidden), self.up_proj(hidden)))


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Map `hidden` [batch, length, hidden_size] to the same shape."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosines, sines)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    """Embedding, layers and last norm (the part that Hugging Face calls `model`)."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, tokens: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Map `tokens` [batch, length] int64 to hidden states [batch, length, hidden_size]."""
        hidden = self.embed_tokens(tokens)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
            cosines, sines = cosines.to(hidden.dtype), sines.to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cosines, sines)
        return self.norm(hidden)


class LanguageModel(nn.Module):
    """The whole network with tied embeddings; `loss` is what training minimises."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        cosines, sines = rotary_tables(shape.max_position_embeddings, shape.head_dim, shape.rope_theta)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        self.initialise()

    def initialise(self) -> None:
        """Draw the weights from torch's global generator: 0.02, less where a residual stream is written."""
        narrow = 0.02 / (2 * self.shape.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=narrow if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, length, vocab_size] for `tokens` [batch, length] int64."""
        length = tokens.shape[1]
        hidden = self.model(tokens, self.cosines[:length], self.sines[:length])
        return functional.linear(hidden, self.model.embed_tokens.weight)

    def loss(self, rows: Tensor) -> Tensor:
        """Return the mean negative log-likelihood, in nats a token, of `rows` [batch, length + 1] int64."""
        logits = self(rows[:, :-1])
        return token_loss(logits.flatten(0, 1), rows[:, 1:].flatten())
