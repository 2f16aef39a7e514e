"""Calls of tools in a model's text, whatever their format. Each character is looked at a bounded number of times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler_svc.frontend.parsing.json_call import JsonCall, Status
from scheduler_svc.frontend.parsing.markers import find_first
from scheduler_svc.frontend.parsing.parts import Arguments, CallStart, Content, Part, add_part


class CallParser:
    """Tells calls from content. What comes out does not depend on how the text is cut into pieces.

    Until a call is certain its text is held back; if it turns out to be none, or none that is allowed, it is content as
    it stands. White space alone between calls, and around them, is no content; nor is what a format puts between them.
    """

    separators = " \t\r\n"
    """What may stand between calls."""

    def __init__(self, new_id: Callable[[], str], parallel: bool, allowed: frozenset[str] | None = None) -> None:
        """`new_id`: for each call. Unless `parallel`, calls after the first are left out.

        `allowed`: names of the functions whose calls are told as such; None: of all, known or not.
        """
        self._new_id, self._parallel, self._allowed = new_id, parallel, allowed
        self._parts: list[Part] = []
        self._held = ""
        """Text that may be the beginning of a marker."""
        self._gap: list[str] | None = []
        """Separators since the beginning or the last call; None where other text has come since."""
        self._call: JsonCall | None = None
        self._raw: list[str] = []
        """The text of a call that is not certain yet."""
        self._is_barred = False
        """The last call that was certain is none that is allowed."""
        self.num_calls = 0
        self.position = 0
        """Characters of the model's text before what is fed next."""
        self._start = 0
        """Likewise, before what is looked at."""

    # --- what a format says ---

    def _markers(self) -> Sequence[str]:
        """Markup that means something outside of a call now."""
        raise NotImplementedError

    def _meet(self, marker: str) -> JsonCall | None:
        """A marker has come: the call that it begins, if it begins one."""
        raise NotImplementedError

    def _after_gap(self, _character: str) -> JsonCall | None:
        """The call that this character begins, where only separators stand before it."""
        return None

    def _closes(self, _character: str) -> bool:
        """Whether this character, where only separators stand before it, is markup that ends calls."""
        return False

    def _call_ended(self, call: JsonCall) -> None:
        """It was one."""

    def _is_cut_end(self, _rest: str) -> bool:
        """Whether this is the beginning of the markup that ends a call, which the end of the text cuts."""
        return False

    # --- text ---

    def feed(self, text: str) -> list[Part]:
        """What is certain with this text."""
        data, self._start = self._held + text, self.position - len(self._held)
        self.position += len(text)
        self._held, place = "", 0
        while place < len(data):
            place = self._outside(data, place) if self._call is None else self._inside(self._call, data, place)
        return self._take()

    def finish(self) -> list[Part]:
        """The rest, when no text follows."""
        rest, self._held = self._held, ""
        if self._call is not None and self._call.name is None:
            self._add_content("".join(self._raw), self.position)
        elif not self.num_calls or (rest and not (self._gap is not None and self._is_cut_end(rest))):
            self._add_content("".join(self._gap or ()) + rest, self.position)
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _add_content(self, text: str, end: int) -> None:
        add_part(self._parts, Content(text, end))

    def _outside(self, data: str, place: int) -> int:
        if self._gap is not None:
            end = place
            while end < len(data) and data[end] in self.separators:
                end += 1
            self._gap.append(data[place:end])
            place = end
            if place == len(data):
                return place
            if self._closes(data[place]):
                if self._is_barred:
                    self._add_content("".join(self._gap) + data[place], self._start + place + 1)
                self._gap = []
                return place + 1
            call = self._after_gap(data[place])
            if call is not None:
                self._begin(call, "")
                return place
        found, marker = find_first(data, place, self._markers())
        if found > place:
            self._add_content("".join(self._gap or ()) + data[place:found], self._start + found)
            self._gap = None
        if not marker:
            self._held = data[found:]
            return len(data)
        call = self._meet(marker)
        if call is not None:
            self._begin(call, marker)
        else:
            self._gap = []
        return found + len(marker)

    def _begin(self, call: JsonCall, marker: str) -> None:
        self._call, self._raw, self._gap = call, [*(self._gap or ()), marker], None

    def _inside(self, call: JsonCall, data: str, place: int) -> int:
        was_certain = call.name is not None
        end = call.feed(data, place)
        if call.name is not None and not was_certain:
            self._is_barred = self._allowed is not None and call.name not in self._allowed
        if call.name is None:
            self._raw.append(data[place:end])
        elif self._is_barred:
            self._add_content("".join(self._raw) + data[place:end], self._start + end)
            self._raw.clear()
            call.take()
        else:
            self._tell(call, call.name, begins=not was_certain)
        if call.status is not Status.READING:
            self._end(call, self._start + end)
        return end

    def _tell(self, call: JsonCall, name: str, *, begins: bool) -> None:
        self.num_calls += begins
        index = self.num_calls - 1
        if self._parallel or index == 0:
            if begins:
                self._parts.append(CallStart(index, self._new_id(), name))
            add_part(self._parts, Arguments(index, call.take()))

    def _end(self, call: JsonCall, end: int) -> None:
        self._call = None
        if call.name is None:
            self._add_content("".join(self._raw), end)
            self._gap = None
        else:
            self._gap = []
            self._call_ended(call)
        self._raw = []
