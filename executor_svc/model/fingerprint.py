"""A model's fingerprint: 128 bits over its config, its precision and every byte of its weights."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from executor_svc.model.errors import ModelError

_PIECE_BYTES = 32 << 20
_READ_BYTES = 1 << 20


def model_fingerprint(config_file: Path | None, weight_files: list[Path], precision: str) -> bytes:
    """16 bytes, BLAKE2b: the same one means the same weights at the same precision, and so, on the same kind of machine
    with the same kernels, the same bits. config_file: None of a GGUF file.

    Files are cut into pieces of fixed size that threads hash side by side (hashing leaves the interpreter lock), so the
    time is that of reading the files, or about 2 s a GB and core where they are in memory already.
    """
    pieces = [
        (path, begin)
        for path in sorted(weight_files, key=lambda path: path.name)
        for begin in range(0, max(path.stat().st_size, 1), _PIECE_BYTES)
    ]
    whole = hashlib.blake2b(digest_size=16, person=b"gilir-model")
    try:
        whole.update(_digest(config_file.read_bytes() if config_file else b""))
        whole.update(_digest(precision.encode()))
        with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1), "fingerprint") as pool:
            for (path, begin), digest in zip(pieces, pool.map(_hash_piece, pieces), strict=True):
                whole.update(_digest(f"{path.name}:{begin}".encode()) + digest)
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror}") from error
    return whole.digest()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _hash_piece(piece: tuple[Path, int]) -> bytes:
    path, begin = piece
    digest = hashlib.blake2b(digest_size=16)
    buffer = memoryview(bytearray(_READ_BYTES))
    left = _PIECE_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while left and (count := file.readinto(buffer[: min(left, _READ_BYTES)])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()
