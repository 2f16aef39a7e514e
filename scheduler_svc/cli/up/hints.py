"""What to write instead of an argument that `gilir up` does not have."""

from __future__ import annotations

from scheduler_svc.settings import SchedulerSettings

LIMITS_OF_BOTH = ("max_num_seqs", "max_num_batched_tokens")
ONE_GPU = "a model must fit one GPU; --executors N serves it whole on each of N"
OF_EXECUTORS = (
    *("max_model_len", "gpu_memory_utilization", "served_model_name", "dtype", "quantization", "block_size"),
    *("kv_cache_dtype", "device"),
)
"""Flags of `vllm serve` that executors have, whose settings are not known here."""
OF_OTHER_SERVERS = {
    "tensor_parallel_size": ONE_GPU,
    "pipeline_parallel_size": ONE_GPU,
    "data_parallel_size": "--executors {value}",
    "api_server_count": "--frontends {value}",
    "enforce_eager": "--set executor.cuda_graphs=false",
    "scheduling_policy": "--set scheduler.discipline={value}",
    "enable_prefix_caching": "it is on; --set scheduler.prefix_caching=false turns it off",
    "enable_chunked_prefill": "it is on; --set scheduler.chunked_prefill=false turns it off",
    "no_enable_prefix_caching": "--set scheduler.prefix_caching=false",
    "no_enable_chunked_prefill": "--set scheduler.chunked_prefill=false",
    "enable_auto_tool_choice": "the model's chat template tells it, or --set scheduler.tool_call_parser=NAME",
    "trust_remote_code": "code that comes with a model is not run",
    "enable_lora": "adapters are not served",
    "speculative_config": "there is no speculative decoding",
}
"""Flags of `vllm serve` that have another name here, or no counterpart."""


def hint(others: list[str]) -> str:
    """Of the arguments that are left over, a line for each. A word behind a flag is its value."""
    lines: list[str] = []
    i = 0
    while i < len(others):
        flag, equals, value = others[i].partition("=")
        i += 1
        if not flag.startswith("-"):
            lines.append(f"{others[i - 1]}: a model is given as --model {flag}, a file of settings as --config {flag}")
            continue
        if not equals and i < len(others) and not others[i].startswith("-"):
            value, i = others[i], i + 1
        lines.append(f"there is no {flag} here{_instead(flag, value or 'VALUE')}")
    return "\n".join(lines)


def _instead(flag: str, value: str) -> str:
    name = flag.lstrip("-").replace("-", "_")
    if name in OF_OTHER_SERVERS:
        return f": {OF_OTHER_SERVERS[name].format(value=value)}"
    if SchedulerSettings.is_secret(name):
        return f"; others see command lines, so set GILIR_{name.upper()} instead"
    if name in LIMITS_OF_BOTH:
        sets = " ".join(f"--set {table}.{name}={value}" for table in ("scheduler", "executor"))
        return f"; both services have it, and the lower counts: {sets}"
    positive = name.removeprefix("no_")
    if name not in SchedulerSettings.model_fields and positive != name:
        name, value = positive, "false"
    if name in SchedulerSettings.model_fields:
        return f"; a setting of the scheduler is given as --set scheduler.{name}={value}"
    if name in OF_EXECUTORS:
        return f"; a setting of the executor is given as --set executor.{name}={value}"
    return f"; if `python -m executor_svc --help` has it, it is given as --set executor.{name}={value}"
