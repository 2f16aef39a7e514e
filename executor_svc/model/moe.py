"""The MLP of a sparse layer: a mixture of experts (Shazeer et al., 2017), of which a row goes through few."""

from __future__ import annotations

import torch

from executor_svc.model.config import ModelConfig
from executor_svc.model.weights import MoEWeights
from kernels import moe_mlp, route_topk


def mixture(config: ModelConfig, moe: MoEWeights, x: torch.Tensor) -> torch.Tensor:
    """x: [T, hidden], normed. Returns [T, hidden]: the weighted sum of the chosen experts' outputs.

    The weights are those of a softmax over all experts; divided by their sum they are the softmax over the chosen ones.
    """
    weights, ids = route_topk(moe.router(x).float(), config.experts_per_token, config.renormalize_experts)
    return moe_mlp(
        x,
        moe.gate_up,
        moe.down,
        ids,
        weights,
        config.activation,
        gate_up_bias=moe.gate_up_bias,
        down_bias=moe.down_bias,
    )
