"""Checkpoints in safetensors files, single or sharded, into fused weights; every tensor accounted for. Never pickle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from executor_svc.model.config import ModelConfig
from executor_svc.model.destinations import Place, destinations
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


def load_weights(folder: Path, config: ModelConfig, device: torch.device) -> Weights:
    """Read all weights, converted to the config's dtype, onto the device.

    Each tensor is copied from the mapped file straight to its place in the fused weights, so at no time is more than
    one tensor held beside them. Raises `ModelError` naming the tensor: missing, unknown, twice, of a wrong shape,
    quantized.
    """
    checkpoint = _Checkpoint(folder)
    tied, renamed = _tie(checkpoint, config)
    weights = allocate(config, device, tied=tied)
    places = destinations(config, weights)
    missing = set(places)
    for path, names in checkpoint.names_by_file.items():
        with _opened(path) as file:
            for name in names:
                target = renamed.get(name, name)
                if target in places:
                    _copy(file, name, places[target], path)
                    missing.remove(target)
                elif not (_DERIVED.search(name) or (tied and name == _LM_HEAD)):
                    raise ModelError(f"{path}: {name}: unknown tensor, {config.model_type} has none of this name")
    if missing:
        names = sorted(missing)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ModelError(f"{folder}: weights lack {names[0]}{more}")
    return weights


class _Checkpoint:
    """Which tensor lies in which file."""

    def __init__(self, folder: Path) -> None:
        paths = weight_files(folder)
        self.names_by_file: dict[Path, list[str]] = {}
        self.file_of: dict[str, Path] = {}
        for path in paths:
            with _opened(path) as file:
                self.names_by_file[path] = sorted(file.keys())
            for name in self.names_by_file[path]:
                if name in self.file_of:
                    raise ModelError(f"{folder}: {name} stands in {self.file_of[name].name} and in {path.name}")
                self.file_of[name] = path
        if paths[0].name != SINGLE_FILE:
            self._check_index(folder / INDEX_FILE)

    def _check_index(self, index: Path) -> None:
        for name, shard in _weight_map(index).items():
            path = self.file_of.get(name)
            if path is None or path.name != shard:
                raise ModelError(f"{index}: {name} is not in {shard}")

    def tensor(self, name: str) -> torch.Tensor:
        with _opened(self.file_of[name]) as file:
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


def _tie(checkpoint: _Checkpoint, config: ModelConfig) -> tuple[bool, dict[str, str]]:
    """Whether output layer and embedding are one tensor, and tensors that go by another name.

    As in `transformers` 5: with `tie_word_embeddings`, either of the two may stand for both; when both are there and
    differ, they are not tied.
    """
    if not config.tie_word_embeddings:
        return False, {}
    if _LM_HEAD not in checkpoint.file_of:
        return True, {}
    if _EMBEDDING not in checkpoint.file_of:
        return True, {_LM_HEAD: _EMBEDDING}
    head, embedding = checkpoint.tensor(_LM_HEAD), checkpoint.tensor(_EMBEDDING)
    return head.shape == embedding.shape and bool(torch.equal(head, embedding.to(head.dtype))), {}


def _copy(file: Any, name: str, place: Place, path: Path) -> None:
    header = file.get_slice(name)
    dtype, shape = str(header.get_dtype()), list(header.get_shape())
    if dtype not in _FLOATS:
        raise ModelError(f"{path}: {name}: holds {dtype} values; quantized weights are not supported")
    if shape != list(place.shape):
        raise ModelError(f"{path}: {name}: shape {shape}, but config.json asks for {list(place.shape)}")
    place.fill(file.get_tensor(name))


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: not a safetensors file: {error}") from error
