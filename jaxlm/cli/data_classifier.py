"""`jaxlm data train-classifier`: a classifier of text from sets of examples."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import withhold
from jaxlm.cli.output import Output
from jaxlm.core.errors import CommandError

WHERE = "jaxlm data train-classifier"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it learns from, and where it goes."""
    withhold(parser, "--config", "--config.a.b", why="its flags are all its settings")
    parser.add_argument(
        "--examples",
        action="append",
        default=[],
        metavar="LABEL=GLOB",
        help="files of any kind that `data run` reads; again for another label, or more of one",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--text_key", default="text", help="field that holds the text (text)")
    parser.add_argument(
        "--held_out", type=_share, default=0.1, help="share that it is measured on (10%%)"
    )
    parser.add_argument("--epochs", type=int, default=5, help="times over the examples (5)")
    parser.add_argument("--run", type=int, default=2, help="words of the longest run (2)")
    parser.add_argument(
        "--buckets", type=int, default=2**18, help="that runs are hashed into (262144)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of examples (0)")


def run(args: Any, out: Output) -> int:
    """Trains it, and shows how well it tells held-out texts apart."""
    for name in ("epochs", "run", "buckets"):
        if getattr(args, name) < 1:
            raise CommandError(
                f"--{name}={getattr(args, name)} does nothing",
                where=WHERE,
                why="it is at least 1",
                fix=f"{WHERE} --help",
            )
    examples = _examples(args.examples)

    from jaxlm.corpus.filters.linear import Features
    from jaxlm.recipes.train_classifier import Options, train

    options = Options(
        examples=examples,
        out=Path(args.out),
        text_key=args.text_key,
        held_out=args.held_out,
        epochs=args.epochs,
        seed=args.seed,
        features=Features(buckets=args.buckets, run=args.run),
    )
    answer = train(options, out.say)
    out.result({"out": args.out, **answer}, _table(args.out, answer))
    return 0


def _table(folder: str, answer: dict[str, Any]) -> str:
    columns = ("examples", "held out", "precision", "recall")
    lines = [f"{'label':<20}" + "".join(f"{column:>12}" for column in columns)]
    for label, figures in answer["labels"].items():
        counts = "".join(f"{answer[name][label]:>12,}" for name in ("examples", "held_out"))
        shown = "".join(_percent(figures[name]) for name in ("precision", "recall"))
        lines.append(f"{label:<20}{counts}{shown}")
    first, figures = next(iter(answer["labels"].items()))
    for threshold, pair in figures["thresholds"].items():
        shown = "".join(_percent(pair[name]) for name in ("precision", "recall"))
        lines.append(f"{first + ' from ' + threshold:<44}{shown}")
    lines += [f"{count:,} {what}" for what, count in answer["left_out"].items()]
    lines.append(f"of the texts held out {answer['accuracy']:.2%} get their label")
    lines.append(
        f"next: --config.stages=normalise,length,quality --config.quality.model={shlex.quote(str(folder))} --config.quality.label={shlex.quote(first)}    # of jaxlm data run"
    )
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return f"{'-' if share is None else f'{share:.2%}':>12}"


def _examples(given: list[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for each in given:
        label, equals, pattern = each.partition("=")
        if not equals or not label or not pattern:
            raise CommandError(
                f"--examples={each} names no label",
                where=WHERE,
                why="it is LABEL=GLOB",
                fix=f"{WHERE} --help",
            )
        found[label] = (*found.get(label, ()), pattern)
    if len(found) < 2:
        raise CommandError(
            f"{len(found)} labels are not told apart",
            where=WHERE,
            why="a classifier needs examples of at least two",
            fix=f"{WHERE} --help",
        )
    return found


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 0.5:
        raise CommandError(
            f"--held_out={text} is no share",
            where=WHERE,
            why="it is above 0% and at most 50%",
            fix=f"{WHERE} --help",
        )
    return share
