"""LangChain's ChatOpenAI against one base URL: prints what it read, as JSON. It runs in LangChain's environment."""

import json
import sys

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

PROMPT = "Tell me a story."
CALL = r'<tool_call>\{"name": "get_weather", "arguments": \{"city": "(Rome|Paris)"\}\}</tool_call>'


class Person(BaseModel):
    """A person of the book."""

    name: str = Field(pattern="^[A-Z][a-z]{1,8}$")
    age: int = Field(ge=0, le=120)


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def told(message) -> dict:
    return {
        "content": message.content,
        "usage": message.usage_metadata,
        "finish_reason": message.response_metadata.get("finish_reason"),
        "tool_calls": message.tool_calls,
    }


def summed(chunks) -> dict:
    chunks = list(chunks)
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return told(whole) | {"num_chunks": len(chunks)}


def structured(chat, method: str) -> dict:
    return chat.with_structured_output(Person, method=method).invoke("Who is Ahab?").model_dump()


def main() -> None:
    url, model = sys.argv[1:]
    common = {"base_url": f"{url}/v1", "api_key": "none", "temperature": 0, "max_retries": 0, "timeout": 120}
    chat = ChatOpenAI(model=model, max_tokens=16, **common)
    # White space that the grammar allows takes this model many tokens.
    longer = ChatOpenAI(model=model, max_tokens=400, **common)
    # A model this small calls no tool by itself: a grammar bounds its answer to a call.
    calling = ChatOpenAI(
        model=model, max_tokens=100, **common, extra_body={"structured_outputs": {"regex": CALL}}
    ).bind_tools([get_weather])
    answer = calling.invoke(PROMPT)
    (call,) = answer.tool_calls
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    told_all = {
        "plain": told(chat.invoke(PROMPT)),
        "streamed": summed(chat.stream(PROMPT)),
        "with_usage": summed(chat.stream(PROMPT, stream_usage=True)),
        "called": told(answer),
        "called_streamed": summed(calling.stream(PROMPT)),
        "after_the_call": told(longer.bind_tools([get_weather]).invoke([("user", PROMPT), answer, result])),
        "json_schema": structured(longer, "json_schema"),
        "function_calling": structured(longer, "function_calling"),
    }
    print(json.dumps(told_all))


main()
