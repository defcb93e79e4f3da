"""What does the work of `jaxlm data run` and `jaxlm data mix`: how many processes, and of what."""

import argparse
from typing import Any

from jaxlm.core.errors import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What works, and how much of it."""
    parser.add_argument(
        "--workers", type=int, default=1, help="processes (1); the bytes are the same"
    )
    parser.add_argument(
        "--engine",
        choices=("processes", "ray"),
        default="processes",
        help="what works: processes of this machine, or a Ray cluster that shares the folders; the bytes are the same",
    )


def check(args: Any) -> None:
    """Raises CommandError where nothing is to work."""
    if args.workers < 1:
        raise CommandError(
            f"--workers={args.workers} does nothing",
            where=f"jaxlm data {args.action}",
            why="at least one process has to work",
            fix=f"jaxlm data {args.action} --help",
        )
