"""`jaxlm data mix`: what it takes, and what it shows."""

import argparse
from pathlib import Path
from typing import Any

from jaxlm.cli import data_engine
from jaxlm.cli.arguments import train_next
from jaxlm.cli.bars import progress_bars
from jaxlm.cli.output import Output
from jaxlm.core import config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where it writes, and what works."""
    parser.set_defaults(schema="jaxlm.corpus.mix.config:Mix")
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder, or one to go on")
    data_engine.add_arguments(parser)


def run(args: Any, out: Output) -> int:
    """Makes token shards of cleaned corpora."""
    from jaxlm.corpus.mix.config import Mix
    from jaxlm.corpus.mix.run import run as mix_sources

    data_engine.check(args)
    mix = config.load(Mix, args.config, args.overrides).value
    with progress_bars(out) as progress:
        answer = mix_sources(
            mix,
            Path(args.out),
            workers=args.workers,
            engine=args.engine,
            say=out.say,
            progress=progress,
        )
    out.result({"out": args.out, **answer}, "\n".join(described(answer, args.out)))
    return 0


def described(answer: dict[str, Any], folder: str) -> list[str]:
    """The sets of a mix for people, where its card is, and how to train on it."""
    lines = [f"{'set':<12}{'source':<16}{'documents':>12}{'tokens':>16}{'share':>8}"]
    for side, sets in answer["sets"].items():
        lines += [
            f"{side:<12}{name:<16}{each['documents']:>12,}{each['tokens']:>16,}{each['share']:>8.1%}"
            for name, each in sets.items()
        ]
    made = answer["tokenizer"]
    lines.append(f"tokenizer   {made['size']:,} ids, sha256 {made['sha256'][:12]}")
    lines.append(f"data card   {folder}/CARD.md")
    train = ",".join(f"{folder}/train/{name}" for name in answer["sets"]["train"])
    held = answer["sets"].get("validation", {})
    validation = ",".join(f"{name}={folder}/validation/{name}" for name in held)
    first = next(iter(answer["sets"]["train"]))
    found = {"data.train": train, "data.validation": validation}
    lines.append(
        train_next(folder, found | {"data.tokenizer": f"{folder}/train/{first}/tokenizer"})
    )
    return lines
