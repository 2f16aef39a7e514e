"""The training of the embedded default model; `__main__` is its command line."""
