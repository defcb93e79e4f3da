"""`jaxlm data run`: what it takes, and what it shows."""

import argparse
import json
from pathlib import Path
from typing import Any

from jaxlm.cli import data_engine, data_mix
from jaxlm.cli.arguments import needed_config, train_next
from jaxlm.cli.bars import progress_bars
from jaxlm.cli.output import Output
from jaxlm.core import config
from jaxlm.core.errors import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where it writes, with how many processes, how much it reads."""
    parser.set_defaults(schema="jaxlm.corpus.config:Recipe")
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder, or one to go on")
    data_engine.add_arguments(parser)
    parser.add_argument(
        "--copy_to",
        metavar="URL",
        help="copy all of it there when it is done, such as s3://bucket/clean",
    )
    parser.add_argument(
        "--sample",
        default="100%",
        metavar="SHARE",
        help="of the records, such as 1%%, for a preview",
    )


def run(args: Any, out: Output) -> int:
    """Runs a recipe and shows its funnel."""
    from jaxlm.corpus.config import Recipe
    from jaxlm.corpus.mix import after
    from jaxlm.corpus.report import table
    from jaxlm.corpus.run import run as prepare

    data_engine.check(args)
    file = needed_config(args, Recipe, "data")
    recipe: Recipe = config.load(Recipe, file, args.overrides).value
    after.check(recipe)
    if args.copy_to:
        from jaxlm.corpus import remote

        remote.open_store(args.copy_to)  # what is missing is said before hours of work
    scorer: Any = None
    if "perplexity" in recipe.stages:
        from jaxlm.recipes.use import evaluate

        scorer = evaluate.scorer
    with progress_bars(out) as progress:
        outcome = prepare(
            recipe,
            Path(args.out),
            workers=args.workers,
            engine=args.engine,
            sample=_share(args.sample),
            scorer=scorer,
            say=out.say,
            progress=progress,
        )
        shards = {}
        if recipe.shards.tokenizer:
            shards = after.write(
                recipe,
                Path(args.out),
                outcome.report,
                workers=args.workers,
                engine=args.engine,
                say=out.say,
                progress=progress,
            )
    if args.copy_to:
        from jaxlm.corpus.upload import copy_to

        count = copy_to(Path(args.out), list(outcome.report["files"]), args.copy_to)
        out.say(f"{count:,} files copied to {args.copy_to}" if count else "the copy was there")
    speed = {
        "seconds": outcome.seconds,
        "bytes": outcome.bytes,
        "core_seconds": outcome.stage_seconds,
        "megabytes_per_second": outcome.bytes / 1e6 / outcome.seconds,
    }
    lines = [table(outcome.report)]
    if outcome.bytes:
        core = sum(outcome.stage_seconds.values())
        parts = ", ".join(f"{name} {spent:.1f}" for name, spent in outcome.stage_seconds.items())
        lines.append(
            f"{outcome.bytes / 1e6:,.1f} MB of files in {outcome.seconds:,.1f} s; a core's seconds: {core:.1f} ({parts})"
        )
    lines.append(f"report: {args.out}/report.html")
    answer = {name: value for name, value in outcome.report.items() if name != "files"}
    if shards:
        lines += data_mix.described(shards, f"{args.out}/{after.SHARDS}")
        answer[after.SHARDS] = shards
    else:
        found = {"data.train": f"{args.out}/kept/*.jsonl", "data.validation": "5%"}
        lines.append(train_next(args.out, found))
    out.result({"out": args.out, **answer, "speed": speed}, "\n".join(lines))
    return 0


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise CommandError(
            f"--sample={json.dumps(text)} is no share",
            where="jaxlm data run",
            why="it is above 0% and at most 100%",
            fix="jaxlm data run --help",
        )
    return share
