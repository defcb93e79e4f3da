"""`jaxlm data run`, `data mix` and `data clusters`: cleaning and mixing of corpora."""

import argparse
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import (
    add_flag,
    at_least_one,
    needed_config,
    read_share,
    selection,
    train_next,
    withhold,
)
from jaxlm.cli.bars import progress_bars
from jaxlm.cli.output import Output, columns
from jaxlm.core import config
from jaxlm.core.quoting import printable


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `data run` and `data mix`: output folder, workers and engine."""
    add_flag(parser, "--out", "DIR", str, "new folder, or one to resume", required=True)
    add_flag(parser, "--workers", "N", 1, "number of processes; does not change the output")
    doc = "processes of this machine, or a Ray cluster that shares the folders; the same output"
    add_flag(parser, "--engine", ["processes", "ray"], "processes", doc)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `data run`."""
    parser.set_defaults(schema="jaxlm.corpus.config:Recipe")
    add_engine(parser)
    doc = "URL to copy the output to, such as s3://bucket/clean"
    add_flag(parser, "--copy_to", "URL", str, doc)
    add_flag(parser, "--sample", "SHARE", "100%", "share of the records, such as 1%% for a preview")


def add_mix(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `data mix`."""
    parser.set_defaults(schema="jaxlm.corpus.mix.config:Mix")
    add_engine(parser)


def add_clusters(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `data clusters`."""
    withhold(parser, "clusters are shown as the recipe of the folder produced them")
    parser.add_argument("folder", metavar="DIR", help="--out of a finished run")
    add_flag(parser, "--kind", ["all", "exact", "near"], "all", "kind of duplicates")
    add_flag(parser, "--most", "N", 10, "number of clusters, the largest first")
    add_flag(parser, "--characters", "N", 200, "characters of each text")


def run(args: Any, out: Output) -> int:
    """Run a recipe and show its funnel."""
    from jaxlm.corpus.config import Recipe
    from jaxlm.corpus.mix import after
    from jaxlm.corpus.report import table
    from jaxlm.corpus.run import run as prepare

    at_least_one("jaxlm data run", args, "workers")
    file = needed_config(args, Recipe, "data")
    recipe: Recipe = config.load(Recipe, file, args.overrides).value
    after.check(recipe)
    if args.copy_to:
        from jaxlm.corpus import remote

        remote.open_store(args.copy_to)  # errors of the store are raised before hours of work
    scorer: Any = None
    if "perplexity" in recipe.stages:
        from jaxlm.recipes.use import evaluate

        scorer = evaluate.scorer
    sample = read_share(args.sample, 1.0, "--sample", "jaxlm data run")
    folder = Path(args.out)
    with progress_bars(out) as progress:
        work = selection(args, "workers", "engine") | {"progress": progress}
        outcome = prepare(recipe, folder, sample=sample, scorer=scorer, log=out.log, **work)
        shards = {}
        if recipe.shards.tokenizer:
            shards = after.write(recipe, folder, outcome.report, log=out.log, **work)
    if args.copy_to:
        from jaxlm.corpus.upload import copy_to

        count = copy_to(folder, list(outcome.report["files"]), args.copy_to)
        out.log(f"{count:,} files copied to {args.copy_to}" if count else "the copy is complete")
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
            f"{outcome.bytes / 1e6:,.1f} MB of files in {outcome.seconds:,.1f} s; "
            f"core seconds: {core:.1f} ({parts})"
        )
    lines.append(f"report: {args.out}/report.html")
    answer = {name: value for name, value in outcome.report.items() if name != "files"}
    if shards:
        lines += _described(shards, f"{args.out}/{after.SHARDS}")
        answer[after.SHARDS] = shards
    else:
        data = {"data.train": f"{args.out}/kept/*.jsonl", "data.validation": "5%"}
        lines.append(train_next(args.out, data))
    out.result({"out": args.out, **answer, "speed": speed}, "\n".join(lines))
    return 0


def mix(args: Any, out: Output) -> int:
    """Write token shards of cleaned corpora."""
    from jaxlm.corpus.mix.config import Mix
    from jaxlm.corpus.mix.run import run as mix_sources

    at_least_one("jaxlm data mix", args, "workers")
    sources = config.load(Mix, args.config, args.overrides).value
    with progress_bars(out) as progress:
        work = selection(args, "workers", "engine")
        answer = mix_sources(sources, Path(args.out), log=out.log, progress=progress, **work)
    out.result({"out": args.out, **answer}, "\n".join(_described(answer, args.out)))
    return 0


def clusters(args: Any, out: Output) -> int:
    """Show clusters of duplicates with the beginnings of their texts."""
    from jaxlm.corpus import comparison as duplicates

    at_least_one("jaxlm data clusters", args, "most", "characters")
    folder = Path(args.folder)
    every = duplicates.clusters(folder, args.kind)
    shown = duplicates.with_texts(folder, every[: args.most])
    documents = sum(len(cluster["removed"]) for cluster in every)
    lines = [f"{len(every):,} clusters, {documents:,} documents removed as duplicates"]
    for number, cluster in enumerate(shown, 1):
        lines.append(f"--- {number}: {cluster['kind']}, {len(cluster['removed'])} removed")
        rows = [("kept", cluster["kept"]), *(("gone", row) for row in cluster["removed"])]
        for fate, row in rows:
            row["text"] = row["text"][: args.characters]
            near = f", agreement {row['agreement']:g}" if "agreement" in row else ""
            text = " ".join(printable(row["text"]).split())
            lines.append(f"{fate}  {printable(row['file'])}, record {row['record']}{near}: {text}")
    answer = {"clusters": len(every), "removed": documents, "shown": shown}
    out.result(answer, "\n".join(lines))
    return 0


def _described(answer: dict[str, Any], folder: str) -> list[str]:
    """Return the table of a mix's sets, the path of its card, and the command to train on it."""
    rows = [("set", "source", "documents", "tokens", "share")]
    rows += [
        (side, name, f"{each['documents']:,}", f"{each['tokens']:,}", f"{each['share']:.1%}")
        for side, sets in answer["sets"].items()
        for name, each in sets.items()
    ]
    lines = columns(rows, "<<")
    tokenizer = answer["tokenizer"]
    lines.append(f"tokenizer   {tokenizer['size']:,} ids, sha256 {tokenizer['sha256'][:12]}")
    lines.append(f"data card   {folder}/CARD.md")
    train = [f"{folder}/train/{name}" for name in answer["sets"]["train"]]
    validation = answer["sets"].get("validation", {})
    data = {
        "data.train": ",".join(train),
        "data.validation": ",".join(f"{name}={folder}/validation/{name}" for name in validation),
        "data.tokenizer": f"{train[0]}/tokenizer",
    }
    lines.append(train_next(folder, data))
    return lines
