"""Prompts of the tests that compare answers."""

TEXTS = [
    "In the beginning",
    "The king said to his servants, and they",
    "Now there was a man",
    "And she answered",
    "They went up into the mountain, and when evening had come they",
    "Listen, my son",
]
