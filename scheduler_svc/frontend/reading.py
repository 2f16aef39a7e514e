"""How the text of a chat request's answers is read: the formats, by settings, chat template and request."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.frontend.messages import last_content
from scheduler_svc.frontend.models import ServedModel
from scheduler_svc.frontend.parsing.choice import (
    FORMATS,
    call_parser,
    forced_parser,
    opens_reasoning,
    reasoning_marks,
    splits_reasoning,
    tool_call_format,
)
from scheduler_svc.frontend.parsing.marked_reasoning import MarkedSplitter, Marks, ReasoningPlace
from scheduler_svc.frontend.parsing.message_reader import MessageReader
from scheduler_svc.frontend.parsing.reasoning import THINK, THINK_END, ReasoningSplitter
from scheduler_svc.frontend.prompts import CONTINUE_FINAL_MESSAGE
from scheduler_svc.frontend.settings import FrontendSettings
from scheduler_svc.frontend.tools import Tooling
from scheduler_svc.http.errors import invalid
from scheduler_svc.http.field_kinds import Boolean
from scheduler_svc.http.fields import Fields

INCLUDE_REASONING = Boolean("include_reasoning", True)


@dataclass(frozen=True, slots=True)
class Reading:
    """`format`: that of calls, None where there are none that are looked for, or it is not known.

    `is_open`: the prompt ends within the reasoning, and the answer goes on with it. `marks`: what begins and ends the
    reasoning, where a grammar bounds what follows it.
    """

    format: str | None
    tooling: Tooling
    splits_reasoning: bool
    is_open: bool
    include_reasoning: bool
    marks: Marks | None = None

    def reader(self, place: ReasoningPlace | None) -> MessageReader:
        """For one message. `place`: of its reasoning, where `marks` bound it."""
        splitter: ReasoningSplitter | None = None
        if place is not None:
            splitter = MarkedSplitter(place, is_open=self.is_open)
        elif self.splits_reasoning:
            splitter = ReasoningSplitter(is_open=self.is_open)
        tooling, calls = self.tooling, None
        if tooling.forced:
            calls = forced_parser(self.format, parallel=tooling.parallel)
        elif self.format is not None:
            calls = call_parser(self.format, tooling.names, parallel=tooling.parallel, allowed=tooling.allowed)
        # OpenAI and vLLM say so: that this function is called was known before.
        stop = "stop" if tooling.choice == "function" else "tool_calls"
        return MessageReader(splitter, calls, include_reasoning=self.include_reasoning, stop_for_calls=stop)

    @property
    def markup(self) -> frozenset[str]:
        """What the reader must see of a text though it be special tokens."""
        found = (THINK, THINK_END) if self.splits_reasoning else ()
        return frozenset(found + (() if self.format is None else FORMATS[self.format].special))


def check_tools(tooling: Tooling, model: ServedModel, settings: FrontendSettings) -> str | None:
    """The format of the calls that the model will write; None where it will write none that are looked for.

    Raises `ApiError` 400 where the model cannot be told of tools, or nobody knows how it calls them. Forced calls need
    neither: their grammar says what they are.
    """
    if not tooling.tools:
        return None
    if tooling.forced:
        return tool_call_format(settings.tool_call_parser, model.tool_template.source)
    if not model.tool_template.names_tools:
        text = "tools: the model's chat template does not know tools; set tool_choice to required or a function"
        raise invalid("tools", text, "unsupported_parameter")
    name = tool_call_format(settings.tool_call_parser, model.tool_template.source)
    if name is None:
        text = "tools: the chat template does not tell how this model calls them; see --tool-call-parser"
        raise invalid("tools", text, "unsupported_parameter")
    return None if name == "none" else name


def read_reading(
    fields: Fields,
    tooling: Tooling,
    call_format: str | None,
    model: ServedModel,
    prompt: str,
    setting: str,
    *,
    bounded: bool,
) -> Reading | None:
    """`prompt`: as rendered; `setting`: that of `--reasoning-parser`. None where all text is content.

    `bounded`: by a grammar, which begins behind the reasoning.
    """
    include = INCLUDE_REASONING.read(fields)
    template = model.tool_template if tooling.tools else model.template
    splits = splits_reasoning(setting, template.source)
    own = last_content(fields) if splits and CONTINUE_FINAL_MESSAGE.read(fields) else None
    marks = None
    if splits and bounded:
        marks = reasoning_marks(prompt, own, model.token_id)
        splits = marks is not None
    if not splits and call_format is None and not tooling.forced:
        return None
    is_open = splits and opens_reasoning(prompt, own)
    return Reading(call_format, tooling, splits, is_open, include, marks)
