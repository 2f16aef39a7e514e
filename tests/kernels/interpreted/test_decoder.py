"""The decoder over the Triton kernels in its batch-invariant mode: a token has the same bits however it comes."""

from __future__ import annotations

import importlib

import pytest
import torch

from common.wire import Limits, ModelCard, Plan
from executor_svc.graphs import Eager
from executor_svc.model.config import parse_config
from executor_svc.model.decoder import Decoder
from executor_svc.model.weights import allocate
from executor_svc.runner import Runner
from tests.executor.mini_server import run
from tests.executor.paged_driver import generate
from tests.executor.plans import ids, new_sequence, prefill_plan, slots
from tests.executor.replay import ReplayByCall

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
LENGTH = 75


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A sparse layer in fp16, whose tensors lie on the CPU but go to the kernels of a GPU; norms, rotation
    and gates do not: theirs work row by row."""
    for module in ("attention", "invariant_linear", "moe"):
        monkeypatch.setattr(importlib.import_module(f"kernels.{module}"), "use_triton", lambda _: True)
    monkeypatch.setattr(importlib.import_module("kernels.attention"), "SPLIT_KEYS", 64)
    config = parse_config(CONFIG, "config", dtype="float16")
    weights = allocate(config, torch.device("cpu"), tied=True)
    tensors = [weights.embedding, weights.norm]
    for layer in weights.layers:
        moe = [] if layer.moe is None else [layer.moe.gate_up, layer.moe.down]
        norms = [layer.input_norm, layer.q_norm, layer.k_norm, layer.pre_mlp_norm]
        tensors += [*moe, *(linear.weight for linear in layer.products()), *norms]  # type: ignore[list-item]
    for tensor in tensors:
        tensor.normal_(1.0 if tensor.ndim == 1 else 0.0, 0.2 if tensor.ndim == 1 else tensor.shape[-1] ** -0.5)
    return Decoder(config, weights, batch_invariant=True)


def test_a_token_has_the_same_bits_alone_in_a_batch_and_in_chunks(decoder: Decoder) -> None:
    """Prefill and decode, by two splits of the keys; experts that have other mates."""
    prompt = torch.randint(48, (LENGTH,)).tolist()
    prompts = [prompt, prompt[:66], prompt[:5]]
    (whole,) = generate(decoder, [prompt], 1, chunk=1000, block_size=16, all_logits=True)
    streams = generate(decoder, prompts, 2, chunk=33, block_size=8, all_logits=True)
    for tokens, stream in zip(prompts, streams, strict=True):
        assert torch.equal(torch.stack(stream.logits[: len(tokens)]), torch.stack(whole.logits[: len(tokens)]))
    (resumed,) = generate(decoder, [streams[1].tokens[:-1]], 1, chunk=1000, block_size=16)  # as after a preemption
    assert torch.equal(resumed.logits[0], streams[1].logits[-1])


@pytest.mark.nightly
def test_padding_of_a_mixed_graph_changes_no_bit(decoder: Decoder) -> None:
    """A decode and two chunks of which one ends no prompt: 7 tokens in a graph of 12, 3 rows in one of 4."""
    card = ModelCard("sparse", bytes(16), decoder.config.vocab_size, 512, (), "float16")
    limits = Limits(block_size=16, num_blocks=8, num_host_blocks=0, max_num_seqs=4, max_num_batched_tokens=12)
    graphs = ReplayByCall(decoder)
    captured, plain = (
        Runner(graphs.model, card, limits, recorder=graphs),
        Runner(decoder, card, limits, recorder=Eager()),
    )
    captured.capture()
    greedy = {"temperature": 0.0, "ignore_eos": True, "logprobs": 3}
    new = [new_sequence(slot, list(range(slot, slot + 6)), [slot], **greedy) for slot in range(3)]
    chunks = {"prefills": slots(1, 2), "prefill_lengths": ids(2, 4)}
    plans = [
        prefill_plan(1, new[0]),
        Plan(1, 2, decodes=slots(0), new=tuple(new[1:]), **chunks),
        Plan(1, 3, decodes=slots(0), prefills=slots(1, 2), prefill_lengths=ids(4, 2)),
    ]
    for plan in plans:
        assert run(captured, plan).logprobs == run(plain, plan).logprobs
    assert graphs.replayed_mixed == [(12, 4)] * 3
