"""The training loop: rows of tokens, two phases of row length, Muon with AdamW, an average of the weights."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from executor_svc.default_model.train.examples import Mixture, epoch_examples
from executor_svc.default_model.train.network import LanguageModel
from executor_svc.default_model.train.sources import Chapter

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Phase:
    """`steps` updates on `rows` rows of `length` tokens each."""

    steps: int
    rows: int
    length: int
    mixture: Mixture = field(default_factory=Mixture)


@dataclass(frozen=True)
class Recipe:
    """All that decides what training gives, besides the texts and the network's shape."""

    phases: tuple[Phase, ...] = (
        Phase(steps=2200, rows=16, length=256),
        # The positions up to the model's limit, on documents long enough to reach them.
        Phase(steps=80, rows=4, length=1024, mixture=Mixture(longest_plain=8000)),
    )
    seed: int = 20260
    learning_rate: float = 3e-3
    lowest_rate_share: float = 0.02
    warmup_steps: int = 80
    weight_decay: float = 0.05
    gradient_norm: float = 1.0
    average_decay: float = 0.99
    validation_share: float = 0.02


def rate_share(step: int, steps: int, recipe: Recipe) -> float:
    """Return the share of the learning rate at `step` of `steps`: a linear warm-up, then a cosine to the lowest."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, steps - recipe.warmup_steps)
    return recipe.lowest_rate_share + (1 - recipe.lowest_rate_share) * 0.5 * (1 + math.cos(math.pi * progress))


def encode_stream(tokenizer: Tokenizer, examples: Sequence[str]) -> Tensor:
    """Return the tokens of all examples, one after the other, as one int64 vector."""
    encodings = tokenizer.encode_batch_fast(list(examples), add_special_tokens=False)
    return torch.tensor([token for encoding in encodings for token in encoding.ids], dtype=torch.int64)


def rows_of(stream: Tensor, length: int) -> Tensor:
    """Cut `stream` into rows [count, length + 1]; the last token of a row is the first of the next."""
    return stream.unfold(0, length + 1, length)


def batches(tokenizer: Tokenizer, chapters: Sequence[Chapter], phase: Phase, seed: str) -> Iterator[Tensor]:
    """Yield batches [rows, length + 1] without end; each epoch has new examples."""
    epoch = 0
    while True:
        rows = rows_of(
            encode_stream(tokenizer, epoch_examples(chapters, f"{seed}:{epoch}", phase.mixture)), phase.length
        )
        log.info("epoch", seed=f"{seed}:{epoch}", rows=len(rows), length=phase.length)
        for first in range(0, len(rows) - phase.rows + 1, phase.rows):
            yield rows[first : first + phase.rows]
        epoch += 1


def make_optimizers(model: LanguageModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon (Jordan et al., 2024) for the layers' matrices, AdamW for the embeddings and the norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.dim() == 2]
    norms = [weight for weight in model.parameters() if weight.dim() == 1]
    muon = torch.optim.Muon(
        matrices, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    groups = [
        {"params": [model.model.embed_tokens.weight], "weight_decay": recipe.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return [muon, torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)]


@torch.no_grad()
def validation_loss(model: LanguageModel, rows: Tensor) -> float:
    """Return the mean loss in nats a token over `rows` [count, length + 1]."""
    model.eval()
    losses = []
    for chunk in rows.split(16):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model.loss(chunk) * len(chunk))
    model.train()
    return float(sum(losses)) / len(rows)


class WeightAverage:
    """Exponential moving average of a model's parameters."""

    def __init__(self, model: LanguageModel, decay: float) -> None:
        self.decay = decay
        self.averages = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: LanguageModel, step: int) -> None:
        """Take in the parameters after `step`; the first steps are forgotten sooner."""
        share = 1 - min(self.decay, (step + 1) / (step + 10))
        torch._foreach_lerp_(list(self.averages.values()), [weight.detach() for weight in model.parameters()], share)

    def save(self, path: Path) -> None:
        """Write the averages as float32 safetensors."""
        save_file(self.averages, path)


def update_weights(
    model: LanguageModel,
    optimizers: Sequence[torch.optim.Optimizer],
    rows: Tensor,
    recipe: Recipe,
) -> float:
    """Make one update on `rows` [count, length + 1] and return its loss in nats a token.

    Raises FloatingPointError when the loss or a gradient is not finite.
    """
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(rows)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_norm)
    if not torch.isfinite(norm):
        raise FloatingPointError(f"loss {float(loss.detach())}, gradient norm {float(norm)}")
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def train(
    model: LanguageModel,
    tokenizer: Tokenizer,
    kept: Sequence[Chapter],
    held_out: Sequence[Chapter],
    recipe: Recipe,
    checkpoint: Path,
) -> dict[str, float]:
    """Train `model`; leave the averaged weights in `checkpoint` (every 200 steps, and at the end) and in `model`.

    Returns the figures of the run: tokens, seconds and losses.
    """
    validation = rows_of(encode_stream(tokenizer, epoch_examples(held_out, f"{recipe.seed}:held out", Mixture())), 256)
    optimizers = make_optimizers(model, recipe)
    average = WeightAverage(model, recipe.average_decay)
    steps = sum(phase.steps for phase in recipe.phases)
    began, step, tokens, recent = time.monotonic(), 0, 0, 0.0
    for number, phase in enumerate(recipe.phases):
        source = batches(tokenizer, kept, phase, f"{recipe.seed}:{number}")
        for _ in range(phase.steps):
            share = rate_share(step, steps, recipe)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = recipe.learning_rate * share
            loss = update_weights(model, optimizers, next(source), recipe)
            average.update(model, step)
            recent = loss if step == 0 else 0.95 * recent + 0.05 * loss
            step += 1
            tokens += phase.rows * phase.length
            if step % 20 == 0:
                log.info(
                    "step", step=step, loss=round(recent, 4), tokens=tokens, seconds=round(time.monotonic() - began)
                )
            if step % 200 == 0 or step == steps:
                average.save(checkpoint)
                log.info("validation", step=step, loss=round(validation_loss(model, validation), 4))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(average.averages[name])
    figures = {
        "steps": step,
        "tokens": tokens,
        "seconds": round(time.monotonic() - began),
        "training_loss": round(recent, 4),
        "validation_loss": round(validation_loss(model, validation), 4),
    }
    log.info("trained", **figures)
    return figures
