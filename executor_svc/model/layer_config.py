"""What differs from layer to layer, out of config.json: windows, rotary embeddings, experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from executor_svc.model.config_checks import short
from executor_svc.model.families import Experts, Family, Windows
from executor_svc.model.fields import Fields
from executor_svc.model.rope import RopeConfig, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class LayerConfig:
    """What differs from layer to layer."""

    window: int
    """A token at position p sees keys p - window + 1 … p; 0: all up to p."""
    rope: RopeConfig
    sparse: bool = False
    """The MLP is a mixture of experts: `MoEWeights` instead of `gate_up` and `down`."""


def read_layers(fields: Fields, family: Family, count: int, head_dim: int) -> tuple[LayerConfig, ...]:
    """One `LayerConfig` for each of `count` layers. Raises `ModelError`."""
    ropes = read_ropes(fields, family, head_dim)
    sparse = _sparse_layers(fields, family, count)
    types = _layer_types(fields, family, count)
    window = fields.optional_integer("sliding_window") or 0
    if SLIDING in types and not window:
        raise fields.error("sliding_window", "is missing, but there are layers of sliding attention")
    return tuple(
        LayerConfig(window if kind == SLIDING else 0, ropes[kind], layer in sparse) for layer, kind in enumerate(types)
    )


def _layer_types(fields: Fields, family: Family, count: int) -> list[str]:
    """`full_attention` or `sliding_attention` for each layer."""
    given = fields.get("layer_types")
    if given is not None:
        if not isinstance(given, list) or len(given) != count:
            raise fields.error("layer_types", f"expected a list of {count}, one for each layer")
        unknown = next((kind for kind in given if kind not in (FULL, SLIDING)), None)
        if unknown is not None:
            raise fields.error("layer_types", f"{unknown!r} is not supported (supported: {FULL}, {SLIDING})")
    window = fields.optional_integer("sliding_window")
    if family.windows is Windows.PATTERN:
        pattern = fields.integer("sliding_window_pattern")
        if pattern != family.defaults["sliding_window_pattern"] and not family.local_rope:
            raise fields.error("sliding_window_pattern", f"{family.architecture} has a window in every second layer")
        return given or [SLIDING if (layer + 1) % pattern else FULL for layer in range(count)]
    if family.windows is Windows.UPPER_LAYERS:
        if not fields.boolean("use_sliding_window"):
            window = None
        lowest = fields.integer("max_window_layers", minimum=0) if window else count
        if given and SLIDING in given and not window:
            raise fields.error("layer_types", f"has {SLIDING}, but use_sliding_window is false")
        return given or [SLIDING if layer >= lowest else FULL for layer in range(count)]
    if family.windows is Windows.SWITCHED:
        window = window if fields.boolean("use_sliding_window") else None
        if window and fields.optional_integer("max_window_layers", minimum=0):
            raise fields.error("max_window_layers", f"{family.architecture} has a window in every layer or in none")
    if family.windows is Windows.NEVER and window and window < fields.integer("max_position_embeddings"):
        raise fields.error("sliding_window", f"{family.architecture} has no sliding window")
    kind = SLIDING if family.windows in (Windows.ALL_LAYERS, Windows.SWITCHED) and window else FULL
    if given and any(other != kind for other in given):
        raise fields.error("layer_types", f"{family.architecture} would have {kind} in every layer")
    return [kind] * count


def read_ropes(fields: Fields, family: Family, head_dim: int) -> dict[str, RopeConfig]:
    """The rotary embedding of each type of layer."""
    length = fields.integer("max_position_embeddings")
    original = fields.optional_integer("original_max_position_embeddings")
    theta = fields.number("rope_theta", above=0)
    old, new = fields.optional_object("rope_scaling"), fields.optional_object("rope_parameters")
    if old and not fields.given("rope_parameters"):
        new = None  # a default stands back
    if old and new:
        raise fields.error("rope_scaling", "stands beside rope_parameters; only one of them may")
    name = "rope_parameters" if new else "rope_scaling"
    where = f"{fields.where}: {name}"
    if not family.local_rope:
        given = new or old or {}
        rotary = _rotary_dim(fields, given, head_dim) if "partial_rotary_factor" in family.reads else None
        rope = read_rope(given, where, theta, length, original, types=family.rope_types, rotary_dim=rotary)
        return {FULL: rope, SLIDING: rope}
    local_theta = fields.number("rope_local_base_freq", above=0)
    by_type = new or {FULL: old or {}}
    for kind, value in by_type.items():
        if kind not in (FULL, SLIDING) or not isinstance(value, dict | None):
            raise fields.error(name, f"expected an object with {FULL} and {SLIDING}, got {short(by_type)}")
    return {
        FULL: read_rope(by_type.get(FULL) or {}, f"{where}.{FULL}", theta, length, original),
        SLIDING: read_rope(by_type.get(SLIDING) or {}, f"{where}.{SLIDING}", local_theta, length, original),
    }


def _rotary_dim(fields: Fields, rope: dict[str, Any], head_dim: int) -> int:
    """How many of a head's values are rotated; `partial_rotary_factor` of the rope's object goes before the outer."""
    own = Fields(rope, fields.where).optional_number("partial_rotary_factor", above=0)
    outer = fields.optional_number("partial_rotary_factor", above=0)
    rotary_dim = int(head_dim * (own or outer or 1.0))
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise fields.error("partial_rotary_factor", f"{rotary_dim} of {head_dim} values cannot be rotated in pairs")
    return rotary_dim


def _sparse_layers(fields: Fields, family: Family, count: int) -> frozenset[int]:
    """The layers that have experts."""
    if family.experts is Experts.NONE:
        return frozenset()
    if family.experts is not Experts.QWEN:
        return frozenset(range(count))
    given = fields.get("mlp_only_layers")
    dense = [] if given is None else given
    if not isinstance(dense, list) or any(type(layer) is not int or not 0 <= layer < count for layer in dense):
        raise fields.error("mlp_only_layers", f"expected a list of layers below {count}, got {short(dense)}")
    step = fields.integer("decoder_sparse_step")
    return frozenset(layer for layer in range(count) if (layer + 1) % step == 0 and layer not in dense)
