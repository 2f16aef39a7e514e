"""Writes schemas.json: JSON schemas of the kinds that APIs, tools and forms have, each of which bounds its answers.

Run as `python -m tests.e2e.make_schemas` after a change.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("schemas.json")
COUNT = 216
NAMES = (
    "name age city tags items price status kind notes id owner color size unit rate email phone street country zip "
    "größe título 名前 année état día"
)
WORDS = NAMES.split()
PATTERNS = (
    "^[A-Z]{3}-[0-9]{4}$",
    "^[a-z]{1,8}$",
    "^(red|green|blue)$",
    "^\\d{5}(-\\d{4})?$",
    "^[0-9a-f]{8}$",
    "^\\+[1-9][0-9]{6,9}$",
    "^v[0-9]\\.[0-9]\\.[0-9]$",
    "^[\\w]{2,6}$",
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
Schema = dict[str, Any]


class Maker:
    """Draws schemas from a seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def any(self, depth: int) -> Schema:
        leaves = (
            self.text,
            self.pattern,
            self.formatted,
            self.integer,
            self.number,
            self.enum,
            self.const,
            self.simple,
        )
        inner = (self.record, self.array, self.pair, self.union, self.optional)
        return self.draw.choice(leaves if depth <= 0 else leaves + inner + inner)(depth - 1)

    def text(self, _: int) -> Schema:
        low = self.draw.randrange(3)
        return {"type": "string", "minLength": low, "maxLength": low + self.draw.randrange(1, 12)}

    def pattern(self, _: int) -> Schema:
        return {"type": "string", "pattern": self.draw.choice(PATTERNS)}

    def formatted(self, _: int) -> Schema:
        return {"type": "string", "format": self.draw.choice(FORMATS)}

    def integer(self, _: int) -> Schema:
        low = self.draw.randrange(-500, 500)
        ends = ("minimum", "maximum") if self.draw.random() < 0.7 else ("exclusiveMinimum", "exclusiveMaximum")
        return {"type": "integer", ends[0]: low, ends[1]: low + self.draw.randrange(2, 5000)}

    def number(self, _: int) -> Schema:
        low = self.draw.randrange(-40, 40) / 4
        return {"type": "number", "minimum": low, "maximum": low + self.draw.randrange(1, 400) / 4}

    def enum(self, _: int) -> Schema:
        values: list[Any] = [*self.draw.sample(WORDS, 3), self.draw.randrange(100), None, True, 'a "b" \\ c', "été"]
        return {"enum": self.draw.sample(values, self.draw.randrange(1, 6))}

    def const(self, _: int) -> Schema:
        return {"const": self.draw.choice([7, "fixed", None, False, -1.5, [1, "two", {"three": 3}], {"a": []}, "日本"])}

    def simple(self, _: int) -> Schema:
        return {"type": self.draw.choice(["boolean", "null", ["boolean", "null"]])}

    def record(self, depth: int) -> Schema:
        names = self.draw.sample(WORDS, self.draw.randrange(1, 5))
        required = [name for name in names if self.draw.random() < 0.7]
        schema: Schema = {"type": "object", "properties": {name: self.any(depth) for name in names}}
        if required:
            schema["required"] = required
        if self.draw.random() < 0.5:
            schema["additionalProperties"] = False
        if self.draw.random() < 0.3:
            schema |= {"title": "A record", "description": "Of some fields."}
        return schema

    def array(self, depth: int) -> Schema:
        low = self.draw.randrange(3)
        return {"type": "array", "items": self.any(depth), "minItems": low, "maxItems": low + self.draw.randrange(3)}

    def pair(self, depth: int) -> Schema:
        first, second = self.any(depth - 1), self.any(depth - 1)
        return {"type": "array", "prefixItems": [first, second], "items": False, "minItems": 2, "maxItems": 2}

    def union(self, depth: int) -> Schema:
        return {"anyOf": [self.any(depth) for _ in range(self.draw.randrange(2, 4))]}

    def optional(self, depth: int) -> Schema:
        return {"anyOf": [self.any(depth - 1), {"type": "null"}]}

    def with_references(self) -> Schema:
        key = self.draw.choice(["$defs", "definitions"])
        reference = {"$ref": f"#/{key}/part"}
        properties = {"first": reference, "rest": {"type": "array", "items": reference, "maxItems": 2}}
        return {"type": "object", "properties": properties, "required": ["first"], key: {"part": self.any(1)}}


def schemas() -> list[Schema]:
    made = []
    for number in range(COUNT):
        maker = Maker(number)
        made.append(maker.with_references() if number % 9 == 0 else maker.record(2) if number % 2 else maker.any(3))
    return made


if __name__ == "__main__":
    PATH.write_text("[\n" + ",\n".join(json.dumps(s, ensure_ascii=False) for s in schemas()) + "\n]\n", "utf-8")
