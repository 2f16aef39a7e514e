"""What a model's text means: content, reasoning, and calls of tools, told apart as the text comes."""
