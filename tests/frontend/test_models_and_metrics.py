"""Which models are served, and what is told of the service (C24)."""

from __future__ import annotations

import uuid
from pathlib import Path

import httpx
from fake_core import Answer
from frontend_service import BYTE_FALLBACK, BYTE_LEVEL, Service, error_of, events, run_service, wait_until
from prometheus_client.parser import text_string_to_metric_families
from tokenizers_for_tests import CHATML, byte_level, card

from common.wire import Stats
from scheduler_svc.metrics import CATALOGUE, metric_key, parse_key


def test_the_list_of_models(service: Service) -> None:
    listed = service.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == [BYTE_LEVEL, BYTE_FALLBACK]
    for model in listed["data"]:
        assert model["root"] == model["id"] and model["object"] == "model" and model["max_model_len"] == 512
        assert service.get(f"/v1/models/{model['id']}").json() == model
    assert error_of(service.get("/v1/models/none"), 404)["code"] == "model_not_found"


def test_unknown_models(service: Service) -> None:
    for name in ("gpt-4", "x" * 1_000_000, "../etc", "byte-level "):
        error = error_of(service.complete(model=name), 404)
        assert error["code"] == "model_not_found" and "/v1/models" in error["message"] and error["param"] == "model"
        assert len(error["message"]) < 300
    assert error_of(service.chat(model="gpt-4"), 404)["code"] == "model_not_found"
    assert error_of(service.post("/tokenize", model="gpt-4", prompt="x"), 404)


def test_a_name_is_needed_where_several_are_served(service: Service) -> None:
    for name in (None, ""):
        assert error_of(service.complete(model=name), 400)["param"] == "model"


def test_models_come_and_go(tmp_path: Path) -> None:
    with run_service(tmp_path, models=[]) as service:
        service.core.ready = False
        for _ in range(2):
            error = error_of(service.complete(), 503)
            assert (error["type"], error["code"]) == ("service_unavailable", "no_model")
        assert service.get("/v1/models").json()["data"] == []
        broken = card("broken", byte_level(), "", tokenizer_files={"tokenizer.json": b"{}"})
        service.core.announce([card(BYTE_LEVEL, byte_level(), CHATML), broken], 1000)
        wait_until(lambda: bool(service.get("/v1/models").json()["data"]))
        assert [model["id"] for model in service.get("/v1/models").json()["data"]] == [BYTE_LEVEL]
        for name in (BYTE_LEVEL, None, ""):
            assert service.complete(model=name).json()["model"] == BYTE_LEVEL
        service.core.announce([], 0)
        wait_until(lambda: not service.get("/v1/models").json()["data"])
        error_of(service.complete(), 503)


STATS = Stats(
    True,
    False,
    gauges={
        metric_key("vllm:num_requests_running", model_name='a "quoted" \\ name', engine="0"): 3.0,
        metric_key("vllm:num_requests_running", model_name="b", engine="1"): 0.0,
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"}': 1.0,
        "unknown:gauge": 1.0,
        "vllm:broken{": 1.0,
    },
    counters={
        "vllm:prompt_tokens": 10.0,
        "vllm:generation_tokens_total": 20.0,
        metric_key("vllm:request_success", finished_reason="stop"): 5.0,
        metric_key("vllm:request_success", finished_reason="length"): 6.0,
    },
    histograms={
        "vllm:time_to_first_token_seconds": tuple(
            float(i) for i in range(len(CATALOGUE["vllm:time_to_first_token_seconds"].bounds) + 2)
        ),
        "vllm:e2e_request_latency_seconds": (1.0, 2.0),
    },
)


