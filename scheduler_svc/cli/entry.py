"""Finds the command, and has whatever goes wrong in it end in one plain line."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from importlib.metadata import version

from scheduler_svc.cli.commands import COMMANDS, GROUPS
from scheduler_svc.cli.errors import CommandError

INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
SERVE = ("serve", "run", "start", "launch")
"""What other servers' command lines call `gilir up`."""
EXTRA = ("rich", "httpx", "argcomplete")
"""Modules of the extra `cli`."""

HELP = """usage: gilir COMMAND [--help] … | --version

{groups}
gilir COMMAND --help tells the flags, with examples. GILIR_API_KEY holds the API key of those that talk to a server."""


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Exit status 1 where the command fails, 2 where it is used wrongly, 130 for Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if "_ARGCOMPLETE" in os.environ:
            import_module("scheduler_svc.cli.completion").complete()
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Who read has gone. The interpreter flushes once more at its end, and must not find the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP.format(groups=_groups()))
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"gilir {version('gilir')}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        instead = "it is `gilir up`" if name in SERVE else f"there are {', '.join(COMMANDS)}"
        print(f"gilir: there is no command {name!r}; {instead}", file=sys.stderr)
        return 2
    try:
        module = import_module(COMMANDS[name].module)
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        raise CommandError(f"gilir {name} needs {error.name}: pip install -e '.[cli]' in Gilir's folder") from None
    status: int = module.main(rest, f"gilir {name}")
    return status


def _groups() -> str:
    lines = []
    for title, commands in GROUPS.items():
        lines.append(f"{title}:")
        lines += [f"  {name:<11} {command.text}" for name, command in commands.items()]
        lines.append("")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Of the first word alone, for completion."""
    made = argparse.ArgumentParser(prog="gilir", add_help=False)
    chosen = made.add_subparsers()
    for name, command in COMMANDS.items():
        chosen.add_parser(name, help=command.text, add_help=False)
    return made
