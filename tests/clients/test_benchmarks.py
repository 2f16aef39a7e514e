"""The tools that measure servers: guidellm, aiperf, and vLLM's `bench serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

PROMPT, OUTPUT, REQUESTS = 40, 12, 5
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("kind", ["chat_completions", "text_completions"])
def test_guidellm(url: str, model: Path, installed: Any, tmp_path: Path, kind: str) -> None:
    path = "/v1/chat/completions" if kind == "chat_completions" else "/v1/completions"
    flags = ["--backend", f"kind=openai_http,target={url},request_format={path}"]
    flags += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    flags += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}"]
    flags += ["--tokenizer", f"kind=hf_auto,model={model}", "--output", "kind=json,path=report.json"]
    installed("guidellm").run("guidellm", "run", *flags, "--disable-console", folder=tmp_path)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    made = benchmark["metrics"]["request_totals"]
    assert (made["successful"], made["errored"]) == (REQUESTS, 0)
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == OUTPUT
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0


def test_aiperf(url: str, model: Path, installed: Any, tmp_path: Path) -> None:
    flags = ["--model", "default_model", "--tokenizer", str(model), "--url", url, "--endpoint-type", "chat"]
    flags += ["--streaming", "--request-count", str(REQUESTS), "--concurrency", "2", "--ui", "none"]
    flags += ["--synthetic-input-tokens-mean", str(PROMPT), "--output-tokens-mean", str(OUTPUT)]
    flags += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--artifact-dir", "out"]
    # It takes a folder for a tokenizer only where it may ask a hub; it does not.
    installed("aiperf").run("aiperf", "profile", *flags, folder=tmp_path, HF_HUB_OFFLINE="")
    rows = [json.loads(line) for line in (tmp_path / "out" / "profile_export.jsonl").read_text().splitlines()]
    assert len(rows) == REQUESTS and not any(row.get("error") for row in rows)
    assert {row["metrics"]["usage_completion_tokens"]["value"] for row in rows} == {OUTPUT}
    scraped = json.loads((tmp_path / "out" / "server_metrics_export.json").read_text())
    assert "vllm:num_requests_running" in json.dumps(scraped)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve(url: str, model: Path, installed: Any, tmp_path: Path, backend: str) -> None:
    path = "/v1/completions" if backend == "openai" else "/v1/chat/completions"
    flags = ["--backend", backend, "--endpoint", path, "--base-url", url, "--model", "default_model"]
    flags += ["--tokenizer", str(model), "--dataset-name", "random", "--ignore-eos", "--save-result"]
    flags += ["--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT), "--num-prompts", str(REQUESTS)]
    flags += ["--result-dir", ".", "--result-filename", "result.json", "--disable-tqdm"]
    command = ["python", "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    installed("vllm").run(*command, *flags, folder=tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * OUTPUT and result["mean_ttft_ms"] > 0
