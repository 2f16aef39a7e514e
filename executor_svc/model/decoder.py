"""The decoder: one forward pass over a flat batch of token rows, for every family."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from executor_svc.kv_cache import KVCache
from executor_svc.model.config import ModelConfig
from executor_svc.model.rope import cos_sin_table
from executor_svc.model.weights import LayerWeights, Weights
from kernels import AttentionBatch, add_rms_norm, gelu_tanh_mul, paged_attention, rms_norm, rope_and_cache, silu_mul


class Decoder:
    """A causal language model of pre-norm layers: Llama (Touvron et al., 2023), Mistral, Qwen 2 and 3, Gemma 3.

    Holds the weights and the rotary tables; sequences live in the caller's KV cache. Rows of a batch do not influence
    each other: on the CPU in fp32 a row's logits have the same bits in any company.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.device: torch.device = weights.embedding.device
        self.dtype: torch.dtype = config.dtype
        tables = {
            rope: cos_sin_table(rope, config.head_dim, config.max_model_len).to(self.device)
            for rope in {layer.rope for layer in config.layers}
        }
        self._tables = [tables[layer.rope] for layer in config.layers]
        # Gemma rounds the factor to the model's dtype before it multiplies.
        self._embedding_scale = torch.tensor(config.embedding_scale).to(config.dtype).item()

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
        Returns raw logits, fp32 [R, vocab].
        """
        config, weights = self.config, self.weights
        hidden = F.embedding(token_ids, weights.embedding)
        if config.embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        residual = hidden
        normed = self._norm(hidden, weights.layers[0].input_norm)
        for index, layer in enumerate(weights.layers):
            attended = self._attention(index, layer, normed, positions, slots, batch, cache)
            if index == config.num_layers - 1:  # behind the last attention only these rows matter
                attended, residual = attended[logit_rows], residual[logit_rows]
            normed, residual = self._join(attended, residual, layer.post_attention_norm, layer.pre_mlp_norm)
            next_norm = weights.norm if index == config.num_layers - 1 else weights.layers[index + 1].input_norm
            normed, residual = self._join(self._mlp(layer, normed), residual, layer.post_mlp_norm, next_norm)
        logits = weights.lm_head(normed).float()
        if config.logit_softcap:
            logits = logits.div_(config.logit_softcap).tanh_().mul_(config.logit_softcap)
        return logits

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps, unit_offset=self.config.unit_offset_norms)

    def _join(
        self, x: torch.Tensor, residual: torch.Tensor, post_norm: torch.Tensor | None, next_norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a block's output [T, hidden] to the residual stream; returns the next block's input, and the stream."""
        if post_norm is not None:
            x = self._norm(x, post_norm)
        config = self.config
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
        heads = layer.qkv(x).view(x.shape[0], -1, config.head_dim)
        q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
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
        )
        return layer.o(attended.flatten(1))

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden], normed. Returns [T, hidden]."""
        gated = layer.gate_up(x)
        return layer.down(silu_mul(gated) if self.config.activation == "silu" else gelu_tanh_mul(gated))
