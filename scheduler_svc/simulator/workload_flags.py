"""The flags that say what is asked of a scheduler: of the simulated one, and of a server that is measured."""

from __future__ import annotations

import argparse
from pathlib import Path

from scheduler_svc.simulator.distributions import ARRIVALS
from scheduler_svc.simulator.traces import LAYOUTS
from scheduler_svc.simulator.workload import MAX_REQUESTS, WorkloadSettings


def workload_settings(options: argparse.Namespace) -> WorkloadSettings:
    """What these flags say; what a command has no flag for has its default."""
    given = vars(options)
    return WorkloadSettings(**{name: given[name] for name in WorkloadSettings.__slots__ if name in given})


def add_load(group: argparse._ArgumentGroup) -> None:
    """When requests come, and how long they are."""
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="requests to replay: Azure, Mooncake, ShareGPT lengths"
    )
    group.add_argument(
        "--format", dest="layout", choices=["auto", *LAYOUTS], default="auto", help="of the trace (%(default)s)"
    )
    group.add_argument(
        "--requests", type=int, metavar="N", help=f"the first N of the trace, or how many (at most {MAX_REQUESTS})"
    )
    group.add_argument("--rate", type=float, metavar="R", help="requests a second on average; stretches a trace")
    group.add_argument(
        "--arrivals", choices=ARRIVALS, help="the trace's; else poisson with a rate, all-at-once without"
    )
    group.add_argument(
        "--cv", type=float, default=1.0, help="for gamma: coefficient of variation of the gaps (%(default)s)"
    )
    group.add_argument(
        "--burst-size", type=int, default=16, metavar="N", help="for bursts: requests at a time (%(default)s)"
    )
    group.add_argument("--concurrency", type=int, metavar="N", help="for closed: requests that are out at any time")
    group.add_argument("--prompt-lengths", metavar="LENGTHS", help="instead of the trace's")
    group.add_argument("--output-lengths", metavar="LENGTHS", help="instead of the trace's")
    group.add_argument("--max-tokens", metavar="LENGTHS", help="what requests allow; else what they are answered with")
    group.add_argument("--seed", type=int, default=0, help="of whatever is random (%(default)s)")


def add_tenants(group: argparse._ArgumentGroup) -> None:
    """Whose requests they are, and how urgent."""
    group.add_argument("--tenants", type=int, default=1, metavar="K", help="tenants t0, t1, … (%(default)s)")
    group.add_argument(
        "--tenant-skew", type=float, default=0.0, metavar="S", help="tenant k asks like 1/(k+1)^S (%(default)s)"
    )
    group.add_argument(
        "--priorities", default="0:1", metavar="CLASS:SHARE,…", help="mix of priority classes (%(default)s)"
    )
    group.add_argument(
        "--deadlines-ms", metavar="MS", help="each request's deadline, as a distribution; none by default"
    )
