"""Rotary position embedding (Su et al., 2021) and its scalings, as `transformers` 5 computes them.

linear: kaiokendev's position interpolation. dynamic: bloc97's and emozilla's NTK scaling. yarn: Peng et al., 2023.
llama3: Llama 3.1's smoothed interpolation by wavelength. longrope: Ding et al., 2024, as in Phi-3.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from executor_svc.model.fields import Fields

_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "longrope": {"factor", "short_factor", "long_factor", "attention_factor", "original_max_position_embeddings"},
}
_OTHER_NAMES = {"su": "longrope"}
PLAIN_TYPES = frozenset(_KEYS) - {"longrope"}
_HARMLESS = {"finetuned", "original_max_position_embeddings"}
"""Keys that files carry beside a type that has no use for them; `transformers` passes them over too."""


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding. Layers of the same one share a table."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    original_length: int = 0
    """Context length that the scaling starts from: of pre-training (yarn, llama3, longrope), or the config's
    (dynamic)."""
    attention_factor: float = 1.0
    """Multiplies cosines and sines (yarn, longrope)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """longrope: what each frequency is divided by, where the served length is at most `original_length`, and beyond."""
    rotary_dim: int = 0
    """Values at the front of each head that are rotated, the rest passes; 0: all."""


def read_rope(
    raw: dict[str, Any],
    where: str,
    theta: float,
    max_position_embeddings: int,
    original_length: int | None,
    *,
    types: Collection[str] = PLAIN_TYPES,
    rotary_dim: int | None = None,
) -> RopeConfig:
    """Read one `rope_parameters` (or older `rope_scaling`) object.

    theta: used when the object has no `rope_theta`. original_length: `original_max_position_embeddings` of the outer
    config, which goes before the object's own. types: those that are accepted. rotary_dim: values of a head that are
    rotated; None: all, and a `partial_rotary_factor` below 1 is refused. Raises `ModelError` on an unknown type or key.
    """
    fields = Fields(raw, where, {"rope_theta": theta})
    rope = _read_type(fields, types, max_position_embeddings, original_length, rotary_dim)
    return rope if rotary_dim is None else replace(rope, rotary_dim=rotary_dim)


def _read_type(
    fields: Fields,
    types: Collection[str],
    max_position_embeddings: int,
    original_length: int | None,
    rotary_dim: int | None,
) -> RopeConfig:
    raw = fields.raw
    rope_type = fields.optional_text("rope_type") or fields.optional_text("type") or "default"
    named, rope_type = rope_type, _OTHER_NAMES.get(rope_type, rope_type)
    if rope_type not in types:
        supported = ", ".join(name for name in _KEYS if name in types)
        raise fields.error("rope_type", f"{named!r} is not supported (supported: {supported})")
    unknown = sorted(set(raw) - _ALWAYS - _KEYS[rope_type] - _HARMLESS)
    if unknown:
        raise fields.error(unknown[0], f"is not supported with rope_type {rope_type!r}")
    if rotary_dim is None and fields.optional_number("partial_rotary_factor") not in (None, 1.0):
        raise fields.error("partial_rotary_factor", "only a fully rotary head is supported")
    base = fields.number("rope_theta", above=0)
    if rope_type == "default":
        return RopeConfig(base)
    if rope_type in ("linear", "dynamic"):
        return RopeConfig(base, rope_type, fields.number("factor", above=0), max_position_embeddings)
    original = original_length or fields.optional_integer("original_max_position_embeddings")
    original = original or max_position_embeddings
    if rope_type == "llama3":
        low, high = fields.number("low_freq_factor", above=0), fields.number("high_freq_factor", above=0)
        if high <= low:
            raise fields.error("high_freq_factor", "must be above low_freq_factor")
        factor = fields.number("factor", above=0)
        return RopeConfig(base, rope_type, factor, original, low_freq_factor=low, high_freq_factor=high)
    if rope_type == "longrope":
        return _read_longrope(fields, base, original, max_position_embeddings, rotary_dim)
    return _read_yarn(fields, base, original, max_position_embeddings)


def _read_longrope(
    fields: Fields, theta: float, original: int, max_position_embeddings: int, rotary_dim: int | None
) -> RopeConfig:
    factor = fields.optional_number("factor", above=0) or max_position_embeddings / original
    attention_factor = fields.optional_number("attention_factor", above=0)
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (_factors(fields, name, rotary_dim) for name in ("short_factor", "long_factor"))
    return RopeConfig(theta, "longrope", factor, original, attention_factor, short_factors=short, long_factors=long)


