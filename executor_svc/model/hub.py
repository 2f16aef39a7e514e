"""From what the user names, a folder or a hub id, to a folder."""

from __future__ import annotations

import re
from pathlib import Path

from executor_svc.model.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"]


def model_folder(model: str, revision: str | None = None) -> Path:
    """A path to a folder or a GGUF file as it is; `owner/name` is downloaded from the Hugging Face hub, or found in its
    cache.

    Only configuration, tokenizer and safetensors files are fetched: no code, no pickles. `HF_HOME`, `HF_TOKEN` and
    `HF_HUB_OFFLINE` mean what they mean to `huggingface_hub`. Raises `ModelError` with one plain line.
    """
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise ModelError(f"{model}: is a file; expected a model folder, a GGUF file or a hub id")
    if not _HUB_ID.fullmatch(model):
        raise ModelError(f"{model}: no such folder")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(f"{model}: no such folder, and fetching it as a hub id needs huggingface-hub") from error
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_WANTED))
    except Exception as error:  # the hub client raises its own, its HTTP library's and the system's errors
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ModelError(f"{model}: no such folder, and not to be had from the hub: {reason}") from error
