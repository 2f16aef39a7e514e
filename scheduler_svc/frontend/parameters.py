"""The parameters that both kinds of completion share, checked against the model they are for."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import structlog

from common.wire import SamplingParams
from scheduler_svc.frontend.models import ServedModel
from scheduler_svc.frontend.scheduling import Scheduling, read_scheduling
from scheduler_svc.frontend.stop_strings import StopAutomaton
from scheduler_svc.http.errors import invalid
from scheduler_svc.http.field_kinds import Boolean, Integer, Number, Text
from scheduler_svc.http.fields import Fields, show

log = structlog.get_logger()

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096
"""Of all stop strings of a request together."""
MAX_STOP_TOKENS = 4096
MAX_LOGPROBS = 20
MAX_TOKENS = 1 << 24

MODEL = Text("model", None, 1 << 20)
N = Integer("n", 1, 1, 128)
TEMPERATURE = Number("temperature", 1.0, 0, 2)
TOP_P = Number("top_p", 1.0, 0, 1, above=True)
TOP_K = Integer("top_k", 0, -1, MAX_TOKENS)
MIN_P = Number("min_p", 0.0, 0, 1)
REPETITION_PENALTY = Number("repetition_penalty", 1.0, 0, 10, above=True)
PRESENCE_PENALTY = Number("presence_penalty", 0.0, -2, 2)
FREQUENCY_PENALTY = Number("frequency_penalty", 0.0, -2, 2)
SEED = Integer("seed", -1, -(1 << 63), (1 << 64) - 1)
"""Negative seeds count from 2**64 down; -1, as elsewhere, and no seed at all mean a random one."""
MIN_TOKENS = Integer("min_tokens", 0, 0, MAX_TOKENS)
IGNORE_EOS = Boolean("ignore_eos", False)
STREAM = Boolean("stream", False)
INCLUDE_STOP = Boolean("include_stop_str_in_output", False)
SKIP_SPECIAL_TOKENS = Boolean("skip_special_tokens", True)
ADD_SPECIAL_TOKENS = Boolean("add_special_tokens", None)
REQUEST_ID = Text("request_id", None, 200, pattern=r"[\x21-\x7e]{1,200}")
INCLUDE_USAGE = Boolean("include_usage", False)
CONTINUOUS_USAGE = Boolean("continuous_usage_stats", False)
BIAS = Number("logit_bias", 0.0, -100, 100)
"""Each of its values."""
BIAS_KEY = r"0|[1-9][0-9]{0,11}"
IGNORED = ("metadata", "service_tier", "safety_identifier", "prompt_cache_key")
"""Known fields that need no answer here. `prompt_cache_key` is a hint for routers; prefixes are found by content."""
_BIAS_KEY = re.compile(BIAS_KEY)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """`usage`: a last chunk tells the usage. `continuous`: every chunk does."""

    usage: bool = False
    continuous: bool = False


@dataclass(frozen=True, slots=True)
class Parameters:
    """A checked request without its prompt. Of `sampling`, `max_tokens` and a seed that none was asked for are given to
    each prompt by `sampling_for`.
    """

    n: int
    sampling: SamplingParams
    seeded: bool
    max_tokens: int | None
    max_tokens_name: str
    """What the request calls it."""
    stop: StopAutomaton | None
    include_stop: bool
    skip_special_tokens: bool
    stream: bool
    stream_options: StreamOptions
    scheduling: Scheduling
    request_id: str | None
    add_special_tokens: bool | None

    def sampling_for(
        self, model: ServedModel, prompt_length: int, default_max_tokens: int | None, param: str
    ) -> SamplingParams:
        """Sampling parameters with the final `max_tokens`. Raises `ApiError` 400 when prompt and answer cannot fit.

        The error names `param`, which holds the prompt, where that is too long by itself, else the field of max_tokens.
        Without max_tokens the answer may take `default_max_tokens`, or all that is left where that is None or less.
        """
        room = model.card.max_model_len - prompt_length
        wanted = self.max_tokens
        if room < 1 or (wanted is not None and wanted > room):
            asked = "" if wanted is None else f" and asks for {wanted} more"
            text = (
                f"This model's context holds {model.card.max_model_len} tokens; the prompt has {prompt_length}{asked}."
            )
            raise invalid(param if room < 1 else self.max_tokens_name, text, "context_length_exceeded")
        kv_room = model.kv_capacity - prompt_length + 1
        if kv_room < 1 or (wanted is not None and wanted > kv_room):
            need = prompt_length + (wanted or 1) - 1
            text = f"The request needs KV for {need} tokens; the largest executor holds {model.kv_capacity}."
            raise invalid(param if kv_room < 1 else self.max_tokens_name, text, "kv_capacity_exceeded")
        room = min(room, kv_room)
        if wanted is None:
            wanted = room if default_max_tokens is None else min(room, default_max_tokens)
        if self.sampling.min_tokens > wanted:
            raise invalid(
                "min_tokens", f"min_tokens: must not exceed max_tokens ({wanted}), got {self.sampling.min_tokens}"
            )
        # Each prompt of a call has draws of its own.
        seed = self.sampling.seed if self.seeded else random.getrandbits(64)
        return replace(self.sampling, max_tokens=wanted, seed=seed)


def read_parameters(fields: Fields, model: ServedModel, *, max_tokens_names: tuple[str, ...]) -> Parameters:
    """Read all but the prompt and the logprobs. Of `max_tokens_names` the first that is given counts."""
    max_tokens, max_tokens_name = None, max_tokens_names[0]
    for name in reversed(max_tokens_names):
        given = max_tokens_field(name).read(fields)
        if given is not None:
            max_tokens, max_tokens_name = given, name
    stream = STREAM.read(fields)
    for name in IGNORED:
        fields.raw(name)
    return Parameters(
        n=N.read(fields),
        sampling=_read_sampling(fields, model),
        seeded=SEED.read(fields) != SEED.default,
        max_tokens=max_tokens,
        max_tokens_name=max_tokens_name,
        stop=_read_stop(fields),
        include_stop=INCLUDE_STOP.read(fields),
        skip_special_tokens=SKIP_SPECIAL_TOKENS.read(fields),
        stream=stream,
        stream_options=_read_stream_options(fields, stream),
        scheduling=read_scheduling(fields),
        request_id=REQUEST_ID.read(fields),
        add_special_tokens=ADD_SPECIAL_TOKENS.read(fields),
    )


def max_tokens_field(name: str) -> Integer[None]:
    """The field of this name that says how long the answer may be."""
    return Integer(name, None, 1, MAX_TOKENS)


def log_unknown(fields: Fields) -> None:
    """Fields that nobody knows are passed over."""
    unknown = fields.unknown()
    if unknown:
        log.debug("unknown fields ignored", fields=[name[:60] for name in unknown[:20]])


def _read_sampling(fields: Fields, model: ServedModel) -> SamplingParams:
    """A field that the request leaves out takes the model's own default, then the API's; an explicit 0 stands."""
    vocab_size, own = model.card.vocab_size, model.card.default_params
    bias_ids, bias_values = _read_bias(fields, vocab_size)
    return SamplingParams(
        max_tokens=0,
        temperature=TEMPERATURE.read_or(fields, own.get("temperature", TEMPERATURE.default)),
        top_p=TOP_P.read_or(fields, own.get("top_p", TOP_P.default)),
        top_k=min(vocab_size, max(0, TOP_K.read_or(fields, int(own.get("top_k", TOP_K.default))))),
        min_p=MIN_P.read_or(fields, own.get("min_p", MIN_P.default)),
        seed=SEED.read(fields) % (1 << 64),
        presence_penalty=PRESENCE_PENALTY.read(fields),
        frequency_penalty=FREQUENCY_PENALTY.read(fields),
        repetition_penalty=REPETITION_PENALTY.read_or(
            fields, own.get("repetition_penalty", REPETITION_PENALTY.default)
        ),
        min_tokens=MIN_TOKENS.read(fields),
        ignore_eos=IGNORE_EOS.read(fields),
        stop_token_ids=token_ids(fields.array("stop_token_ids", [], MAX_STOP_TOKENS), vocab_size, "stop_token_ids"),
        bias_ids=bias_ids,
        bias_values=bias_values,
    )


def token_ids(values: list[Any], vocab_size: int, path: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Check token ids against the vocabulary."""
    if any(type(value) is not int for value in values):
        place = next(i for i, value in enumerate(values) if type(value) is not int)
        raise invalid(path, f"{path}[{place}]: expected a token id, got {show(values[place])}")
    if values and not (min(values) >= 0 and max(values) < vocab_size):
        place = next(i for i, value in enumerate(values) if not 0 <= value < vocab_size)
        raise invalid(path, f"{path}[{place}]: token ids must be in [0, {vocab_size - 1}], got {show(values[place])}")
    return np.array(values, np.int32)


