"""The two kinds of files that a model may come in, behind one interface."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from common.wire import ModelCard
from executor_svc.model.card import build_card, build_gguf_card
from executor_svc.model.config import ModelConfig, Quantization, read_config
from executor_svc.model.gguf import GGUFModel, gguf_file
from executor_svc.model.loader import Checkpoint, SafetensorsCheckpoint, weight_files


class Source(Protocol):
    """Where a model's config, weights and card are read from. All but `name` raise `ModelError`."""

    @property
    def name(self) -> str:
        """What the model is served as when nobody says otherwise."""

    def config(self, dtype: str, max_model_len: int | None, quantization: Quantization) -> ModelConfig:
        """See `read_config`."""

    def files(self) -> tuple[Path | None, list[Path]]:
        """config.json, where there is one, and the files of the weights: what the fingerprint is made of."""

    def checkpoint(self) -> Checkpoint:
        """The tensors."""

    def card(self, config: ModelConfig, fingerprint: bytes, name: str) -> ModelCard:
        """What the scheduler service is told."""


class HuggingFaceFolder:
    """config.json, safetensors files, tokenizer files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def name(self) -> str:
        return self._folder.resolve().name

    def config(self, dtype: str, max_model_len: int | None, quantization: Quantization) -> ModelConfig:
        return read_config(self._folder, dtype=dtype, max_model_len=max_model_len, quantization=quantization)

    def files(self) -> tuple[Path | None, list[Path]]:
        return self._folder / "config.json", weight_files(self._folder)

    def checkpoint(self) -> Checkpoint:
        return SafetensorsCheckpoint(self._folder)

    def card(self, config: ModelConfig, fingerprint: bytes, name: str) -> ModelCard:
        return build_card(self._folder, config, fingerprint, name)


class GGUFFile:
    """One file that holds everything."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelError` for a file that cannot be read."""
        self._model = GGUFModel(path)

    @property
    def name(self) -> str:
        return self._model.path.stem

    def config(self, dtype: str, max_model_len: int | None, quantization: Quantization) -> ModelConfig:
        return self._model.config(dtype=dtype, max_model_len=max_model_len, quantization=quantization)

    def files(self) -> tuple[Path | None, list[Path]]:
        return None, [self._model.path]

    def checkpoint(self) -> Checkpoint:
        return self._model

    def card(self, config: ModelConfig, fingerprint: bytes, name: str) -> ModelCard:
        return build_gguf_card(self._model, config, fingerprint, name)


def open_source(place: Path) -> Source:
    """place: a folder, or a GGUF file or its folder. Raises `ModelError`."""
    gguf = gguf_file(place)
    return HuggingFaceFolder(place) if gguf is None else GGUFFile(gguf)