def _factors(fields: Fields, name: str, rotary_dim: int | None) -> tuple[float, ...]:
    """One positive number for each pair of values that is rotated."""
    values = fields.get(name)
    if not isinstance(values, list) or any(type(v) not in (int, float) or not 0 < v < math.inf for v in values):
        raise fields.error(name, "expected a list of positive numbers")
    if rotary_dim is not None and len(values) != rotary_dim // 2:
        raise fields.error(name, f"expected {rotary_dim // 2} numbers, got {len(values)}")
    return tuple(float(v) for v in values)


def _read_yarn(fields: Fields, theta: float, original: int, max_position_embeddings: int) -> RopeConfig:
    # A null factor stands for the ratio of the lengths; one that is absent is a mistake.
    if not fields.given("factor"):
        raise fields.error("factor", "is missing")
    factor = fields.optional_number("factor", above=0) or max_position_embeddings / original
    attention_factor = fields.optional_number("attention_factor", above=0)
    mscale, mscale_all_dim = fields.optional_number("mscale"), fields.optional_number("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    elif attention_factor is None:
        attention_factor = _yarn_mscale(factor, 1.0)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original,
        attention_factor,
        beta_fast=fields.optional_number("beta_fast") or 32.0,
        beta_slow=fields.optional_number("beta_slow") or 1.0,
        truncate=fields.boolean("truncate") if fields.get("truncate") is not None else True,
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def cos_sin_table(rope: RopeConfig, head_dim: int, length: int) -> torch.Tensor:
    """fp32 [length, head_dim] on the CPU: for each position, head_dim / 2 cosines and then as many sines.

    The dynamic type gives position p the frequencies of a sequence of p + 1 tokens: what `transformers` rotates p with
    when it decodes token by token. (When it prefills more than the original length at once, it rotates the whole prompt
    with the frequencies of its end: a result that hangs on how the prompt is cut, which a scheduler cannot offer.)

    longrope gives every position the long factors where the table is longer than the original length, else the short
    ones, as vLLM does. (`transformers` chooses by each sequence's length so far, and computes all keys anew when a
    sequence crosses the original length; keys of both kinds in one cache would not go together.)

    With a `rotary_dim` the table has that many columns.
    """
    positions = torch.arange(length, dtype=torch.int64)[:, None]
    angles = positions.float() * _inverse_frequencies(rope, rope.rotary_dim or head_dim, positions)
    return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(rope.attention_factor)


def _inverse_frequencies(rope: RopeConfig, head_dim: int, positions: torch.Tensor) -> torch.Tensor:
    """fp32 [head_dim / 2], or [P, head_dim / 2] where they depend on the position (int64 [P, 1])."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    if rope.rope_type == "linear":
        return 1.0 / rope.theta**exponents / rope.factor
    if rope.rope_type == "dynamic":
        lengths = (positions + 1).clamp_min(rope.original_length)
        growth = (rope.factor * lengths / rope.original_length) - (rope.factor - 1)
        growth = torch.where(lengths > rope.original_length, growth, 1.0)
        return 1.0 / (rope.theta * growth ** (head_dim / (head_dim - 2))) ** exponents
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, 1.0 / rope.theta**exponents)
    if rope.rope_type == "longrope":
        factors = rope.long_factors if len(positions) > rope.original_length else rope.short_factors
        return 1.0 / (torch.tensor(factors) * rope.theta**exponents)
    if rope.rope_type == "yarn":
        return _yarn_frequencies(rope, head_dim, rope.theta**exponents)
    return 1.0 / rope.theta**exponents


def _llama3_frequencies(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are interpolated, short ones kept, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_length / rope.low_freq_factor
    shortest = rope.original_length / rope.high_freq_factor
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    smooth = (rope.original_length / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), blended, scaled)


def _yarn_frequencies(rope: RopeConfig, head_dim: int, wavelengths: torch.Tensor) -> torch.Tensor:
    """Dimensions that turn often are kept, those that turn less than once are interpolated, a ramp lies between.

    wavelengths: theta ** exponents, in units of 2 pi tokens.
    """

    def dimension(rotations: float) -> float:
        turns = rope.original_length / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
