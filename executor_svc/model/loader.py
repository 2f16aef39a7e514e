"""Checkpoints in safetensors files, single or sharded, into fused weights; every tensor accounted for. Never pickle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from executor_svc.model.config import ModelConfig
from executor_svc.model.destinations import destinations
from executor_svc.model.errors import ModelError
from executor_svc.model.fields import read_json
from executor_svc.model.weights import Weights, allocate

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DERIVED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Tensors that old checkpoints carry and that the config gives anyway."""
_FLOATS = {"F64", "F32", "F16", "BF16"}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model: `model.safetensors`, or else the shards its index names.

    Other weight files beside them are left alone. Raises `ModelError` when there are none, or a shard is missing.
    """
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if (folder / INDEX_FILE).is_file():
        return [folder / name for name in sorted(set(_weight_map(folder / INDEX_FILE).values()))]
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
    if others:
        raise ModelError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}, only {', '.join(others)}")
    if pickles:
        raise ModelError(f"{folder}: {', '.join(pickles)}: pickled weights are not loaded; convert them to safetensors")
    raise ModelError(f"{folder}: no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")


class Checkpoint(Protocol):
    """The tensors of a model, under Hugging Face names."""

    @property
    def path(self) -> Path:
        """Folder or file."""

    @property
    def names(self) -> list[str]: ...

    def where(self, name: str) -> str:
        """File and name, for errors."""

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """A tensor of floats on the CPU; shape: what is expected. Raises `ModelError` naming it."""


def load_weights(checkpoint: Checkpoint, config: ModelConfig, device: torch.device) -> Weights:
    """Read all weights, converted to the config's dtype or quantised, onto the device.

    Each tensor is copied from the mapped file straight to its place in the fused weights, so at no time is more than
    one tensor held beside them. Raises `ModelError` naming the tensor: missing, unknown, twice, of a wrong shape,
    quantized.
    """
    tied, renamed = _tie(checkpoint, config)
    weights = allocate(config, device, tied=tied)
    places = destinations(config, weights)
    missing = set(places)
    for name in checkpoint.names:
        target = renamed.get(name, name)
        if target in places:
            places[target].fill(checkpoint.read(name, places[target].shape))
            missing.remove(target)
        elif not (_DERIVED.search(name) or (tied and name == _LM_HEAD)):
            raise ModelError(f"{checkpoint.where(name)}: unknown tensor, {config.model_type} has none of this name")
    if missing:
        names = sorted(missing)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ModelError(f"{checkpoint.path}: weights lack {names[0]}{more}")
    return weights


class SafetensorsCheckpoint:
    """The safetensors files of a folder, kept mapped."""

    def __init__(self, folder: Path) -> None:
        """Raises `ModelError` for files that are missing, unreadable, or at odds with their index."""
        self.path = folder
        paths = weight_files(folder)
        self._file_of: dict[str, tuple[Path, Any]] = {}
        for path in paths:
            file = _opened(path)
            for name in sorted(file.keys()):
                if name in self._file_of:
                    raise ModelError(f"{folder}: {name} stands in {self._file_of[name][0].name} and in {path.name}")
                self._file_of[name] = (path, file)
        if paths[0].name != SINGLE_FILE:
            self._check_index(folder / INDEX_FILE)

    def _check_index(self, index: Path) -> None:
        for name, shard in _weight_map(index).items():
            if name not in self._file_of or self._file_of[name][0].name != shard:
                raise ModelError(f"{index}: {name} is not in {shard}")

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def where(self, name: str) -> str:
        return f"{self._file_of[name][0]}: {name}"

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        file = self._file_of[name][1]
        header = file.get_slice(name)
        dtype, stored = str(header.get_dtype()), tuple(header.get_shape())
        if dtype not in _FLOATS:
            raise ModelError(f"{self.where(name)}: holds {dtype} values; quantized weights are not supported")
        if shape is not None and stored != shape:
            raise ModelError(f"{self.where(name)}: shape {list(stored)}, but config.json asks for {list(shape)}")
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map: expected an object of tensor names and files")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard != Path(shard).name:
            raise ModelError(f"{index}: weight_map: {name}: {shard!r} is not the name of a file in this folder")
        if not (index.parent / shard).is_file():
            raise ModelError(f"{index.parent / shard}: the shard is missing ({INDEX_FILE} names it)")
    return weight_map


def _tie(checkpoint: Checkpoint, config: ModelConfig) -> tuple[bool, dict[str, str]]:
    """Whether output layer and embedding are one tensor, and tensors that go by another name.

    As in `transformers` 5: with `tie_word_embeddings`, either of the two may stand for both; when both are there and
    differ, they are not tied.
    """
    if not config.tie_word_embeddings:
        return False, {}
    if _LM_HEAD not in checkpoint.names:
        return True, {}
    if _EMBEDDING not in checkpoint.names:
        return True, {_LM_HEAD: _EMBEDDING}
    head, embedding = checkpoint.read(_LM_HEAD), checkpoint.read(_EMBEDDING)
    return head.shape == embedding.shape and bool(torch.equal(head, embedding.to(head.dtype))), {}


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: not a safetensors file: {error}") from error
