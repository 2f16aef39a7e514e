"""`gilir COMMAND …`: the tools around the services."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {
    "simulate": ("scheduler_svc.simulator.cli", "compare scheduling settings on a trace, under a virtual clock"),
    "calibrate": ("scheduler_svc.simulator.calibrate", "fit the simulator's cost model to a plan log"),
    "replay": ("scheduler_svc.plan_log.replay", "run the core over a plan log again and compare every plan"),
    "keys": ("scheduler_svc.keys.command", "make, list and revoke API keys"),
    "curve": ("common.curve", "make the keys with which scheduler and executors meet over a network"),
    "trace": ("scheduler_svc.plan_log.trace", "turn a plan log into a trace for Perfetto or chrome://tracing"),
}
"""Name -> (module with a `main(arguments, prog)` that returns an exit status, what it does)."""


def main() -> int:
    """Entry point. Exit status 2 for a command that there is not."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: gilir COMMAND [--help] …\n")
        for name, (_, text) in COMMANDS.items():
            print(f"  {name:<10} {text}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"gilir: there is no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    status: int = import_module(COMMANDS[name][0]).main(rest, f"gilir {name}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
