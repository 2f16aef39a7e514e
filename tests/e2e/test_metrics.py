"""What `/metrics` tells dashboards and gateways, of two frontends, when an executor and a frontend are lost."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from deploy.local import ROOT
from executor_svc.script import Script
from scheduler_svc.metrics import CATALOGUE
from tests.e2e.conftest import Stack

MODEL = {"model_name", "engine"}
OF_VLLM = {
    # The Grafana dashboards of vLLM (examples/observability).
    "vllm:e2e_request_latency_seconds": MODEL,
    "vllm:generation_tokens": MODEL,
    "vllm:inter_token_latency_seconds": MODEL,
    "vllm:iteration_tokens_total": MODEL,
    "vllm:num_preemptions": MODEL,
    "vllm:num_requests_running": MODEL,
    "vllm:num_requests_waiting": MODEL,
    "vllm:num_requests_waiting_by_reason": MODEL | {"reason"},
    "vllm:prefix_cache_hits": MODEL,
    "vllm:prefix_cache_queries": MODEL,
    "vllm:prompt_tokens": MODEL,
    "vllm:request_decode_time_seconds": MODEL,
    "vllm:request_generation_tokens": MODEL,
    "vllm:request_inference_time_seconds": MODEL,
    "vllm:request_max_num_generation_tokens": MODEL,
    "vllm:request_params_max_tokens": MODEL,
    "vllm:request_params_n": MODEL,
    "vllm:request_prefill_time_seconds": MODEL,
    "vllm:request_prompt_tokens": MODEL,
    "vllm:request_queue_time_seconds": MODEL,
    "vllm:request_success": MODEL | {"finished_reason"},
    "vllm:request_time_per_output_token_seconds": MODEL,
    "vllm:time_to_first_token_seconds": MODEL,
    "vllm:admission_rejections": MODEL | {"reason"},
    # The Kubernetes inference gateway reads these, and running and waiting.
    "vllm:kv_cache_usage_perc": MODEL,
    "vllm:cache_config_info": MODEL | {"block_size", "num_gpu_blocks"},
}
BUCKETS_OF_VLLM = {
    "vllm:time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 "
    "20.0 40.0 80.0 160.0 640.0 2560.0",
    "vllm:inter_token_latency_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 "
    "40.0 80.0",
    "vllm:e2e_request_latency_seconds": "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 "
    "240.0 480.0 960.0 1920.0 7680.0",
    "vllm:iteration_tokens_total": "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0",
    "vllm:request_params_n": "1.0 2.0 5.0 10.0 20.0",
    "vllm:request_prompt_tokens": "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 500.0 1000.0 2000.0 5000.0 10000.0 20000.0",
}
WITHOUT_BATCHES = CATALOGUE.keys() - {"gilir_batch_lines"}


def scrape(stack: Stack) -> dict[str, Metric]:
    """By family, over a connection of its own: either frontend may answer."""
    with urllib.request.urlopen(f"{stack.url}/metrics", timeout=60) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def values(families: dict[str, Metric], *, monotone: bool) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """By name and labels; `monotone`: of counters and histograms alone."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families.values()
        if not monotone or family.type != "gauge"
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def bare(module_start: Callable[..., Stack]) -> tuple[Stack, dict[str, Metric]]:
    """A scheduler without executors, and what it tells."""
    stack = module_start("--frontends", "2")
    stack.until(lambda: stack.client.get("/metrics").text, "the first beat")
    return stack, scrape(stack)


@pytest.fixture(scope="module")
def stack(bare: tuple[Stack, dict[str, Metric]]) -> Stack:
    stack, _ = bare
    for name in ("cpu-0", "cpu-1"):
        stack.fake(name, Script(delay_s=0.002), max_num_seqs=2)
    stack.ready()
    stack.until(lambda: stack.metric("gilir_lanes") == 2, "both executors")
    stack.text("a prompt", 4)
    stack.until(lambda: "gilir_iteration_deadline_seconds" in scrape(stack), "an iteration to be told")
    return stack


def test_a_scheduler_without_executors_tells_what_concerns_no_model(bare: tuple[Stack, dict[str, Metric]]) -> None:
    families = bare[1]
    assert all(name.startswith("gilir_") and family.samples for name, family in families.items())
    assert {"gilir_lanes", "gilir_executors_lost", "gilir_requests_ended", "gilir_waiting_seconds"} <= families.keys()


def test_every_metric_of_the_catalogue_is_there_with_its_type_text_and_labels(stack: Stack) -> None:
    families = scrape(stack)
    assert families.keys() == WITHOUT_BATCHES
    for name, family in families.items():
        metric = CATALOGUE[name]
        assert (family.type, family.documentation) == (metric.kind, metric.help) and family.documentation
        names = [sample.name.removeprefix(name) for sample in family.samples]
        suffixes = {"gauge": {""}, "counter": {"_total"}, "histogram": {"_bucket", "_count", "_sum"}}
        assert set(names) == suffixes[metric.kind], name
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(metric.labels), sample


def test_what_dashboards_for_vllm_and_the_inference_gateway_ask_for_is_there(stack: Stack) -> None:
    families = scrape(stack)
    for name, labels in OF_VLLM.items():
        for sample in families[name].samples:
            assert sample.labels.keys() - {"le"} == labels and sample.labels["model_name"] == "model"
    for name, edges in BUCKETS_OF_VLLM.items():
        found = {sample.labels["le"] for sample in families[name].samples if sample.name.endswith("_bucket")}
        assert {*edges.split(), "+Inf"} <= found, name
    engines = {sample.labels["engine"] for name in OF_VLLM for sample in families[name].samples}
    assert engines == {"all", "cpu-0", "cpu-1"}