def _read_bias(fields: Fields, vocab_size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    bias = fields.object("logit_bias", {})
    if len(bias) > vocab_size:
        raise invalid("logit_bias", "logit_bias: has more entries than the vocabulary")
    ids, values = [], []
    for key, value in bias.items():
        if not _BIAS_KEY.fullmatch(key):
            raise invalid("logit_bias", f"logit_bias: keys must be token ids, got {show(key)}")
        ids.append(int(key))
        values.append(Fields.check_number(BIAS.name, value, BIAS.low, BIAS.high))
    return token_ids(ids, vocab_size, "logit_bias"), np.array(values, np.float32)


def _read_stop(fields: Fields) -> StopAutomaton | None:
    value = fields.raw("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if type(stops) is not list or not all(isinstance(stop, str) for stop in stops):
        raise invalid("stop", f"stop: expected a string or an array of strings, got {show(value)}")
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"stop: at most {MAX_STOPS} strings, got {len(stops)}")
    if not all(stops):
        raise invalid("stop", "stop: strings must not be empty")
    if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
        raise invalid("stop", f"stop: longer than {MAX_STOP_CHARACTERS} characters together")
    return StopAutomaton(stops) if stops else None


def _read_stream_options(fields: Fields, stream: bool) -> StreamOptions:
    options = fields.object("stream_options", None)
    if options is None:
        return StreamOptions()
    if not stream:
        raise invalid("stream_options", "stream_options: is only allowed with stream=true")
    inner = Fields(options, "stream_options")
    usage, continuous = INCLUDE_USAGE.read(inner), CONTINUOUS_USAGE.read(inner)
    return StreamOptions(usage=usage, continuous=usage and continuous)
