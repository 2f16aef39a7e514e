"""LiteLLM: its SDK, and its proxy in front of Gilir with openai-python behind it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

SCRIPT = Path(__file__).parent / "scripts" / "litellm_client.py"
ENVIRONMENT = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story."}]
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]


def test_the_sdk(url: str, installed: Any, tmp_path: Path) -> None:
    out = installed("litellm").run("python", str(SCRIPT), url, "default_model", folder=tmp_path, **ENVIRONMENT)
    read = json.loads(out.splitlines()[-1])
    chat = read["hosted_vllm"]
    assert chat["content"] and chat["finish_reason"] in ("stop", "length") and chat["usage"][1] > 0
    assert read["openai"] == chat
    assert read["streamed"] == {"content": chat["content"], "usage": chat["usage"]}
    assert read["text"]["content"] and read["text"]["content"] == read["text_vllm"]["content"]
    assert "no-such-model" in read["error"]


@pytest.fixture(scope="module")
def proxy(url: str, installed: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("proxy")
    params = {"model": "hosted_vllm/default_model", "api_base": f"{url}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": "story", "litellm_params": params}]}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    command = ["litellm", "--config", "config.yaml", "--host", "127.0.0.1", "--port", "{port}"]
    # It does not start without a key that is hard to guess.
    key = f"sk-{secrets.token_hex(32)}"
    environment = ENVIRONMENT | {"LITELLM_MASTER_KEY": key}
    serving = installed("litellm").serving(*command, folder=folder, health="/health/liveliness", **environment)
    with serving as address, openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) as client:
        yield client


def test_through_the_proxy_a_stream_is_the_plain_answer(proxy: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "story", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    plain = proxy.chat.completions.create(**asked)
    assert plain.choices[0].message.content and plain.usage is not None
    chunks = list(proxy.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == plain.usage.completion_tokens


def test_the_proxy_passes_a_mistake_on(proxy: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        proxy.chat.completions.create(model="story", messages=MESSAGES, max_tokens=10**6)
