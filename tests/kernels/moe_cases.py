"""Experts to try the expert layers with, and their exact answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Experts:
    """gate_up [E, 2I, H], down [E, H, I], and the biases' arguments, if there are any."""

    weights: tuple[torch.Tensor, torch.Tensor]
    biases: dict[str, torch.Tensor]


def random_experts(
    number: int, width: int, inner: int, dtype: torch.dtype = torch.float32, biased: bool = False
) -> Experts:
    biases = {}
    if biased:
        biases = {"gate_up_bias": 4 * torch.randn(number, 2 * inner), "down_bias": torch.randn(number, width)}
    gate_up, down = torch.randn(number, 2 * inner, width) / width**0.5, torch.randn(number, width, inner) / inner**0.5
    return Experts((gate_up.to(dtype), down.to(dtype)), {name: bias.to(dtype) for name, bias in biases.items()})


def exact_moe(
    x: torch.Tensor, experts: Experts, ids: torch.Tensor, weights: torch.Tensor, activation: str
) -> torch.Tensor:
    """In float64, pair by pair, from the definition; activations as `transformers` writes them."""
    gate_up, down = (weight.double() for weight in experts.weights)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            if not 0 <= expert < len(down):
                continue
            hidden = gate_up[expert] @ x[token].double()
            if experts.biases:
                hidden = hidden + experts.biases["gate_up_bias"][expert].double()
            gate, up = hidden.chunk(2)
            if activation == "silu":
                hidden = torch.nn.functional.silu(gate) * up
            elif activation == "gelu_tanh":
                hidden = torch.nn.functional.gelu(gate, approximate="tanh") * up
            else:
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                hidden = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
            hidden = down[expert] @ hidden
            if experts.biases:
                hidden = hidden + experts.biases["down_bias"][expert].double()
            out[token] += weight * hidden
    return out
