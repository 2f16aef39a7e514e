"""The tokenizer of the embedded model: byte-level BPE, special tokens and the chat template."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN, END_OF_TEXT, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = (
    "<|begin|>",
    "<|end_of_text|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)

CHAT_TEMPLATE = (
    "{{- bos_token -}}\n"
    "{%- for message in messages -%}\n"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}\n"
    "{{- raise_exception('a message has the role system, user or assistant, not ' + message['role']) -}}\n"
    "{%- endif -%}\n"
    "{{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{- '<|assistant|>' -}}\n"
    "{%- endif -%}\n"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn `vocab_size` tokens from `texts`: the special ones first, all 256 bytes, then merges (Sennrich, 2016).

    The tokenizer puts `<|begin|>` before plain text by itself, as Llama's do.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return tokenizer


def render_chat(turns: Iterable[tuple[str, str]]) -> str:
    """Render (role, content) turns as `CHAT_TEMPLATE` does without a generation prompt."""
    return BEGIN + "".join(f"<|{role}|>{content}{END}" for role, content in turns)
