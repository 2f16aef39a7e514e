"""What the frames hold in place of messages: model cards without their tokenizer, and results in few bytes."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np

from common.wire import Limits, Message, ModelCard, Result, TransferPoint, decode, encode
from common.wire.codec import Part
from scheduler_svc.plan_log.format import FormatError

M = TypeVar("M", bound=Message)

_CARD, _LIMITS, _POINT = Part(ModelCard), Part(Limits), Part(TransferPoint)


class FileDigest(bytes):
    """Stands for the content of a tokenizer file where the core plays again.

    The core compares files and adds up their lengths, no more: two of these are equal when the files are, and `len` is
    the file's.
    """

    length: int

    @classmethod
    def of(cls, content: bytes) -> FileDigest:
        if isinstance(content, FileDigest):
            return content
        return cls.stored(blake2b(content, digest_size=16).digest(), len(content))

    @classmethod
    def stored(cls, digest: bytes, length: int) -> FileDigest:
        made = cls(digest)
        made.length = length
        return made

    def __len__(self) -> int:
        return self.length


def pack_card(card: ModelCard) -> list[Any]:
    """The card with the digest and length of each tokenizer file in place of its content."""
    files = {name: FileDigest.of(content) for name, content in card.tokenizer_files.items()}
    digests = {name: (bytes.__getitem__(file, slice(None)), file.length) for name, file in files.items()}
    return [_CARD.pack(replace(card, tokenizer_files={})), digests]


def unpack_card(packed: list[Any]) -> ModelCard:
    card = _CARD.unpack(packed[0], "card")
    assert isinstance(card, ModelCard)
    files: dict[str, bytes] = {name: FileDigest.stored(digest, length) for name, (digest, length) in packed[1].items()}
    return replace(card, tokenizer_files=files)


def pack_limits(limits: Limits) -> list[Any]:
    return _LIMITS.pack(limits)


def unpack_limits(packed: list[Any]) -> Limits:
    limits = _LIMITS.unpack(packed, "limits")
    assert isinstance(limits, Limits)
    return limits


def pack_point(point: TransferPoint | None) -> list[Any]:
    return _POINT.pack(point or TransferPoint())


def unpack_point(packed: list[Any]) -> TransferPoint:
    point = _POINT.unpack(packed, "transfer")
    assert isinstance(point, TransferPoint)
    return point


def pack_result(result: Result, epoch: int) -> tuple[Any, ...]:
    """Arguments of an `APPLY` frame, but for its epoch. A steady decode has no logprobs, and mostly no endings."""
    plain = result.tokens.dtype == np.dtype("<i4") and result.finish.dtype == np.uint8 and result.epoch == epoch
    if not plain or len(result.logprobs.rows) or result.prompt_logprobs:
        return (encode(result),)
    finish = result.finish.tobytes() if np.count_nonzero(result.finish) else None
    return result.iteration, result.tokens.tobytes(), finish, result.busy_us, result.device_us


def unpack_result(epoch: int, packed: list[Any]) -> Result:
    if len(packed) == 1:
        return decode_as(Result, packed[0])
    iteration, tokens, finish, busy_us, device_us = packed
    column = np.frombuffer(tokens, "<i4")
    codes = np.zeros(len(column), np.uint8) if finish is None else np.frombuffer(finish, np.uint8)
    return Result(epoch, iteration, column, codes, busy_us=busy_us, device_us=device_us)


def decode_as(kind: type[M], data: bytes) -> M:
    """The message, which must be of this type."""
    message = decode(data)
    if not isinstance(message, kind):
        raise FormatError(f"expected a {kind.__name__}, found a {type(message).__name__}")
    return message
