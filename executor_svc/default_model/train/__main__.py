"""Train the embedded default model: `python -m executor_svc.default_model.train --out FOLDER --work FOLDER`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from executor_svc.default_model.train.examples import hold_out
from executor_svc.default_model.train.folder import write_folder, write_json
from executor_svc.default_model.train.loop import Recipe, train
from executor_svc.default_model.train.network import LanguageModel, NetworkShape
from executor_svc.default_model.train.sources import read_chapters
from executor_svc.default_model.train.vocabulary import train_tokenizer


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m executor_svc.default_model.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the Hugging Face files")
    parser.add_argument("--work", type=Path, required=True, help="folder for the tokenizer, checkpoints and figures")
    parser.add_argument("--downloads", type=Path, help="folder of the packages; what is missing is downloaded there")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--steps", type=int, help="steps of every phase, for trials (default: the recipe's)")
    parser.add_argument(
        "--first-stage", type=int, default=0, help="go on with this stage from the checkpoint in --work"
    )
    parser.add_argument("--export-only", action="store_true", help="write --out from the newest checkpoint in --work")
    return parser.parse_args(arguments)


def choose_recipe(steps: int | None) -> Recipe:
    """Return the recipe of the committed model, or one whose phases have `steps` steps each."""
    recipe = Recipe()
    if steps is None:
        return recipe
    stages = [
        replace(stage, phases=tuple(replace(phase, steps=steps) for phase in stage.phases)) for stage in recipe.stages
    ]
    return replace(recipe, stages=tuple(stages))


def main() -> None:
    """Train and write the model, or write it from a checkpoint."""
    options = parse_arguments()
    shape = NetworkShape()
    checkpoint, tokenizer_file = options.work / "weights.safetensors", options.work / "tokenizer.json"
    if options.export_only:
        write_folder(options.out, shape, Tokenizer.from_file(str(tokenizer_file)), load_file(checkpoint))
        return
    # The tokenizers library would otherwise use every core.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false" if options.threads == 1 else "true")
    torch.set_num_threads(options.threads)
    recipe = choose_recipe(options.steps)
    options.work.mkdir(parents=True, exist_ok=True)
    chapters = read_chapters(options.downloads or options.work / "downloads")
    kept, held_out = hold_out(chapters, recipe.validation_share, str(recipe.seed))
    tokenizer = train_tokenizer((text for chapter in kept for text in chapter.paragraphs), shape.vocab_size)
    tokenizer.save(str(tokenizer_file))
    torch.manual_seed(recipe.seed)
    model = LanguageModel(shape)
    if options.first_stage:
        model.load_state_dict(load_file(checkpoint))
    figures = train(model, tokenizer, kept, held_out, recipe, checkpoint, options.first_stage)
    write_json(options.work / "figures.json", figures)
    write_folder(options.out, shape, tokenizer, dict(model.named_parameters()))


if __name__ == "__main__":
    main()
