"""Requests that schemathesis makes of the API's own description, right ones and wrong ones.

Each is answered as the description says, by no 500, and wrong ones are refused.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jsonschema_rs
import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.chaos.fuzzing import simplest_failure

PATIENCE_S = 60.0
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
SHARES = {
    "/v1/completions": 6,
    "/v1/chat/completions": 6,
    "/v1/responses": 6,
    "/tokenize": 3,
    "/v1/files": 2,
    "/v1/batches": 3,
}
"""How many of the requests a path gets, beside one for each other operation."""
FAULTS = (AssertionError, Failure, FailureGroup, jsonschema_rs.ValidationError, requests.RequestException)
SHORT = 3
FITTING = {
    "/v1/completions": {
        "prompt": [7, 8, 9],
        "max_tokens": SHORT,
        "logit_bias": {},
        "stop_token_ids": [],
        "model": None,
    },
    "/v1/chat/completions": {"max_completion_tokens": SHORT, "logit_bias": {}, "stop_token_ids": [], "model": None},
    "/v1/responses": {"max_output_tokens": SHORT, "logit_bias": {}, "stop_token_ids": [], "model": None},
    "/tokenize": {"model": None},
    "/detokenize": {"model": None, "tokens": [7, 8]},
}
"""Right for the model that is served."""
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": [5], "max_tokens": 2}}


@dataclass
class Described:
    """A service that runs and what it says of itself. `answers`: statuses by operation."""

    port: int
    answers: dict[str, Counter[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.session = requests.Session()
        self.url = f"http://127.0.0.1:{self.port}"
        self._document = self.session.get(f"{self.url}/openapi.json", timeout=PATIENCE_S).json()
        schema = schemathesis.openapi.from_dict(self._document)
        self.operations = [result.ok() for result in schema.get_all_operations()]

    # --- making requests ---

    def can_be_wrong(self, operation: Any) -> bool:
        """Whether it has a body, or a parameter that is not just any text."""
        described = self._document["paths"][operation.path][operation.method]
        components = self._document["components"]["parameters"]
        used = (components[one["$ref"].rsplit("/", 1)[1]] if "$ref" in one else one for one in described["parameters"])
        return "requestBody" in described or any(one["schema"] != {"type": "string"} for one in used)

    def right(self, operation: Any) -> st.SearchStrategy[Any]:
        """Requests as they are described. Half of them are of what exists, and fit the model."""
        path, made = operation.path, operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
        if "{file_id}" in path or "{batch_id}" in path:
            ids = {name: value for name, value in self._ids().items() if name in path}
            existing = operation.as_strategy(generation_mode=GenerationMode.POSITIVE, path_parameters=ids)
            return made | existing.map(_by_nobody)
        fitting: dict[str, Any] = FITTING.get(path, {})
        if path == "/v1/batches" and operation.method == "post":
            fitting = {"input_file_id": self._ids()["file_id"]}
            made = made.map(_by_nobody)
        return made.map(lambda case: _fit(case, fitting)) if fitting else made

    def wrong(self, operation: Any) -> st.SearchStrategy[Any]:
        """Requests with something that must not be."""
        made: st.SearchStrategy[Any] = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
        return made

    def _ids(self) -> dict[str, str]:
        """Of a new file and a batch of it."""
        files, form = {"file": ("input.jsonl", json.dumps(LINE).encode())}, {"purpose": "batch"}
        file = self.session.post(f"{self.url}/v1/files", files=files, data=form, timeout=PATIENCE_S).json()["id"]
        body = {"input_file_id": file, "endpoint": LINE["url"], "completion_window": "24h"}
        batch = self.session.post(f"{self.url}/v1/batches", json=body, timeout=PATIENCE_S).json()["id"]
        return {"file_id": file, "batch_id": batch}

    # --- looking at answers ---

    def attempt(self, case: Any) -> None:
        """Send it. Raises what is wrong with the answer, and `requests.RequestException` without one."""
        response = case.call(base_url=self.url, session=self.session, timeout=PATIENCE_S)
        self.answers.setdefault(case.operation.label, Counter())[response.status_code] += 1
        # A tiny time limit may be named, and is over then.
        assert response.status_code < 500 or response.status_code == 504, (
            f"status {response.status_code}: {response.text[:300]}"
        )
        case.validate_response(response, checks=CHECKS)
        if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
            self._check_events(case.operation.path, response.content.decode())

    def _check_events(self, path: str, text: str) -> None:
        content = self._document["paths"][path]["post"]["responses"]["200"]["content"]
        data = content["text/event-stream"]["schema"]["properties"]["data"]
        has_names = "anyOf" not in data
        schema = data["contentSchema"] if has_names else data["anyOf"][1]["contentSchema"]
        validator = jsonschema_rs.validator_for({**schema, "components": self._document["components"]})
        end = [""] if has_names else ["data: [DONE]", ""]
        events = text.split("\n\n")
        assert events[-len(end) :] == end, f"a stream ends with {events[-2:]}"
        for event in events[: -len(end)]:
            name, marker, told = event.rpartition("data: ")
            assert marker and bool(name) == has_names, f"no event: {event[:200]}"
            value = json.loads(told)
            validator.validate(value)
            assert not has_names or name == f"event: {value['type']}\n"


def _by_nobody(case: Any) -> Any:
    """Without a tenant, as what is there was made."""
    case.headers = {name: value for name, value in (case.headers or {}).items() if name.lower() != "x-tenant"}
    return case


def _fit(case: Any, fitting: dict[str, Any]) -> Any:
    """With these fields, where the request has an even number of others; its answer is short in any case."""
    if isinstance(case.body, dict):
        short = {
            name: SHORT for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if name in fitting
        }
        case.body = {**case.body, **(fitting if len(case.body) % 2 == 0 else short)}
    return case


def fuzz(port: int, count: int, start: int) -> tuple[list[str], dict[str, Counter[int]]]:
    """Send about so many requests; returns what is wrong, the simplest for each operation, and the statuses."""
    described = Described(port)
    found: list[str] = []
    whole = 2 * sum(SHARES.get(operation.path, 1) for operation in described.operations)
    for operation in described.operations:
        share = max(1, count * SHARES.get(operation.path, 1) // whole)
        kinds = [described.right(operation)]
        if described.can_be_wrong(operation):
            kinds.append(described.wrong(operation))
        for cases in kinds:
            wrong = simplest_failure(cases, described.attempt, share, start, FAULTS)
            if wrong is not None:
                found.append(f"{operation.label}: {wrong}")
    return found, described.answers
