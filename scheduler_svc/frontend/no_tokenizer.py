"""Stands in for the tokenizer of a model that brings none: prompts must be token ids, answers are written as ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler_svc.frontend.detokenizer import Detokenizer, DetokenizerFactory
from scheduler_svc.frontend.tokenizer import Tokenizer
from scheduler_svc.http.errors import invalid


class NumberDetokenizer:
    """Writes every token as a space and its number."""

    tentative = ""

    def push(self, ids: Iterable[int]) -> str:
        return "".join([f" {token}" for token in ids])

    def finish(self) -> str:
        return ""


class NumberDetokenizers(DetokenizerFactory):
    def __init__(self) -> None:
        pass

    def create(
        self, prompt: Sequence[int], skip_special_tokens: bool, shown: frozenset[str] = frozenset()
    ) -> Detokenizer:
        return NumberDetokenizer()

    def token_bytes(self, token: int, skip_special_tokens: bool = False) -> bytes:
        return f" {token}".encode()


class NoTokenizer(Tokenizer):
    def __init__(self) -> None:
        self.config, self.special_tokens = {}, {}
        self.detokenizers = NumberDetokenizers()
        self.longest_token = 1 << 30

    def encode(self, text: str, add_special_tokens: bool, limit: int | None = None) -> list[int]:
        """Raises `ApiError` 400: there is nothing to encode with."""
        raise invalid("prompt", "the model brings no tokenizer: the prompt must be token ids", "no_tokenizer")

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return NumberDetokenizer().push(ids)

    def token_id(self, text: str) -> int | None:
        return None

    def token_text(self, token: int) -> str:
        return str(token)
