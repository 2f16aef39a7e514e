"""`gilir COMMAND …`: the tools around the services."""

from scheduler_svc.cli.entry import main

__all__ = ["main"]
