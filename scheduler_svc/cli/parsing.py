"""Flags that several commands have."""

from __future__ import annotations

import argparse
import os

URL_VARIABLE, KEY_VARIABLE = "GILIR_URL", "GILIR_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"


def add_server(parser: argparse.ArgumentParser) -> None:
    """`--url` and `--api-key`. The key is read when it is needed: help must not show it."""
    url = os.environ.get(URL_VARIABLE) or DEFAULT_URL
    parser.add_argument(
        "--url", default=url, help=f"the server, with or without /v1 (${URL_VARIABLE}, else {DEFAULT_URL})"
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"rather in ${KEY_VARIABLE}: others see command lines")


def key_of(options: argparse.Namespace) -> str:
    """The API key that was given; empty where there is none."""
    return options.api_key or os.environ.get(KEY_VARIABLE) or ""


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
