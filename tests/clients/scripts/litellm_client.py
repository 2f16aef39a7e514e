"""LiteLLM's SDK against one base URL: prints what it read, as JSON. It runs in LiteLLM's environment."""

import json
import sys

import litellm

ASK = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 12, "temperature": 0}


def told(answer) -> dict:
    choice = answer.choices[0]
    return {
        "content": choice.message.content if hasattr(choice, "message") else choice.text,
        "finish_reason": choice.finish_reason,
        "usage": [answer.usage.prompt_tokens, answer.usage.completion_tokens],
    }


def main() -> None:
    url, model = sys.argv[1:]
    common = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
    chunks = list(
        litellm.completion(
            model=f"hosted_vllm/{model}", stream=True, stream_options={"include_usage": True}, **ASK, **common
        )
    )
    try:
        litellm.completion(model="hosted_vllm/no-such-model", **ASK, **common)
        error = "none"
    except litellm.NotFoundError as caught:
        error = str(caught)
    prompt = {"prompt": "In the beginning", "max_tokens": 8, "temperature": 0}
    told_all = {
        "hosted_vllm": told(litellm.completion(model=f"hosted_vllm/{model}", **ASK, **common)),
        "openai": told(litellm.completion(model=f"openai/{model}", **ASK, **common)),
        "text": told(litellm.text_completion(model=f"text-completion-openai/{model}", **prompt, **common)),
        "text_vllm": told(litellm.text_completion(model=f"hosted_vllm/{model}", **prompt, **common)),
        "streamed": {
            "content": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
            "usage": [chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens],
        },
        "error": error,
    }
    print(json.dumps(told_all))


main()
