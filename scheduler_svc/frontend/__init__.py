"""One frontend process: the OpenAI-compatible REST API in front of the core."""
