"""`gilir keys create | list | revoke`: writes the file of API keys that `--api-keys` names."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from common.command_parser import command_parser
from scheduler_svc.keys.api_key import ApiKey, fingerprint_of, new_secret
from scheduler_svc.keys.key_file import KeyFileError, add_key, read_keys, remove_key

FILE_VARIABLE = "GILIR_API_KEYS"


EXAMPLES = """
  gilir keys create --file keys.jsonl --tenant research --max-concurrent 8
  gilir keys list --file keys.jsonl
"""


def main(arguments: list[str], prog: str) -> int:
    """Run the command. Exit status 1, with one plain line, for what cannot be done."""
    options = parser(prog).parse_args(arguments)
    try:
        match options.action:
            case "create":
                _create(options)
            case "list":
                _list(options.file)
            case "revoke":
                remove_key(options.file, options.id)
                print(f"revoked: {options.id}")
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        print(f"error: {first['loc'][0]}: {first['msg']}", file=sys.stderr)
        return 1
    except KeyFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {options.file}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def parser(prog: str) -> argparse.ArgumentParser:
    made = command_parser(prog, "Make, list and revoke API keys.", EXAMPLES)
    actions = made.add_subparsers(dest="action", required=True)
    create = actions.add_parser("create", help="make a key, and print it once")
    show = actions.add_parser("list", help="tell the keys' ids, tenants and limits")
    revoke = actions.add_parser("revoke", help="take a key out; running services follow within a second")
    known = os.environ.get(FILE_VARIABLE) or None
    for action in (create, show, revoke):
        action.add_argument(
            "--file", type=Path, default=known, required=known is None, help=f"the key file (default: ${FILE_VARIABLE})"
        )
    create.add_argument("--tenant", required=True, help="whose key it is")
    create.add_argument("--id", default="", help="its name in logs (default: a random one)")
    create.add_argument("--max-concurrent", type=int, default=0, metavar="N", help="requests at a time; 0: no limit")
    create.add_argument("--tokens-per-minute", type=int, default=0, metavar="N", help="0: no limit")
    create.add_argument(
        "--best-priority", type=int, default=0, metavar="P", help="the most urgent priority it gets (%(default)s)"
    )
    create.add_argument("--model", action="append", default=[], help="a model it may use, once each; none: all")
    revoke.add_argument("id", help="the key's id")
    return made


def _create(options: argparse.Namespace) -> None:
    secret = new_secret()
    key = ApiKey(
        id=options.id or secrets.token_hex(4),
        tenant=options.tenant,
        sha256=fingerprint_of(secret).hex(),
        created=datetime.now(UTC).strftime("%Y-%m-%d"),
        max_concurrent=options.max_concurrent,
        tokens_per_minute=options.tokens_per_minute,
        best_priority=options.best_priority,
        models=tuple(options.model),
    )
    add_key(options.file, key)
    print(f"key {key.id} of {key.tenant}; it cannot be shown again:", file=sys.stderr)
    print(secret)


def _list(path: Path) -> None:
    rows = [["id", "tenant", "created", "concurrent", "tokens/min", "best priority", "models"]]
    for key in read_keys(path):
        limits = [str(limit or "-") for limit in (key.max_concurrent, key.tokens_per_minute)]
        models = ",".join(key.models) or "all"
        rows.append([key.id, key.tenant, key.created or "-", *limits, str(key.best_priority), models])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
