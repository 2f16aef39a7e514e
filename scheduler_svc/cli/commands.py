"""The commands of `gilir`, by what one wants to do."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """The module has `parser(prog)`, an `argparse.ArgumentParser`, and `main(arguments, prog)`, the exit status."""

    module: str
    text: str


GROUPS: dict[str, dict[str, Command]] = {
    "serve": {
        "up": Command("scheduler_svc.cli.up.command", "run a scheduler and executors on this machine"),
        "executors": Command("scheduler_svc.cli.executors", "list executors; drain, resume, release them"),
        "keys": Command("scheduler_svc.keys.command", "make, list and revoke API keys"),
        "curve": Command("common.curve", "make the keys with which scheduler and executors meet over a network"),
    },
    "use": {
        "chat": Command("scheduler_svc.cli.chat.command", "chat with a model in the terminal, or in a pipe"),
        "bench": Command("scheduler_svc.cli.bench.command", "put load on a server: latency, throughput, errors"),
        "top": Command("scheduler_svc.cli.top.command", "watch who runs, who waits and why, and the executors"),
    },
    "understand": {
        "simulate": Command("scheduler_svc.simulator.cli", "compare scheduling settings, under a virtual clock"),
        "calibrate": Command("scheduler_svc.simulator.calibrate", "fit the simulator's cost model to a plan log"),
        "replay": Command("scheduler_svc.plan_log.replay", "run the core over a plan log again, compare every plan"),
        "trace": Command("scheduler_svc.plan_log.trace", "turn a plan log into a trace for ui.perfetto.dev"),
    },
    "shell": {
        "completion": Command("scheduler_svc.cli.completion", "print what makes bash, zsh or fish complete commands"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
