"""The settings of one run, and how they are written: a flag each, or `--compare NAME:field=value,field=value`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from common.wire import Limits
from scheduler_svc.core import SchedulerConfig
from scheduler_svc.simulator import cost_model
from scheduler_svc.simulator.cost_model import CostModel, CostModelError
from scheduler_svc.simulator.simulation import ExecutorSetup


class SettingError(ValueError):
    """A setting that is not there or has no such value. The text names it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run of the comparison."""

    name: str
    config: SchedulerConfig
    setup: ExecutorSetup
    cost: CostModel

    def settings(self) -> dict[str, Any]:
        """All settings, plain."""
        values = {one.name: getattr(self.config, one.name) for one in fields(self.config)}
        values |= {one.name: getattr(self.setup, one.name) for one in fields(self.setup)}
        return {**values, "cost": self.cost.name}


CONFIG_FIELDS = {one.name: one for one in fields(SchedulerConfig)}
SETUP_FIELDS = {one.name: one for one in fields(ExecutorSetup)}
COST_FIELDS = ("cost", "overhead_ms", "request_ms")


def default_row(cost: CostModel, max_waiting: int) -> Row:
    """Defaults: those of the service, but that no request is refused for a full queue; the cost model's executor."""
    known = {name: int(value) for name, value in cost.executor.items() if name in SETUP_FIELDS}
    setup = replace(ExecutorSetup(), **known)
    return Row("base", SchedulerConfig(max_waiting=max_waiting), setup, cost)


def changed(row: Row, name: str, changes: Mapping[str, str]) -> Row:
    """The row under another name with some settings changed. Raises `SettingError`."""
    config: dict[str, Any] = {}
    setup: dict[str, int] = {}
    cost = row.cost
    for key, text in changes.items():
        if key in CONFIG_FIELDS:
            config[key] = _convert(key, text, getattr(row.config, key))
        elif key in SETUP_FIELDS:
            setup[key] = _convert(key, text, getattr(row.setup, key))
        elif key in COST_FIELDS:
            cost = _change_cost(cost, key, text)
        else:
            known = ", ".join([*CONFIG_FIELDS, *SETUP_FIELDS, *COST_FIELDS])
            raise SettingError(f"{key}: there is no such setting; there are {known}")
    result = Row(name, replace(row.config, **config), replace(row.setup, **setup), cost)
    _check(result)
    return result


def _change_cost(cost: CostModel, key: str, text: str) -> CostModel:
    if key == "cost":
        try:
            return cost_model.load(text)
        except CostModelError as error:
            raise SettingError(f"cost: {error}") from None
    milliseconds: float = _convert(key, text, 0.0)
    if milliseconds < 0:
        raise SettingError(f"{key}: must be at least 0, got {text}")
    seconds = milliseconds / 1000
    return replace(cost, overhead_s=seconds) if key == "overhead_ms" else replace(cost, request_s=seconds)


def _convert(key: str, text: str, default: Any) -> Any:
    """The text as the type of the default."""
    try:
        if isinstance(default, bool):
            return {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}[text.lower()]
        if isinstance(default, StrEnum):
            return type(default)(text)
        if isinstance(default, int):
            return int(text)
        if isinstance(default, float):
            return _finite(text)
        return _shares(text)
    except (KeyError, ValueError):
        raise SettingError(f"{key}: expected {_kind(default)}, got {text!r}") from None


def _kind(default: Any) -> str:
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, StrEnum):
        return "one of " + ", ".join(type(default))
    if isinstance(default, int):
        return "a whole number"
    return "a number" if isinstance(default, float) else 'JSON like {"t0": 2}, with weights above 0'


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _shares(text: str) -> dict[str, float]:
    content = json.loads(text)
    shares = {str(tenant): float(weight) for tenant, weight in dict(content).items()}
    if not all(0 < weight < math.inf for weight in shares.values()):
        raise ValueError(text)
    return shares


MINIMA = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_waiting": 1,
    "lanes": 1,
    "max_prefill_chunk": 0,
    "long_prefill_threshold": 0,
    "target_itl_ms": 0,
    "watermark": 0,
    "ageing_s": 0,
    "hold_s": 0,
    "max_strikes": 1,
}
POSITIVE = ("output_token_weight", "default_deadline_s")


def _check(row: Row) -> None:
    """Raise `SettingError` for values that the services would refuse too."""
    values = row.settings()
    for key, least in MINIMA.items():
        if values.get(key, least) < least:
            raise SettingError(f"{key}: must be at least {least}, got {values[key]}")
    for key in POSITIVE:
        if not values.get(key, 1) > 0:
            raise SettingError(f"{key}: must be above 0, got {values[key]}")
    if not values["watermark"] < 1:
        raise SettingError(f"watermark: must be below 1, got {values['watermark']}")
    if values["lanes"] > 256:
        raise SettingError(f"lanes: must be at most 256, got {values['lanes']}")
    limits = dict(Limits.wire_fields)
    for key, name in (
        ("block_size", "block_size"),
        ("blocks", "num_blocks"),
        ("host_blocks", "num_host_blocks"),
        ("seats", "max_num_seqs"),
        ("token_limit", "max_num_batched_tokens"),
    ):
        try:
            limits[name].pack(values[key])
        except ValueError as error:
            raise SettingError(f"{key}: {error}") from None


def parse_comparison(text: str) -> tuple[str, dict[str, str]]:
    """`NAME:field=value,field=value`; `NAME` alone repeats the base. Commas within braces separate nothing."""
    name, _, rest = text.partition(":")
    if not name or "=" in name:
        raise SettingError(f"expected NAME:field=value,field=value, got {text!r}")
    changes = {}
    for part in _split(rest):
        key, equals, value = part.partition("=")
        if not equals:
            raise SettingError(f"expected field=value, got {part!r}")
        changes[key.strip().replace("-", "_")] = value.strip()
    return name, changes


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if character == "," and not depth:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [part for part in parts if part.strip()]
