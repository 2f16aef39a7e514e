"""Parsers of command lines whose help ends with examples."""

from __future__ import annotations

import argparse


def command_parser(prog: str, description: str, examples: str) -> argparse.ArgumentParser:
    """`examples`: one a line. Both texts are shown with the lines that they have."""
    return argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog="examples:\n" + examples.strip("\n"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
