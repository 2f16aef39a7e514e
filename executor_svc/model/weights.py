"""The decoder's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from executor_svc.model.config import ModelConfig
from executor_svc.model.layer_config import LayerConfig
from executor_svc.model.linear import Linear
from kernels.quantized_linear import QUANTIZED_DTYPES


@dataclass
class MoEWeights:
    """The experts of a sparse layer (E experts of intermediate size I), and what chooses among them."""

    router: Linear
    """[E, hidden]"""
    gate_up: torch.Tensor
    """[E, 2 * I, hidden]: gate, up."""
    down: torch.Tensor
    """[E, hidden, I]"""
    gate_up_bias: torch.Tensor | None = None
    """[E, 2 * I]"""
    down_bias: torch.Tensor | None = None
    """[E, hidden]"""


@dataclass
class LayerWeights:
    """One decoder layer. Norms [hidden] or, of queries and keys, [head_dim] (`wide_qk_norm`: [heads * head_dim])."""

    input_norm: torch.Tensor | None
    qkv: Linear
    """[(heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    """[hidden, heads * head_dim]"""
    post_attention_norm: torch.Tensor | None
    pre_mlp_norm: torch.Tensor | None
    gate_up: Linear | None
    """[2 * intermediate, hidden]: gate, up. None in a sparse layer."""
    down: Linear | None
    """[hidden, intermediate]. None in a sparse layer."""
    post_mlp_norm: torch.Tensor | None
    moe: MoEWeights | None = None
    """In a sparse layer only."""
    sinks: torch.Tensor | None = None
    """[heads]: for each head the score of a key without a value (GPT-OSS)."""

    def linears(self) -> list[Linear]:
        """The linear layers that are there, the router apart."""
        return [linear for linear in (self.qkv, self.o, self.gate_up, self.down) if linear is not None]

    def products(self) -> list[Linear]:
        """The linear layers that are there, and the router."""
        return self.linears() + ([self.moe.router] if self.moe is not None else [])


@dataclass
class Weights:
    """All tensors of a model, on one device, in one dtype; of quantised linear layers weight and scale in others."""

    embedding: torch.Tensor
    """[vocab, hidden]"""
    layers: list[LayerWeights]
    norm: torch.Tensor
    lm_head: Linear
    """[vocab, hidden]; where embeddings are tied, the embedding itself."""

    def settle(self, *, batch_invariant: bool = False) -> None:
        """To be called once all values are there. batch_invariant: as in `Linear.settle`."""
        for linear in self.products():
            linear.settle(batch_invariant=batch_invariant)

    def products(self) -> list[Linear]:
        """Every linear layer of the model, the output layer too."""
        return [*(linear for layer in self.layers for linear in layer.products()), self.lm_head]


def allocate(config: ModelConfig, device: torch.device, *, tied: bool) -> Weights:
    """Uninitialised weights. tied: the output layer is the embedding."""
    make = _Maker(config, device)
    layers = [make.layer(layer) for layer in config.layers]
    embedding = make.tensor(config.vocab_size, config.hidden_size)
    lm_head = Linear(embedding) if tied else make.linear(config.vocab_size, config.hidden_size, False)
    return Weights(embedding, layers, make.tensor(config.hidden_size), lm_head)


class _Maker:
    """Uninitialised tensors of one dtype on one device."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._config, self._device = config, device

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._config.dtype, device=self._device)

    def linear(self, outputs: int, inputs: int, bias: bool) -> Linear:
        return Linear(self.tensor(outputs, inputs), self.tensor(outputs) if bias else None)

    def layer_linear(self, outputs: int, inputs: int, bias: bool) -> Linear:
        """A linear layer that `quantization` is for."""
        kind = self._config.quantization
        if kind == "none":
            return self.linear(outputs, inputs, bias)
        weight = torch.empty(outputs, inputs, dtype=QUANTIZED_DTYPES[kind], device=self._device)
        scale = torch.empty(outputs, dtype=torch.float32, device=self._device)
        return Linear(weight, self.tensor(outputs) if bias else None, scale)

    def norm(self, width: int, wanted: bool) -> torch.Tensor | None:
        return self.tensor(width) if wanted else None

    def layer(self, layer: LayerConfig) -> LayerWeights:
        config, hidden = self._config, self._config.hidden_size
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        wide, dense = config.wide_qk_norm, not layer.sparse
        return LayerWeights(
            input_norm=self.norm(hidden, config.pre_norms),
            qkv=self.layer_linear(q_width + 2 * kv_width, hidden, config.qkv_bias),
            q_norm=self.norm(q_width if wide else config.head_dim, config.qk_norm),
            k_norm=self.norm(kv_width if wide else config.head_dim, config.qk_norm),
            o=self.layer_linear(hidden, q_width, config.o_bias),
            post_attention_norm=self.norm(hidden, config.post_norms),
            pre_mlp_norm=self.norm(hidden, config.pre_norms),
            gate_up=self.layer_linear(2 * config.intermediate_size, hidden, config.mlp_bias) if dense else None,
            down=self.layer_linear(hidden, config.intermediate_size, config.mlp_bias) if dense else None,
            post_mlp_norm=self.norm(hidden, config.post_norms),
            moe=None if dense else self.moe(),
            sinks=self.tensor(config.num_heads) if config.attention_sinks else None,
        )

    def moe(self) -> MoEWeights:
        config, experts = self._config, self._config.num_experts
        hidden, size, bias = config.hidden_size, config.expert_size, config.moe_bias
        return MoEWeights(
            router=self.linear(experts, hidden, bias),
            gate_up=self.tensor(experts, 2 * size, hidden),
            down=self.tensor(experts, hidden, size),
            gate_up_bias=self.tensor(experts, 2 * size) if bias else None,
            down_bias=self.tensor(experts, hidden) if bias else None,
        )
