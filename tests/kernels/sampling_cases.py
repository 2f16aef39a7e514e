"""Parameters to sample with, and what the rule of `kernels.sample` says, token by token."""

from __future__ import annotations

import torch

from kernels import SamplingColumns, gumbel_noise

Parameters = tuple[float, int, float, float]
"""Temperature, top-k, top-p, min-p of a row."""
OFF: Parameters = (1.0, 0, 1.0, 0.0)
MIXED: list[Parameters] = [
    (0.0, 0, 1.0, 0.0),
    OFF,
    (0.7, 5, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (2.0, 40, 0.5, 0.02),
    (1.3, 0, 1.0, 0.1),
    (0.0, 3, 0.5, 0.5),
    (5.0, 0, 0.99, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
]


def columns(rows: list[Parameters], seeds: list[int] | None = None, positions: list[int] | None = None):  # type: ignore[no-untyped-def]
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return SamplingColumns(
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(top_k, dtype=torch.int32),
        top_p=torch.tensor(top_p),
        min_p=torch.tensor(min_p),
        seed=torch.tensor(seeds or range(len(rows))),
        position=torch.tensor(positions or range(len(rows))),
    )


def kept_tokens(logits: torch.Tensor, parameters: Parameters) -> list[int]:
    """The rule, token by token, in float64."""
    temperature, top_k, top_p, min_p = parameters
    scaled = (logits / temperature).double()
    order = sorted(range(len(logits)), key=lambda token: (-scaled[token].item(), token))
    order = order[: top_k or len(order)]
    probabilities = torch.softmax(scaled[order], 0).tolist()
    kept, mass = [], 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if top_p < 1.0 and mass >= top_p:
            break
        mass += probability
        if probability >= min_p * probabilities[0]:
            kept.append(token)
    return kept


def expected_draw(logits: torch.Tensor, parameters: Parameters, seed: int, position: int) -> int:
    if parameters[0] == 0.0:
        return int(logits.argmax())
    kept = kept_tokens(logits, parameters)
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), len(logits))[0]
    return max(kept, key=lambda token: (logits[token] / parameters[0] + noise[token]).item())
