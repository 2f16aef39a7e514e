"""One API call that generates text: its prompts are submitted, its sequences followed, its answer written."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Protocol

from common.wire import SamplingParams, Submit
from scheduler_svc.frontend.core_link import CoreLink
from scheduler_svc.frontend.logprobs import GatheredLogprobs, LogprobWriter
from scheduler_svc.frontend.models import ServedModel
from scheduler_svc.frontend.output import Entry, SequenceOutput
from scheduler_svc.frontend.parameters import Parameters
from scheduler_svc.frontend.parsing.marked_reasoning import ReasoningPlace
from scheduler_svc.frontend.parsing.message_reader import MessageReader
from scheduler_svc.frontend.parsing.parts import Content, Part
from scheduler_svc.frontend.prompts import Prompt
from scheduler_svc.frontend.reading import Reading
from scheduler_svc.frontend.scheduling import TimeLimit
from scheduler_svc.frontend.shapes import Shape
from scheduler_svc.frontend.sse import ChunkWriter
from scheduler_svc.frontend.streams import Generation, PromptScoreboard, Stream
from scheduler_svc.frontend.token_fields import TokenFields, prompt_logprobs
from scheduler_svc.http.errors import from_ending

ENTRIES_AT_ONCE = 32
"""Logprob entries that are written before other requests get a turn: some milliseconds."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked for. One of `samplings` for each of `prompts`."""

    model: ServedModel
    parameters: Parameters
    prompts: list[Prompt]
    samplings: list[SamplingParams]
    shape: Shape
    request_id: str
    logprobs: bool
    tokens: TokenFields
    echo: bool = False
    reading: Reading | None = None
    """None: all text is content."""
    form: Form | None = None
    """None: the answer is told as it is."""


class Form(Protocol):
    """Tells the answer of a call in the words of another API."""

    def whole(self, call: Call, answer: dict[str, Any]) -> dict[str, Any]:
        """From what `Call.collect` gives."""

    def writer(self, call: Call) -> ChunkWriter:
        """What takes the chunks of a streamed answer."""


