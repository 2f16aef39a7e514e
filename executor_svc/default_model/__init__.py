"""The embedded default model: a Hugging Face folder, and the package that trains it (`train`)."""
