"""A scripted core: a ROUTER in a thread that speaks `common.wire.frontend` and plays the answers that a test chose."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import zmq

from common.wire import (
    Abort,
    Account,
    Ended,
    EndReason,
    FrontendHello,
    Inquiry,
    Iterations,
    LogprobColumns,
    Message,
    ModelCard,
    PromptScores,
    SequenceAccount,
    SequenceTimes,
    Serving,
    Stats,
    Submit,
    SubmitCall,
    Tokens,
    Watch,
    decode,
    encode,
)

BEAT_S = 0.05
Scores = list[tuple[int, float]]


@dataclass
class Answer:
    """What one stream says: its tokens, one an iteration, then how it ends.

    It ends with LENGTH when max_tokens is reached first. `scores[i]` are token i's logprob entries. With `gate`, each
    token waits until the test releases the semaphore. `together`: all tokens and the ending within one iteration.
    """

    tokens: Sequence[int] = ()
    reason: EndReason = EndReason.EOS
    scores: Sequence[Scores] = ()
    prompt_scores: Sequence[Scores] = ()
    cached_tokens: int = 0
    message: str = ""
    retry_after_s: int = 0
    gate: threading.Semaphore | None = None
    endless: bool = False
    times: SequenceTimes = field(default_factory=SequenceTimes)


@dataclass
class _Playing:
    peer: bytes
    request: Submit
    answer: Answer
    place: int = 0


@dataclass
class FakeCore:
    """`script` gives the answer for each stream of a request, from the request and the stream's place in it."""

    address: str
    models: list[ModelCard]
    kv_capacity: int = 100_000
    script: Callable[[Submit, int], Answer] = lambda _request, _i: Answer()
    ready: bool = True
    stopping: bool = False
    silent: bool = False
    """Says nothing at all, not even the beat."""
    stats: Stats = field(default_factory=lambda: Stats(True, False))
    requests: list[Submit] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    """Those that a stop string ended."""
    junk: list[bytes] = field(default_factory=list)
    """Sent to every frontend as they are."""
    interval_s: float = 0.0
    accounts: dict[str, Account] = field(default_factory=dict)
    """Told of these request ids; of all others that they are not live."""
    inquiries: list[Inquiry] = field(default_factory=list)
    mute: bool = False
    """Answers no inquiry."""
    iterations: Callable[[Watch], Iterations] = lambda asked: Iterations(0, asked.after, asked.after + 1)
    """What a question about iterations is answered, under whatever number."""
    watches: list[Watch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(self.address)
        self._peers: list[bytes] = []
        self._playing: dict[tuple[bytes, int], _Playing] = {}
        self._changed = threading.Condition()
        self._stop = False
        self._announce = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # --- for tests ---

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        self._socket.close()
        self._context.term()

    def reset(self) -> None:
        """Forget what happened and speak again."""
        with self._changed:
            self.requests.clear()
            self.aborted.clear()
            self.stopped.clear()
            self.accounts.clear()
            self.inquiries.clear()
            self.watches.clear()
            self.mute = False
            self.ready, self.stopping, self.silent, self.interval_s = True, False, False, 0.0
            self.script = lambda _request, _i: Answer()

    def answer(self, *answers: Answer) -> None:
        """Stream i of each request gets answer i, the later ones the last."""
        self.script = lambda _request, i: answers[min(i, len(answers) - 1)]

    def announce(self, models: list[ModelCard], kv_capacity: int) -> None:
        """Serve other models from now on."""
        self.models, self.kv_capacity, self._announce = models, kv_capacity, True

    def end_all(self) -> None:
        """Have all that runs end, whether somebody hears it or not."""
        with self._changed:
            for playing in self._playing.values():
                playing.answer = Answer(())
        assert self.wait_for(lambda: not self.live)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
        """Wait until something that this core sees has come about."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    @property
    def live(self) -> int:
        return len(self._playing)

    # --- the thread ---

    def _run(self) -> None:
        next_beat = 0.0
        while not self._stop:
            busy = any(p.answer.gate is None or p.answer.gate._value for p in self._playing.values())
            if self._socket.poll(0 if busy and not self.interval_s else 2):
                self._receive()
            if self.silent:
                continue
            if self._announce:
                self._announce = False
                self._tell_all(self._serving())
            for data in self.junk[:]:
                self.junk.remove(data)
                for peer in self._peers:
                    self._socket.send_multipart([peer, data])
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_S
                self._tell_all(replace(self.stats, ready=self.ready, stopping=self.stopping))
            if self._playing:
                self._iterate()
                if self.interval_s:
                    time.sleep(self.interval_s)

    def _serving(self) -> Serving:
        return Serving(tuple(self.models), tuple(self.kv_capacity for _ in self.models))

    def _send(self, peer: bytes, message: Message) -> None:
        self._socket.send_multipart([peer, encode(message)])

    def _tell_all(self, message: Message) -> None:
        for peer in self._peers:
            self._send(peer, message)

    def _receive(self) -> None:
        peer, data = self._socket.recv_multipart()
        message = decode(data)
        with self._changed:
            if isinstance(message, FrontendHello):
                if peer not in self._peers:
                    self._peers.append(peer)
                self._send(peer, self._serving())
            elif isinstance(message, Submit | SubmitCall):
                for request in message.requests:
                    self._play(peer, request)
            elif isinstance(message, Inquiry):
                self.inquiries.append(message)
                account = self.accounts.get(message.request_id, Account(0, "", 0, ()))
                if not self.mute:
                    self._send(peer, replace(account, number=message.number))
            elif isinstance(message, Watch):
                self.watches.append(message)
                self._send(peer, replace(self.iterations(message), number=message.number))
            elif isinstance(message, Abort):
                for stream in message.streams.tolist():
                    (self.stopped if message.stopped else self.aborted).append(stream)
                    self._playing.pop((peer, stream), None)
            self._changed.notify_all()

    def _play(self, peer: bytes, request: Submit) -> None:
        self.requests.append(request)
        for i in range(request.n):
            playing = _Playing(peer, request, self.script(request, i))
            self._playing[peer, request.first_stream + i] = playing
            self._score_prompt(playing, request.first_stream + i)

    def _score_prompt(self, playing: _Playing, stream: int) -> None:
        """In two parts, as a prefill in chunks would."""
        scores = playing.answer.prompt_scores
        middle = len(scores) // 2
        for start, part in ((1, scores[:middle]), (1 + middle, scores[middle:])):
            if part:
                entries = [entry for entry_list in part for entry in entry_list]
                widths = np.array([len(entry_list) for entry_list in part], np.uint16)
                ids = np.array([entry[0] for entry in entries], np.int32)
                values = np.array([entry[1] for entry in entries], np.float32)
                self._send(playing.peer, PromptScores(stream, start, widths, ids, values))

    def _iterate(self) -> None:
        """One token for every stream that has one, then the endings."""
        rows: dict[bytes, list[tuple[int, int, Scores]]] = {}
        endings: list[tuple[bytes, Ended]] = []
        for (peer, stream), playing in list(self._playing.items()):
            answer = playing.answer
            if answer.gate is not None and not answer.gate.acquire(blocking=False):
                continue
            if answer.tokens and (playing.place < len(answer.tokens) or answer.endless):
                token = answer.tokens[playing.place % len(answer.tokens)]
                scores = answer.scores[playing.place % len(answer.scores)] if answer.scores else []
                rows.setdefault(peer, []).append((stream, token, scores))
                playing.place += 1
            spent = playing.place >= len(answer.tokens) and not answer.endless
            full = playing.place >= playing.request.params.max_tokens
            if spent or full:
                reason = answer.reason if spent else EndReason.LENGTH
                told = (answer.cached_tokens, answer.message, answer.retry_after_s, answer.times)
                ended = Ended(stream, reason, *told)
                endings.append((peer, ended))
        for peer, tokens in rows.items():
            self._send(peer, _columns(tokens))
        with self._changed:
            for peer, ended in endings:
                self._playing.pop((peer, ended.stream), None)
                self._send(peer, ended)
            self._changed.notify_all()


def sequence_account(**fields: Any) -> SequenceAccount:
    """One that waits for a seat, unless `fields` say otherwise."""
    values: dict[str, Any] = {
        "index": 0,
        "state": "waiting",
        "reason": "seats",
        "executor": "",
        "age_s": 1.5,
        "waited_s": {"seats": 1.25, "kv_blocks": 0.25},
        "priority": 0,
        "prompt_tokens": 7,
        "computed_tokens": 0,
        "generated_tokens": 0,
        "cached_tokens": 0,
        "num_preemptions": 0,
    }
    return SequenceAccount(**(values | fields))


def _columns(rows: list[tuple[int, int, Scores]]) -> Tokens:
    scored = [(i, scores) for i, (_, _, scores) in enumerate(rows) if scores]
    entries = [entry for _, scores in scored for entry in scores]
    return Tokens(
        np.array([stream for stream, _, _ in rows], np.uint32),
        np.array([token for _, token, _ in rows], np.int32),
        LogprobColumns(
            rows=np.array([i for i, _ in scored], np.uint16),
            widths=np.array([len(scores) for _, scores in scored], np.uint16),
            token_ids=np.array([entry[0] for entry in entries], np.int32),
            values=np.array([entry[1] for entry in entries], np.float32),
        ),
    )
