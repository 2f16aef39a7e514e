"""Small tokenizers of the two kinds that matter, and the model cards that carry them."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from common.wire import ModelCard

TEXT = [
    "The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times.",
    "Hello world! How are you today? I am fine, thank you. One, two, three, four, five.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))",
    "世界 こんにちは naïve café déjà vu",
]
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message.role == 'assistant' %}{{ raise_exception('an assistant cannot start') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOL_CHAT = (
    "{% if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools>' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{% for call in message.tool_calls %}{% if call.function.arguments is not mapping %}{{ raise_exception('no') }}"
    "{% endif %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{% if message.tool_call_id %}{{ '(' + message.tool_call_id + ')' }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Knows tools, and writes calls as Hermes does."""
LLAMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)


def byte_level() -> tuple[Tokenizer, dict[str, object]]:
    """Byte-level BPE like GPT-2's, with ChatML's special tokens. Adds none by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    config = {"eos_token": "<|im_end|>", "bos_token": {"__type": "AddedToken", "content": "<|endoftext|>"}}
    return tokenizer, config


def byte_fallback() -> tuple[Tokenizer, dict[str, object]]:
    """BPE with byte fallback and Llama 2's decoder, as converted from SentencePiece. Adds `<s>`."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "▁"]
    characters = sorted({c for line in TEXT[:3] for c in line.replace(" ", "▁")} - {"▁"})
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("o", "u"), ("e", "l"), ("l", "o"), ("el", "lo")]
    vocabulary += characters + [one + other for one, other in merges]
    numbers = {token: number for number, token in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    return tokenizer, config


def card(name: str, made: tuple[Tokenizer, dict[str, object]], template: str, **changes: object) -> ModelCard:
    """A model card around a tokenizer; its EOS token ends sequences."""
    tokenizer, config = made
    fields: dict[str, object] = {
        "name": name,
        "fingerprint": bytes(16),
        "vocab_size": tokenizer.get_vocab_size() + 8,
        "max_model_len": 512,
        "eos_ids": (tokenizer.token_to_id(str(config["eos_token"])),),
        "dtype": "float32",
        "chat_template": template,
        "default_params": {},
        "tokenizer_files": {
            "tokenizer.json": tokenizer.to_str().encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
        },
    }
    return ModelCard(**{**fields, **changes})  # type: ignore[arg-type]