def test_series_stay_while_they_are_zero(stack: Stack) -> None:
    stack.until_idle()
    samples = values(scrape(stack), monotone=False)
    reasons = {dict(labels)["reason"] for name, labels in samples if name == "vllm:num_requests_waiting_by_reason"}
    assert reasons == {"seats", "token_budget", "kv_blocks", "policy", "no_executor", "paused"}
    ends = {dict(labels)["finished_reason"] for name, labels in samples if name == "vllm:request_success_total"}
    assert ends == {"stop", "length", "abort", "error"}
    assert {value for (name, _), value in samples.items() if name == "vllm:admission_rejections_total"} == {0.0}


def test_the_phases_of_a_request_add_up(stack: Stack) -> None:
    before = values(scrape(stack), monotone=True)
    assert stack.complete("one two three", 5, n=2).status_code == 200
    labels = (("engine", "all"), ("model_name", "model"))
    stack.until(
        lambda: stack.metric("vllm:request_params_n_sum") >= before["vllm:request_params_n_sum", labels] + 2, ""
    )
    stack.until_idle()
    after = values(scrape(stack), monotone=True)

    def rose(name: str) -> float:
        return after[f"vllm:{name}", labels] - before[f"vllm:{name}", labels]

    assert rose("request_params_n_count") == 1 and rose("request_params_max_tokens_sum") == 5
    assert rose("request_generation_tokens_count") == 2 and rose("request_generation_tokens_sum") == 10
    assert rose("request_max_num_generation_tokens_count") == 1 and rose("request_max_num_generation_tokens_sum") == 5
    times = {part: rose(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode", "inference")}
    assert times["inference"] == pytest.approx(times["prefill"] + times["decode"])
    assert rose("e2e_request_latency_seconds_sum") == pytest.approx(times["queue"] + times["inference"])
    assert rose("request_time_per_output_token_seconds_sum") == pytest.approx(times["decode"] / 4)


def test_both_frontends_tell_the_same_and_nothing_falls_when_one_is_started_anew(stack: Stack) -> None:
    stack.until_idle()
    before = values(scrape(stack), monotone=True)
    assert all(values(scrape(stack), monotone=True) == before for _ in range(6))
    frontend = next(p for p in psutil.Process(stack.scheduler.pid).children() if "frontend-0" in p.cmdline())
    frontend.kill()
    stack.client.close()
    stack.client = type(stack.client)(base_url=stack.url, timeout=60)
    stack.until(lambda: stack.scheduler.log.read_text().count("child started") > 2, "the frontend to be started anew")
    stack.ready()
    for _ in range(6):
        after = values(scrape(stack), monotone=True)
        assert after.keys() == before.keys() and all(after[key] >= value for key, value in before.items())


def test_a_failover_is_counted_with_the_time_to_the_next_token(stack: Stack) -> None:
    stream = stack.stream("a long answer", 400)
    next(stream)

    def busy() -> list[str]:
        running = scrape(stack)["gilir_running_sequences"].samples
        return [sample.labels["engine"] for sample in running if sample.value]

    stack.until(busy, "its executor to be told")
    next(fake for fake in stack.fakes if [fake.name] == busy()).kill()
    next(stream)
    stack.until(lambda: stack.metric("gilir_recovery_seconds_count") == 1, "the recovery to be counted")
    assert stack.metric("gilir_failovers_total") == 1 and stack.metric("gilir_recovery_seconds_sum") > 0
    assert stack.metric("gilir_executors_lost_total") == 1
    stream.close()


# --- what is deployed with it ---


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "deploy/grafana/dashboards/gilir.json").read_text())
    return found


def expressions() -> Iterator[str]:
    """PromQL of the dashboard and of the alerts."""
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    for group in yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def test_the_dashboard_and_the_alerts_use_only_what_is_exposed(stack: Stack) -> None:
    exposed = {sample.name for family in scrape(stack).values() for sample in family.samples}
    texts = [*expressions(), *(variable["query"]["query"] for variable in dashboard()["templating"]["list"])]
    used = {name for text in texts for name in re.findall(r"\b(?:vllm:|gilir_)\w+", text)}
    assert len(texts) > 50 and used - exposed == set()
    labels = {label for text in texts for found in re.findall(r"by \(([^)]*)\)", text) for label in found.split(", ")}
    known = {label for metric in CATALOGUE.values() for label in metric.labels}
    assert labels <= known | {"le", "instance"}


def test_the_dashboard_has_a_row_for_each_subject_and_no_overlaps() -> None:
    panels = dashboard()["panels"]
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows == ["Service level", "Iterations", "KV cache", "Waiting", "Failovers", "Executors"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


def test_the_table_of_the_documentation_is_the_catalogue() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `((?:vllm:|gilir_)\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    expected = [
        (name + "_total" * (metric.kind == "counter"), metric.kind, ", ".join(metric.labels) or "–", metric.help)
        for name, metric in CATALOGUE.items()
    ]
    assert [tuple(cell.strip() for cell in row) for row in rows] == expected
