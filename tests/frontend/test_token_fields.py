"""Token ids and prompt scores in answers, cut prompts, the load, and routes that there are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_core import Answer
from frontend_service import BYTE_FALLBACK, Service, error_of, events, wait_until

from scheduler_svc.frontend.absent import PATHS

CHAT, COMPLETE = "chat", "complete"
HELLO = "Hello world! 世界"


def ask(service: Service, api: str, **body: Any) -> Any:
    return (service.chat if api == CHAT else service.complete)(**body)


@pytest.mark.parametrize("api", [CHAT, COMPLETE])
@pytest.mark.parametrize("more", [{}, {"stop": ["wor"]}, {"logprobs": True}, {"max_tokens": 3}], ids=str)
def test_token_ids(service: Service, api: str, more: dict[str, Any]) -> None:
    """As many as the usage counts, the one that ends the text too; those of the prompt once; streamed alike."""
    ids = [*service.ids(HELLO), service.eos()]
    service.core.answer(Answer(ids, scores=[[(5, -0.5)]] * len(ids)))
    more = {"max_tokens": 200, **more}
    if api == COMPLETE and "logprobs" in more:
        more["logprobs"] = 1
    answer = ask(service, api, **more, return_token_ids=True, n=2).json()
    prompt = service.core.requests[-1].prompt.tolist()
    told = [choice["token_ids"] for choice in answer["choices"]]
    assert sum(map(len, told)) == answer["usage"]["completion_tokens"]
    assert all(len(one) >= 2 and one == ids[: len(one)] for one in told)
    places = [answer] if api == CHAT else answer["choices"]
    assert [place["prompt_token_ids"] for place in places] == [prompt] * len(places)
    chunks = events(ask(service, api, **more, return_token_ids=True, n=2, stream=True))
    told_prompts = [
        place["prompt_token_ids"] for c in chunks for place in (c, *c["choices"]) if "prompt_token_ids" in place
    ]
    assert told_prompts == [prompt] * len(places) and ("prompt_token_ids" in chunks[0]) == (api == CHAT)
    for choice in range(2):
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice]
        assert [token for part in parts for token in part.get("token_ids", [])] == told[choice]
    plain = ask(service, api, **more).json()
    assert "token_ids" not in plain["choices"][0] and "prompt_token_ids" not in {**plain, **plain["choices"][0]}


def test_tokens_named_by_id(service: Service) -> None:
    service.core.answer(Answer([5, 6], scores=[[(5, -0.5), (9, -0.25)], [(6, -0.5), (6, -0.5)]]))
    body = {"return_tokens_as_token_ids": True, "max_tokens": 5}
    chat = service.chat(**body, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert [(e["token"], e["top_logprobs"][0]["token"]) for e in chat] == [
        ("token_id:5", "token_id:9"), ("token_id:6", "token_id:6")
    ]  # fmt: skip
    told = service.complete(**body, logprobs=1).json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["token_id:5", "token_id:6"]
    assert told["top_logprobs"][0] == {"token_id:9": -0.25, "token_id:5": -0.5}


def test_prompts_are_cut_at_their_beginning(service: Service) -> None:
    text = "Hello world! How are you today?"
    ids = service.ids(text)
    for prompt in (text, ids, [text], [ids]):
        answer = service.complete(prompt=prompt, truncate_prompt_tokens=4, echo=True).json()
        assert service.core.requests[-1].prompt.tolist() == ids[-4:]
        assert answer["usage"]["prompt_tokens"] == 4
        assert answer["choices"][0]["text"] == service.tokenizers["byte-level"].decode(ids[-4:])
    whole = "<|im_end|> Hello"  # special tokens are not decoded again
    assert service.complete(prompt=whole, truncate_prompt_tokens=99, echo=True).json()["choices"][0]["text"] == whole
    service.complete(prompt=ids, truncate_prompt_tokens=1000)
    assert service.core.requests[-1].prompt.tolist() == ids
    service.chat()
    whole = service.core.requests[-1].prompt.tolist()
    service.chat(truncate_prompt_tokens=3)
    assert service.core.requests[-1].prompt.tolist() == whole[-3:]


def test_a_prompt_cut_to_the_context(service: Service) -> None:
    """The context of this model holds 512 tokens."""
    long = "Hello world! " * 2000
    ids = service.ids(long)
    for prompt in (long, ids):
        error = error_of(service.complete(prompt=prompt), 400)
        assert error["code"] == "context_length_exceeded"
        service.complete(prompt=prompt, truncate_prompt_tokens=-1, max_tokens=100)
        assert service.core.requests[-1].prompt.tolist() == ids[-412:]
        service.complete(prompt=prompt, truncate_prompt_tokens=-1)
        assert service.core.requests[-1].params.max_tokens == 16
        error = error_of(service.complete(prompt=prompt, truncate_prompt_tokens=600), 400)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert error_of(service.complete(truncate_prompt_tokens=0), 400)["param"] == "truncate_prompt_tokens"
    error = error_of(service.complete(prompt="x" * (1 << 23), truncate_prompt_tokens=5), 400)
    assert error["code"] == "context_length_exceeded"


def test_prompt_logprobs(service: Service) -> None:
    """vLLM's shape: a list with null first. The prompt's own token is told, with its rank where that is known."""
    prompt = [5, 6, 7]
    scores = [[(6, -2.0), (9, -0.25), (8, -0.5)], [(7, -0.125), (7, -0.125), (6, float("-inf"))]]
    service.core.answer(Answer([5], prompt_scores=scores))
    [choice] = service.complete(prompt=prompt, prompt_logprobs=2).json()["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None and choice["logprobs"] is None
    assert {token: (e["logprob"], e["rank"]) for token, e in second.items()} == {
        "6": (-2.0, None), "9": (-0.25, 1), "8": (-0.5, 2)
    }  # fmt: skip
    assert {token: (e["logprob"], e["rank"]) for token, e in third.items()} == {"7": (-0.125, 1), "6": (-9999.0, 2)}
    assert all(isinstance(e["decoded_token"], str) for e in second.values())
    params = service.core.requests[-1].params
    assert (params.prompt_logprobs, params.logprobs) == (2, -1)
    [choice] = service.complete(prompt=prompt, prompt_logprobs=0).json()["choices"]
    assert [set(entry or ()) for entry in choice["prompt_logprobs"]] == [set(), {"6"}, {"7"}]
    answer = service.chat(prompt_logprobs=1).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] and not answer["prompt_logprobs"][0]
    service.complete(prompt=prompt, prompt_logprobs=1, logprobs=3, echo=True)
    assert service.core.requests[-1].params.prompt_logprobs == 3
    for api in (CHAT, COMPLETE):
        assert error_of(ask(service, api, prompt_logprobs=1, stream=True), 400)["param"] == "prompt_logprobs"


def test_special_tokens_of_cut_chats(service: Service) -> None:
    service.chat(model=BYTE_FALLBACK, add_special_tokens=True, truncate_prompt_tokens=500)
    assert service.core.requests[-1].prompt.tolist()[0] == 1


def test_the_load(service: Service) -> None:
    service.core.stats = replace(service.core.stats, gauges={"gilir_live_sequences": 7.0})
    try:
        wait_until(lambda: service.get("/load").json() == {"server_load": 7})
    finally:
        service.core.stats = replace(service.core.stats, gauges={})


@pytest.mark.parametrize("path", PATHS)
def test_what_is_not_served_says_so(service: Service, path: str) -> None:
    error = error_of(service.post(path, model="byte-level", input="Hello"), 404)
    assert error["code"] == "unsupported_endpoint" and path in error["message"]
