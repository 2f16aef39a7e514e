"""OpenAI's Files and Batches: `/v1/files` and `/v1/batches`."""
