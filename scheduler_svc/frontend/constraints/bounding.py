"""From the fields of a request to parameters whose constraint is known to compile."""

from __future__ import annotations

from dataclasses import replace

from common.grammar.library import GrammarsUnavailable
from scheduler_svc.frontend.constraints.fields import Grammar, no_tokenizer, read_constraint, read_grammar
from scheduler_svc.frontend.constraints.json_schema import fault_of_schema
from scheduler_svc.frontend.frontend import Frontend
from scheduler_svc.frontend.models import ServedModel
from scheduler_svc.frontend.no_tokenizer import NoTokenizer
from scheduler_svc.frontend.parameters import Parameters
from scheduler_svc.frontend.reading import Reading
from scheduler_svc.frontend.streams import Generation
from scheduler_svc.http.errors import invalid, unavailable
from scheduler_svc.http.fields import Fields


async def bound(
    parameters: Parameters,
    fields: Fields,
    model: ServedModel,
    frontend: Frontend,
    generation: Generation,
    calls: Grammar | None = None,
) -> Parameters:
    """The parameters with the constraint that the request asks for. Raises `ApiError` 400, naming the field.

    `calls`: what `tool_choice` makes of the answer. It leaves no content, so `response_format` bounds nothing then, as
    in vLLM. Under a grammar an end-of-text token comes only where the text may end, and always ends it: `ignore_eos` is
    off.
    """
    grammar = read_grammar(fields)
    if calls is not None:
        if grammar is not None and not grammar.param.startswith("response_format"):
            raise invalid(grammar.param, f"{grammar.param}: tool_choice bounds the answer already")
        grammar = calls
    constraint = read_constraint(fields, model, grammar)
    if not constraint.bounds:
        return parameters
    if grammar is not None:
        await _check(grammar, model, frontend, generation)
    ignore_eos = parameters.sampling.ignore_eos and grammar is None
    return replace(parameters, sampling=replace(parameters.sampling, constraint=constraint, ignore_eos=ignore_eos))


def behind_reasoning(parameters: Parameters, reading: Reading | None) -> Parameters:
    """The same, its grammar beginning where the reasoning ends, if there may be any before a bounded answer."""
    if reading is None or reading.marks is None:
        return parameters
    marks, sampling = reading.marks, parameters.sampling
    start = -1 if marks.start is None else marks.start
    constraint = replace(sampling.constraint, reasoning_end=marks.end, reasoning_start=start)
    return replace(parameters, sampling=replace(sampling, constraint=constraint))


async def _check(grammar: Grammar, model: ServedModel, frontend: Frontend, generation: Generation) -> None:
    param = grammar.param
    if isinstance(model.tokenizer, NoTokenizer):
        raise no_tokenizer(param)
    if not model.card.eos_ids:
        raise invalid(param, f"{param}: the model has no end-of-text token, so no grammar could end its text")
    if grammar.schema is not None and not grammar.lenient:
        fault = fault_of_schema(grammar.schema)
        if fault is not None:
            raise invalid(param, f"{param}: {fault}", "unsupported_schema")
    try:
        verdict = await frontend.grammars.verdict(model.card, grammar, generation)
    except GrammarsUnavailable as error:
        raise unavailable(f"{param}: {error}", "no_grammars") from error
    if verdict:
        raise invalid(param, f"{param}: {verdict}", "invalid_grammar")