class Call:
    """A task under way, in the streams of a generation."""

    def __init__(
        self, task: Task, generation: Generation, link: CoreLink, limit: TimeLimit, tenant: str | None = None
    ) -> None:
        """`tenant`: in the place of the one that the body names. Raises `ApiError` 504 when its time is over."""
        self.task, self.generation, self._tenant = task, generation, tenant
        self._timeout_ms = limit.left_ms()
        self.generation.quiet = not (task.parameters.stream or task.parameters.stop is not None or task.logprobs)
        self.id = task.shape.id_prefix + task.request_id
        self.created = int(time.time())
        self._outputs: list[SequenceOutput] = []
        self._num_written = 0
        """Logprob entries since other requests had a turn."""
        self._echoes: list[tuple[str, list[int]]] = []
        """For each prompt, its text and ids, where they are part of the answer."""
        self._readers: list[MessageReader] = []
        """For each output, where its text is more than content."""
        link.submit(generation, [self._request(place) for place in range(len(task.prompts))])
        for place, prompt in enumerate(task.prompts):
            self._follow(prompt, task.samplings[place])
        self._open = len(self._outputs)
        if task.reading is not None:
            self._readers = [task.reading.reader(output.reasoning) for output in self._outputs]
        self._is_plain = not (task.echo or task.reading or task.form or task.logprobs or task.tokens.ids)
        self._is_plain = self._is_plain and not task.parameters.stream_options.continuous
        """Until it ends, nothing but text is told."""

    # --- start ---

    def _request(self, place: int) -> Submit:
        """That of one prompt; the link numbers its streams."""
        task, parameters, key = self.task, self.task.parameters, self.generation.key
        scheduling = parameters.scheduling
        return Submit(
            first_stream=0,
            n=parameters.n,
            request_id=task.request_id,
            model=task.model.name,
            prompt=task.prompts[place].ids,
            params=task.samplings[place],
            priority=max(scheduling.priority, key.best_priority),
            tenant=self._tenant or scheduling.tenant,
            salt=scheduling.salt,
            retention=scheduling.retention,
            deadline_ms=scheduling.deadline_ms,
            timeout_ms=self._timeout_ms,
            limits=key.limits(),
        )

    def _follow(self, prompt: Prompt, sampling: SamplingParams) -> None:
        """The outputs of the next prompt's streams."""
        first = len(self._outputs)
        ids = prompt.ids.tolist()
        ending = frozenset(sampling.stop_token_ids.tolist())
        if not sampling.ignore_eos:
            ending |= frozenset(self.task.model.card.eos_ids)
        for stream in self.generation.streams[first : first + self.task.parameters.n]:
            self._outputs.append(self._output(stream, prompt, ids, ending, sampling.min_tokens))

    def _output(
        self, stream: Stream, prompt: Prompt, ids: list[int], ending: frozenset[int], min_tokens: int
    ) -> SequenceOutput:
        parameters, factory = self.task.parameters, self.task.model.tokenizer.detokenizers
        echo = prompt.text or ""
        if self.task.echo and prompt.text is None:
            detokenizer = factory.create([], parameters.skip_special_tokens)
            echo = detokenizer.push(ids)
        else:
            shown = frozenset() if self.task.reading is None else self.task.reading.markup
            detokenizer = factory.create(ids, parameters.skip_special_tokens, shown)
        marks = None if self.task.reading is None else self.task.reading.marks
        if self.task.echo and stream.choice % parameters.n == 0:
            self._echoes.append((echo, ids))
        return SequenceOutput(
            stream,
            detokenizer,
            ending_ids=ending,
            stop=parameters.stop,
            include_stop=parameters.include_stop,
            min_tokens=min_tokens,
            offset=len(echo) if self.task.echo else 0,
            keep_ids=self.task.tokens.ids,
            reasoning=None if marks is None else ReasoningPlace(marks),
        )

    @property
    def outputs(self) -> tuple[SequenceOutput, ...]:
        """One for each sequence, in the order of the prompts."""
        return tuple(self._outputs)

    # --- answers ---

    async def collect(self) -> dict[str, Any]:
        """The whole answer. Raises `ApiError` when a sequence does not end well."""
        texts: list[list[str]] = [[] for _ in self._outputs]
        logprobs = [self.task.shape.gathered_logprobs() for _ in self._outputs]
        while self._open:
            for stream in await self.generation.wait():
                output = self._outputs[stream.choice]
                texts[stream.choice].append(self._take(output) or "")
                if output.failure is not None:
                    raise from_ending(output.failure)
                await self._join(logprobs[stream.choice], output.take_entries())
        return self._answer(["".join(parts) for parts in texts], logprobs)

    async def _join(self, logprobs: GatheredLogprobs, entries: list[Entry]) -> None:
        """Write entries, of which there may be many thousands, while the other requests go on."""
        for place in range(0, len(entries), ENTRIES_AT_ONCE):
            part = entries[place : place + ENTRIES_AT_ONCE]
            logprobs.add(self.task.shape.logprobs(part))
            self._num_written += len(part)
            if self._num_written >= ENTRIES_AT_ONCE:
                self._num_written = 0
                await asyncio.sleep(0)
                self.generation.check()

    async def chunks(self, writer: ChunkWriter) -> bytes:
        """Waits for something to send. Ends with the last chunk, after which `done` holds.

        Raises `ApiError` when a sequence does not end well; what came before it is in `writer.unsent`.
        """
        body = b""
        while self._open and not body:
            await self.generation.stirred()
            body = self.write_news(writer)
        return body

    def write_news(self, writer: ChunkWriter) -> bytes:
        """As `chunks`, of what has come: nothing, if nothing has. Raises `ClientGone`, too."""
        for stream in self.generation.take_news():
            output = self._outputs[stream.choice]
            if self._is_plain and output.runs_on:
                writer.add_text(stream.choice, output.take())
            else:
                self._write(writer, output)
        if self.done:
            writer.add_done(self.usage() if self.task.parameters.stream_options.usage else None)
        return writer.take()

    @property
    def done(self) -> bool:
        return not self._open

    def _write(self, writer: ChunkWriter, output: SequenceOutput) -> None:
        text = self._take(output)
        if text is None:
            return
        choice = output.stream.choice
        reason = None if output.reported else output.finish_reason
        parts = self._parts(choice, text, final=reason is not None)
        if output.failure is not None:
            self._write_chunks(writer, output, parts)
            raise from_ending(output.failure)
        if reason is not None:
            output.reported = True
            self._write_chunks(writer, output, parts[:-1])
            last, ids = parts[-1] if parts else Content(""), self._ids(output)
            logprobs, told = self._logprobs(output.take_entries()), self._finish_reason(choice, reason)
            writer.add_finish(choice, last, ids, logprobs, told, output.stop_reason, self._running_usage())
        elif parts:
            self._write_chunks(writer, output, parts)
        elif output.num_tokens:
            writer.open_choice(choice, self._running_usage())

    def _write_chunks(self, writer: ChunkWriter, output: SequenceOutput, parts: list[Part]) -> None:
        """What is told of the tokens goes with the first of them."""
        for part in parts:
            logprobs, choice = self._logprobs(output.take_entries()), output.stream.choice
            writer.add(choice, part, self._ids(output), logprobs, self._running_usage())

    def _parts(self, choice: int, text: str, *, final: bool) -> list[Part]:
        """What a text is made of, a chunk each."""
        if self._readers:
            return self._readers[choice].feed(text, final=final)
        return [Content(text)] if text else []

    def _ids(self, output: SequenceOutput) -> dict[str, Any]:
        """More members of a chunk's choice: the ids since the last chunk, with the first those of the prompt."""
        ids = output.take_ids() if self.task.tokens.ids else None
        if not ids:
            return {}
        is_first = len(ids) == output.num_tokens and not self.task.shape.tells_prompt_once
        prompt = self._prompt_ids(output.stream.choice) if is_first else {}
        return {**prompt, "token_ids": ids}

    def _prompt_ids(self, choice: int) -> dict[str, Any]:
        """Where token ids are wanted."""
        if not self.task.tokens.ids:
            return {}
        return {"prompt_token_ids": self.task.prompts[choice // self.task.parameters.n].ids.tolist()}

    @property
    def told_once(self) -> dict[str, Any]:
        """Members of a streamed answer's first chunk."""
        return self._prompt_ids(0) if self.task.shape.tells_prompt_once else {}

    def _finish_reason(self, choice: int, reason: str) -> str:
        return self._readers[choice].finish_reason(reason) if self._readers else reason

    def _take(self, output: SequenceOutput) -> str | None:
        """The text that an output has now; None while the scores of an echoed prompt are not complete."""
        text = ""
        if self.task.echo and not output.echoed:
            board = output.stream.prompt_scores
            if board is not None and not board.complete and output.stream.ended is None:
                return None
            output.echoed = True
            echo, ids = self._echoes[output.stream.choice // self.task.parameters.n]
            if self.task.logprobs:
                output.entries = self._prompt_entries(ids, board) + output.entries
                if self.task.tokens.prompt_logprobs is None:
                    output.stream.prompt_scores = None
            text = echo
        finished = output.finished
        text += output.take()
        if output.finished and not finished:
            self._open -= 1
        return text

    def _prompt_entries(self, ids: list[int], board: PromptScoreboard | None) -> list[Entry]:
        detokenizer = self.task.model.tokenizer.detokenizers.create([], self.task.parameters.skip_special_tokens)
        entries, offset = [], 0
        for place, token in enumerate(ids):
            entries.append(Entry(token, None if board is None else board.scores[place], offset, True))
            offset += len(detokenizer.push((token,)))
        return entries

    def _logprobs(self, entries: list[Entry]) -> dict[str, Any] | None:
        """Of a chunk; null where no token came with it."""
        return self.task.shape.logprobs(entries) if entries else None

    def _running_usage(self) -> dict[str, Any] | None:
        return self.usage() if self.task.parameters.stream_options.continuous else None

    def usage(self) -> dict[str, Any]:
        """Each prompt counts once, however many sequences there are over it."""
        prompt_tokens = sum(len(prompt.ids) for prompt in self.task.prompts)
        completion_tokens = sum(output.num_tokens for output in self._outputs)
        cached = sum(output.cached_tokens for output in self._outputs[:: self.task.parameters.n])
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _answer(self, texts: list[str], logprobs: list[GatheredLogprobs]) -> dict[str, Any]:
        shape = self.task.shape
        return {
            "id": self.id,
            "object": shape.object_name,
            "created": self.created,
            "model": self.task.model.name,
            "choices": [self._choice(output, texts[i], logprobs[i]) for i, output in enumerate(self._outputs)],
            **(self._of_prompt(self._outputs[0]) if shape.tells_prompt_once else {}),
            "usage": self.usage(),
        }

    def _choice(self, output: SequenceOutput, text: str, logprobs: GatheredLogprobs) -> dict[str, Any]:
        task, index = self.task, output.stream.choice
        parts: list[Part] = self._readers[index].feed(text, final=True) if self._readers else [Content(text)]
        return {
            "index": index,
            **task.shape.message(parts),
            "logprobs": logprobs.value() if task.logprobs else None,
            "finish_reason": self._finish_reason(index, output.finish_reason or ""),
            "stop_reason": output.stop_reason,
            **({} if task.shape.tells_prompt_once else self._of_prompt(output)),
            **({"token_ids": output.take_ids()} if task.tokens.ids else {}),
        }

    def _of_prompt(self, output: SequenceOutput) -> dict[str, Any]:
        """What is told of an output's prompt: its ids and scores, where they are wanted."""
        told, top = self._prompt_ids(output.stream.choice), self.task.tokens.prompt_logprobs
        board = output.stream.prompt_scores
        if top is None or board is None:
            return told
        writer = LogprobWriter(self.task.model.tokenizer, top, skip_special_tokens=False)
        return {**told, "prompt_logprobs": prompt_logprobs(board.prompt, board.scores, top, writer)}

    def summary(self) -> dict[str, Any]:
        """For the request's log line."""
        reasons = [output.finish_reason for output in self._outputs]
        return {
            "model": self.task.model.name,
            "prompt_tokens": sum(len(prompt.ids) for prompt in self.task.prompts),
            "completion_tokens": sum(output.num_tokens for output in self._outputs),
            "finish": ",".join(sorted({reason for reason in reasons if reason})) or None,
            "client_gone": self.generation.gone,
        }
