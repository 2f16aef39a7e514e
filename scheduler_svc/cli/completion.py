"""`gilir completion SHELL`: the shell asks `gilir` itself for what may follow: it knows each command's flags."""

from __future__ import annotations

import argparse
import os
from importlib import import_module

import argcomplete
from argcomplete.shell_integration import shellcode

from common.command_parser import command_parser
from scheduler_svc.cli import entry
from scheduler_svc.cli.commands import COMMANDS

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = """
  eval "$(gilir completion bash)"                                     in ~/.bashrc
  eval "$(gilir completion zsh)"                                      in ~/.zshrc, below compinit
  gilir completion fish > ~/.config/fish/completions/gilir.fish       once
"""


def parser(prog: str) -> argparse.ArgumentParser:
    made = command_parser(prog, "Print what makes a shell complete the commands and flags of gilir.", EXAMPLES)
    made.add_argument("shell", choices=SHELLS)
    return made


def main(arguments: list[str], prog: str) -> int:
    options = parser(prog).parse_args(arguments)
    print(shellcode(["gilir"], True, options.shell))
    return 0


def complete() -> None:
    """Answer the shell, and end the process. Only the module of the command on the line is imported."""
    # The line up to the cursor, as the shell has it; argcomplete's protocol: the number of words before the arguments.
    words = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT") or 1 << 16)].split(" ")
    words = [word for word in words[:-1] if word]
    name = words[1] if len(words) > 1 else ""
    if name not in COMMANDS:
        argcomplete.autocomplete(entry.parser(), always_complete_options=False)
        return
    os.environ["_ARGCOMPLETE"] = str(int(os.environ["_ARGCOMPLETE"]) + 1)
    argcomplete.autocomplete(import_module(COMMANDS[name].module).parser(f"gilir {name}"))