def test_the_metrics_text(service: Service) -> None:
    service.core.stats = STATS
    wait_until(lambda: "vllm:prompt_tokens" in service.get("/metrics").text)
    accepted = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;q=0.2,*/*;q=0.1"
    response = service.client.get("/metrics", headers={"accept": accepted})
    assert response.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert set(families) == {
        "vllm:num_requests_running",
        "vllm:cache_config_info",
        "vllm:prompt_tokens",
        "vllm:generation_tokens",
        "vllm:request_success",
        "vllm:time_to_first_token_seconds",
    }
    running = {sample.labels["model_name"]: sample.value for sample in families["vllm:num_requests_running"].samples}
    assert running == {'a "quoted" \\ name': 3.0, "b": 0.0}
    assert families["vllm:prompt_tokens"].type == "counter"
    assert "vllm:prompt_tokens_total 10.0" in response.text
    assert "vllm:generation_tokens_total 20.0" in response.text
    assert 'vllm:request_success_total{finished_reason="length"} 6.0' in response.text
    assert 'vllm:time_to_first_token_seconds_bucket{le="0.005"} 1.0' in response.text
    last = len(CATALOGUE["vllm:time_to_first_token_seconds"].bounds)
    assert f'vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {last}.0' in response.text
    assert f"vllm:time_to_first_token_seconds_sum {last + 1}.0" in response.text
    assert f"vllm:time_to_first_token_seconds_count {last}.0" in response.text


def test_the_policies_metrics(service: Service) -> None:
    """They pass the catalogue, and come out under the names that dashboards ask for."""
    gauges = {
        metric_key("gilir_token_budget", model_name="m", engine="0"): 2048.0,
        metric_key("vllm:num_requests_waiting_by_reason", reason="kv_blocks"): 3.0,
    }
    counters = {
        metric_key("gilir_waiting_seconds", reason="seats"): 1.5,
        metric_key("gilir_waiting_seconds", reason="kv_blocks"): 0.25,
        metric_key("gilir_swapped_blocks", direction="out"): 7.0,
        metric_key("gilir_swapped_blocks", direction="in"): 6.0,
        "gilir_recomputed_tokens": 40.0,
    }
    service.core.stats = Stats(True, False, gauges=gauges, counters=counters)
    wait_until(lambda: "gilir_token_budget" in service.get("/metrics").text)
    lines = service.get("/metrics").text.splitlines()
    assert sorted(line for line in lines if not line.startswith("#")) == [
        "gilir_recomputed_tokens_total 40.0",
        'gilir_swapped_blocks_total{direction="in"} 6.0',
        'gilir_swapped_blocks_total{direction="out"} 7.0',
        'gilir_token_budget{engine="0",model_name="m"} 2048.0',
        'gilir_waiting_seconds_total{reason="kv_blocks"} 0.25',
        'gilir_waiting_seconds_total{reason="seats"} 1.5',
        'vllm:num_requests_waiting_by_reason{reason="kv_blocks"} 3.0',
    ]


def test_clients_strings_never_become_series(service: Service) -> None:
    service.core.stats = STATS
    wait_until(lambda: "vllm:prompt_tokens" in service.get("/metrics").text)
    before = service.get("/metrics").text
    for _ in range(200):
        text = uuid.uuid4().hex
        service.complete(model=text, user=text)
        service.get(f"/{text}")
        service.get(f"/v1/models/{text}")
    service.complete(user="somebody")
    assert service.get("/metrics").text == before


def test_metric_keys_are_read_back() -> None:
    labels = {"a": 'x"y', "b": "back\\slash", "c": "new\nline", "d": "}{,=", "e": ""}
    assert parse_key(metric_key("vllm:request_success", **labels)) == ("vllm:request_success", labels)
    assert parse_key("vllm:prompt_tokens_total") == ("vllm:prompt_tokens", {})
    assert parse_key("vllm:iteration_tokens_total") == ("vllm:iteration_tokens_total", {})


def test_a_model_without_a_tokenizer_is_asked_with_ids_and_answers_in_ids(tmp_path: Path) -> None:
    with run_service(tmp_path, models=[card("bare", byte_level(), CHATML, tokenizer_files={})]) as service:
        service.core.answer(Answer([7, 8, service.eos("bare")]))
        for response in (service.complete(model="bare"), service.chat(model="bare")):
            assert error_of(response, 400)["code"] == "no_tokenizer"
        whole = service.complete(model="bare", prompt=[5, 6], echo=True).json()
        assert whole["choices"][0]["text"] == " 5 6 7 8"
        chunks = events(service.complete(model="bare", prompt=[5, 6], stream=True, stop=" 8", logprobs=0))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " 7"
        assert service.post("/detokenize", model="bare", tokens=[1, 2]).json() == {"prompt": " 1 2"}


# --- paths, methods, ids ---


def test_unknown_paths_and_methods(service: Service) -> None:
    error = error_of(service.get("/nothing"), 404)
    assert (error["code"], error["message"]) == ("not_found", "there is nothing at /nothing")
    assert error_of(service.get("/v1/completions/"), 404)["code"] == "not_found"
    response = service.get("/v1/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    assert error_of(service.client.delete("/v1/models"), 405)["code"] == "method_not_allowed"


def test_request_ids(service: Service) -> None:
    sent = {"x-request-id": "abc-123"}
    response = service.raw("/v1/completions", b'{"model": "byte-level", "prompt": "Hello"}', **sent)
    assert response.headers["x-request-id"] == "abc-123" and response.json()["id"] == "cmpl-abc-123"
    assert service.core.requests[0].request_id == "abc-123"
    assert service.raw("/v1/completions", b"{", **sent).headers["x-request-id"] == "abc-123"
    for bad in ("x" * 300, "with space"):
        response = service.raw("/v1/completions", b"{}", **{"x-request-id": bad})
        assert len(response.headers["x-request-id"]) == 32
    assert service.get("/health").headers["x-request-id"] != service.get("/health").headers["x-request-id"]


def test_version(service: Service) -> None:
    assert service.get("/version").json()["version"]


# --- tokenization ---


def test_tokenize_and_detokenize(service: Service) -> None:
    tokenizer = service.tokenizers[BYTE_FALLBACK]
    text = "Hello 世界"
    answer = service.post("/tokenize", model=BYTE_FALLBACK, prompt=text).json()
    assert answer == {
        "count": len(tokenizer.encode(text).ids),
        "max_model_len": 512,
        "tokens": tokenizer.encode(text).ids,
        "token_strs": None,
    }
    assert answer["tokens"][0] == 1
    plain = service.post(
        "/tokenize", model=BYTE_FALLBACK, prompt=text, add_special_tokens=False, return_token_strs=True
    )
    assert plain.json()["tokens"] == answer["tokens"][1:]
    assert plain.json()["token_strs"] == [tokenizer.id_to_token(token) for token in answer["tokens"][1:]]
    told = service.post("/detokenize", model=BYTE_FALLBACK, tokens=answer["tokens"]).json()
    assert told == {"prompt": tokenizer.decode(answer["tokens"], skip_special_tokens=False)}
    long = "lazy dog " * 10_000
    assert service.post("/tokenize", model=BYTE_LEVEL, prompt=long).json()["count"] > 10_000


def test_mistakes_in_tokenization(service: Service) -> None:
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x" * ((1 << 22) + 1)}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [408]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ):
        assert error_of(service.post(path, model=BYTE_LEVEL, **body), 400)["param"] == param


def test_tokenizer_info(service: Service) -> None:
    info = httpx.get(service.url + "/tokenizer_info", params={"model": BYTE_LEVEL}).json()
    assert info["eos_token"] == "<|im_end|>" and info["chat_template"] == CHATML
