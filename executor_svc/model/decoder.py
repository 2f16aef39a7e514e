"""The decoder: one forward pass over a flat batch of token rows, for every family."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from executor_svc.kv_cache import KVCache
from executor_svc.model.config import ModelConfig
from executor_svc.model.moe import mixture
from executor_svc.model.rope import cos_sin_table
from executor_svc.model.weights import LayerWeights, Weights
from kernels import (
    AttentionBatch,
    add_rms_norm,
    gelu_tanh_mul,
    paged_attention,
    rms_norm,
    rope_and_cache,
    silu_mul,
    split_keys_for,
)


class Decoder:
    """A causal language model: Llama (Touvron et al., 2023) and its kin, told apart by the switches of `ModelConfig`.

    Holds the weights and the rotary tables; sequences live in the caller's KV cache. Rows of a batch do not influence
    each other: on the CPU in fp32 a row's logits have the same bits in any company.
    """

    def __init__(self, config: ModelConfig, weights: Weights, *, batch_invariant: bool = False) -> None:
        """batch_invariant: on a GPU, too, a row's logits have the same bits in any company, in chunks of any length.

        Its products and its attention then use tiles that do not follow the batch, which takes longer.
        """
        self.config = config
        self.weights = weights
        self.batch_invariant = batch_invariant
        self._split_keys = split_keys_for(config.max_model_len)
        weights.settle(batch_invariant=batch_invariant)
        self.device: torch.device = weights.embedding.device
        self.dtype: torch.dtype = config.dtype
        tables = {
            rope: cos_sin_table(rope, config.head_dim, config.max_model_len).to(self.device)
            for rope in {layer.rope for layer in config.layers}
        }
        self._tables = [tables[layer.rope] for layer in config.layers]

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Run T token rows, writing their keys and values into the cache.

        token_ids, positions, slots: int64 [T]; a slot is `block * block_size + offset`, -1 writes nowhere.
        logit_rows: int64 [R], the token rows whose logits are wanted.
        batch: its `split_keys` and `invariant` are the model's own, whatever it says.
        Returns raw logits, fp32 [R, vocab].
        """
        config, weights = self.config, self.weights
        batch = replace(batch, split_keys=self._split_keys, invariant=self.batch_invariant)
        hidden = F.embedding(token_ids, weights.embedding)
        if config.embedding_scale != 1.0:
            hidden = hidden * config.embedding_scale
        residual = hidden
        first_norm = weights.layers[0].input_norm
        normed = hidden if first_norm is None else self._norm(hidden, first_norm)
        for index, layer in enumerate(weights.layers):
            attended = self._attention(index, layer, normed, positions, slots, batch, cache)
            if index == config.num_layers - 1:  # behind the last attention only these rows matter
                attended, residual = attended[logit_rows], residual[logit_rows]
            normed, residual = self._join(attended, residual, layer.post_attention_norm, layer.pre_mlp_norm)
            next_norm = weights.norm if index == config.num_layers - 1 else weights.layers[index + 1].input_norm
            normed, residual = self._join(self._mlp(layer, normed), residual, layer.post_mlp_norm, next_norm)
        logits = weights.lm_head(normed).float()
        if config.logit_divisor != 1.0:
            logits = logits.div_(config.logit_divisor)
        if config.logit_softcap:
            logits = logits.div_(config.logit_softcap).tanh_().mul_(config.logit_softcap)
        return logits

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps, unit_offset=self.config.unit_offset_norms)

    def _join(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post_norm: torch.Tensor | None,
        next_norm: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a block's output [T, hidden] to the residual stream; returns the next block's input, and the stream."""
        config = self.config
        if post_norm is not None:
            x = self._norm(x, post_norm)
        if config.residual_scale != 1.0:
            x = x * config.residual_scale
        if next_norm is None:
            residual = residual + x
            return residual, residual
        return add_rms_norm(x, residual, next_norm, config.rms_norm_eps, unit_offset=config.unit_offset_norms)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
    ) -> torch.Tensor:
        """x: [T, hidden], normed. Returns [T, hidden]."""
        config = self.config
        q, k, v = self._heads(layer, layer.qkv(x))
        k_cache, v_cache = cache.k[index], cache.v[index]
        rope_and_cache(q, k, v, self._tables[index], positions, slots, k_cache, v_cache)
        attended = paged_attention(
            q,
            k_cache,
            v_cache,
            batch,
            config.attention_scale,
            window=config.layers[index].window,
            softcap=config.attention_softcap,
            sinks=layer.sinks,
        )
        return layer.o(attended.flatten(1))

    def _heads(self, layer: LayerWeights, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv: [T, (heads + 2 * kv_heads) * head_dim]. Returns queries, keys and values [T, heads, head_dim], normed
        where the model norms them."""
        config, tokens = self.config, qkv.shape[0]
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        if config.wide_qk_norm and layer.q_norm is not None and layer.k_norm is not None:
            q, k, v = torch.split(qkv, [size * config.head_dim for size in sizes], dim=1)
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
            q, k, v = (x.view(tokens, -1, config.head_dim) for x in (q, k, v))
            return q, k, v
        q, k, v = torch.split(qkv.view(tokens, -1, config.head_dim), sizes, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        return q, k, v

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden], normed. Returns [T, hidden]."""
        if layer.moe is not None:
            return mixture(self.config, layer.moe, x)
        assert layer.gate_up is not None and layer.down is not None
        gated = layer.gate_up(x)
        return layer.down(silu_mul(gated) if self.config.activation == "silu" else gelu_tanh_mul(gated))
