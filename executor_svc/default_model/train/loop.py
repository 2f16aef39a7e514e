"""The training loop: rows of tokens, stages and phases of row length, Muon with AdamW, an average of the weights."""

from __future__ import annotations

import itertools
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
class Stage:
    """Phases under one warm-up and one cosine of the learning rate, with fresh optimizers.

    A stage begins with the averaged weights that the one before it has left.
    """

    phases: tuple[Phase, ...]
    learning_rate: float
    warmup_steps: int

    @property
    def steps(self) -> int:
        """All updates of the stage."""
        return sum(phase.steps for phase in self.phases)


LONG_DOCUMENTS = Mixture(longest_plain=8000)


@dataclass(frozen=True)
class Recipe:
    """All that decides what training gives, besides the texts and the network's shape."""

    stages: tuple[Stage, ...] = (
        Stage(
            phases=(
                Phase(steps=2200, rows=16, length=256),
                Phase(steps=80, rows=4, length=1024, mixture=LONG_DOCUMENTS),
            ),
            learning_rate=3e-3,
            warmup_steps=80,
        ),
        # The end of a cosine is too slow to learn positions never seen before; a second, lower one reaches them.
        Stage(
            phases=(Phase(steps=210, rows=4, length=1024, mixture=LONG_DOCUMENTS),),
            learning_rate=1.2e-3,
            warmup_steps=20,
        ),
    )
    seed: int = 20260
    lowest_rate_share: float = 0.02
    weight_decay: float = 0.05
    gradient_norm: float = 1.0
    average_decay: float = 0.99
    validation_share: float = 0.02


def rate_share(step: int, steps: int, warmup_steps: int, lowest: float) -> float:
    """Return the share of the learning rate at `step` of `steps`: a linear warm-up, then a cosine down to `lowest`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress))


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


def make_optimizers(model: LanguageModel, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Return Muon (Jordan et al., 2024) for the layers' matrices, AdamW for the embeddings and the norms.

    The rates are to be set before each step; scaled to AdamW's updates, Muon takes the same.
    """
    matrices = [weight for weight in model.model.layers.parameters() if weight.dim() == 2]
    norms = [weight for weight in model.parameters() if weight.dim() == 1]
    muon = torch.optim.Muon(matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    groups = [
        {"params": [model.model.embed_tokens.weight], "weight_decay": weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return [muon, torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)]


@torch.no_grad()
def validation_loss(model: LanguageModel, rows: Tensor) -> float:
    """Return the mean loss in nats a token over `rows` [count, length + 1]."""
    model.eval()
    losses = []
    for chunk in torch.split(rows, 16):
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

    @torch.no_grad()
    def copy_to(self, model: LanguageModel) -> None:
        """Set the parameters of `model` to the averages."""
        for name, weight in model.named_parameters():
            weight.copy_(self.averages[name])

    def save(self, path: Path) -> None:
        """Write the averages as float32 safetensors."""
        save_file(self.averages, path)


def update_weights(
    model: LanguageModel,
    optimizers: Sequence[torch.optim.Optimizer],
    rows: Tensor,
    rate: float,
    gradient_norm: float,
) -> float:
    """Make one update at the learning rate `rate` on `rows` [count, length + 1] and return its loss in nats a token.

    Raises FloatingPointError when the loss or a gradient is not finite.
    """
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(rows)
    torch.autograd.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_norm)
    if not torch.isfinite(norm):
        raise FloatingPointError(f"loss {float(loss.detach())}, gradient norm {float(norm)}")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


@dataclass
class Progress:
    """What a run has done so far; `loss` is a running mean of the training loss, in nats a token."""

    steps: int = 0
    tokens: int = 0
    loss: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def add(self, rows: Tensor, loss: float) -> None:
        """Count an update on `rows` [count, length + 1]."""
        self.loss = loss if self.steps == 0 else 0.95 * self.loss + 0.05 * loss
        self.steps += 1
        self.tokens += rows.shape[0] * (rows.shape[1] - 1)

    def figures(self) -> dict[str, float]:
        """Return the figures to log and to keep."""
        seconds = round(time.monotonic() - self.began)
        return {"steps": self.steps, "tokens": self.tokens, "seconds": seconds, "loss": round(self.loss, 4)}


def run_stage(
    model: LanguageModel, stage: Stage, sources: Sequence[Iterator[Tensor]], recipe: Recipe, progress: Progress
) -> Iterator[WeightAverage]:
    """Train `model` through `stage`, a source of batches a phase; yield the averaged weights after each update."""
    optimizers = make_optimizers(model, recipe.weight_decay)
    average = WeightAverage(model, recipe.average_decay)
    step = 0
    for phase, source in zip(stage.phases, sources, strict=True):
        for rows in itertools.islice(source, phase.steps):
            share = rate_share(step, stage.steps, stage.warmup_steps, recipe.lowest_rate_share)
            loss = update_weights(model, optimizers, rows, stage.learning_rate * share, recipe.gradient_norm)
            average.update(model, step)
            progress.add(rows, loss)
            step += 1
            yield average


def train(
    model: LanguageModel,
    tokenizer: Tokenizer,
    chapters: Sequence[Chapter],
    held_out: Sequence[Chapter],
    recipe: Recipe,
    checkpoint: Path,
    first_stage: int = 0,
) -> dict[str, float]:
    """Train `model` from `first_stage` on; leave the averaged weights in it and, now and then, in `checkpoint`.

    Returns the figures of the run: steps, tokens, seconds, and losses in nats a token.
    """
    validation = rows_of(encode_stream(tokenizer, epoch_examples(held_out, f"{recipe.seed}:held out", Mixture())), 256)
    progress = Progress()
    number = sum(len(stage.phases) for stage in recipe.stages[:first_stage])
    for stage in recipe.stages[first_stage:]:
        sources = []
        for phase in stage.phases:
            sources.append(batches(tokenizer, chapters, phase, f"{recipe.seed}:{number}"))
            number += 1
        for average in run_stage(model, stage, sources, recipe, progress):
            if progress.steps % 20 == 0:
                log.info("step", **progress.figures())
            if progress.steps % 200 == 0:
                average.save(checkpoint)
                log.info("validation", loss=round(validation_loss(model, validation), 4))
        average.save(checkpoint)
        average.copy_to(model)
        log.info("stage", averaged_loss=round(validation_loss(model, validation), 4))
    return progress.figures() | {"validation_loss": round(validation_loss(model, validation), 4)}
