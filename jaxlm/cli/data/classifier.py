"""`jaxlm data train-classifier`: train a text classifier on labeled examples."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import add_flag, at_least_one, read_share, selection, withhold
from jaxlm.cli.output import Output, columns
from jaxlm.core.errors import CommandError

WHERE = "jaxlm data train-classifier"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `data train-classifier`."""
    withhold(parser, "the flags of train-classifier are all its settings")
    doc = "files of a label, of any kind that `data run` reads; repeatable"
    add_flag(parser, "--examples", "LABEL=GLOB", [], doc)
    add_flag(parser, "--out", "DIR", str, "new folder", required=True)
    add_flag(parser, "--text_key", "NAME", "text", "field that contains the text")
    add_flag(parser, "--held_out", "SHARE", "10%", "share of examples for evaluation")
    add_flag(parser, "--epochs", "N", 5, "passes over the examples")
    add_flag(parser, "--run", "N", 2, "words of the longest n-gram")
    add_flag(parser, "--buckets", "N", 2**18, "hash buckets of the n-grams")
    add_flag(parser, "--seed", "N", 0, "seed of the order of examples")


def run(args: Any, out: Output) -> int:
    """Train the classifier, and show its precision and recall on held-out examples."""
    at_least_one(WHERE, args, "epochs", "run", "buckets")
    held_out = read_share(args.held_out, 0.5, "--held_out", WHERE)
    examples = _examples(args.examples)

    from jaxlm.corpus.filters.linear import Features
    from jaxlm.recipes.train_classifier import Options, train

    features = Features(buckets=args.buckets, run=args.run)
    flags = selection(args, "text_key", "epochs", "seed") | {"held_out": held_out}
    options = Options(examples=examples, out=Path(args.out), features=features, **flags)
    answer = train(options, out.log)
    out.result({"out": args.out, **answer}, _table(args.out, answer))
    return 0


def _table(folder: str, answer: dict[str, Any]) -> str:
    rows = [("label", "examples", "held out", "precision", "recall")]
    for label, figures in answer["labels"].items():
        counts = [f"{answer[name][label]:,}" for name in ("examples", "held_out")]
        rows.append((label, *counts, *_percents(figures)))
    first, figures = next(iter(answer["labels"].items()))
    thresholds = figures["thresholds"].items()
    rows += [(f"{first} from {share}", "", "", *_percents(pair)) for share, pair in thresholds]
    lines = columns(rows, "<")
    lines += [f"{count:,} {what}" for what, count in answer["left_out"].items()]
    lines.append(f"accuracy on held-out examples: {answer['accuracy']:.2%}")
    lines.append(
        "next: --config.stages=normalise,length,quality "
        f"--config.quality.model={shlex.quote(str(folder))} "
        f"--config.quality.label={shlex.quote(first)}    # of jaxlm data run"
    )
    return "\n".join(lines)


def _percents(figures: dict[str, float | None]) -> tuple[str, str]:
    shares = (figures["precision"], figures["recall"])
    precision, recall = ("-" if share is None else f"{share:.2%}" for share in shares)
    return precision, recall


def _examples(flags: list[str]) -> dict[str, tuple[str, ...]]:
    examples: dict[str, tuple[str, ...]] = {}
    for each in flags:
        label, _, pattern = each.partition("=")
        if not label or not pattern:
            raise CommandError(
                f"--examples={each} names no label",
                where=WHERE,
                why="the form of --examples is LABEL=GLOB",
                fix=f"{WHERE} --help",
            )
        examples[label] = (*examples.get(label, ()), pattern)
    if len(examples) < 2:
        raise CommandError(
            f"a classifier needs two labels, and there are {len(examples)}",
            where=WHERE,
            why="each label needs an --examples=LABEL=GLOB",
            fix=f"{WHERE} --help",
        )
    return examples
