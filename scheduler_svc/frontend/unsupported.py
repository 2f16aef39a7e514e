"""Fields that clients of this API know and this service does not do: refused by name, never silently ignored.

Each stands with the values that ask for nothing; those are let pass. `null` always is.
"""

from __future__ import annotations

from typing import Any

from scheduler_svc.frontend.parameters import N
from scheduler_svc.http.errors import invalid
from scheduler_svc.http.field_kinds import Integer
from scheduler_svc.http.fields import Fields

BEST_OF = Integer("best_of", None, N.low, N.high)
BOTH: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "return_prompt_text": (False,),
    "guided_decoding_backend": ("auto", "xgrammar"),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (),
}
COMPLETIONS: dict[str, tuple[Any, ...]] = {
    **BOTH,
    "suffix": ("",),
    "prompt_embeds": ([],),
}
CHAT: dict[str, tuple[Any, ...]] = {
    **BOTH,
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
    "verbosity": ("medium",),
    "store": (False,),
    "documents": ([],),
    "chat_template": (),
    "echo": (False,),
    "moderation": (),
}


def refuse_unsupported(fields: Fields, table: dict[str, tuple[Any, ...]]) -> None:
    """Raise `ApiError` 400 naming the first field of the table that asks for something."""
    for name, neutral in table.items():
        value = fields.raw(name)
        if value is not None and not any(type(value) is type(n) and value == n for n in neutral):
            raise invalid(name, f"{name}: is not supported", "unsupported_parameter")


def refuse_best_of(fields: Fields, n: int) -> None:
    """`best_of` may only repeat `n`."""
    best_of = BEST_OF.read_or(fields, n)
    if best_of != n:
        raise invalid(
            "best_of", f"best_of: only the value of n ({n}) is supported, got {best_of}", "unsupported_parameter"
        )
