"""Rate texts of two runs on a local page that hides which run wrote which.

jaxlm rate A B --prompts=FILE         A and B are RUN[@STEP]; serves a page on this machine
jaxlm rate --report [FILE ...]        win rates, strengths and agreement of files of ratings

--workdir=A may name the first run. Both continue each prompt with the same seed. Each choice is a
line of the file --out, and the same command continues with the pairs that a rater has not rated. In
a line, chosen and rejected are the texts by preference.
"""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser, add_flag
from jaxlm.cli.generate import read_settings
from jaxlm.cli.output import Output, columns
from jaxlm.core.errors import CommandError, DataError

TWO = 2


def add_arguments(parser: Parser) -> None:
    parser.withhold("runs write with the configs that they were saved with")
    parser.add_argument(
        "runs", nargs="*", metavar="RUN[@STEP]", help="two runs; with --report: files"
    )
    doc = "prompts: JSON lines with prompt (.jsonl), else a prompt on each line"
    add_flag(parser, "--prompts", "FILE", str, doc)
    add_flag(parser, "--out", "FILE", "ratings.jsonl", "ratings, which are appended")
    add_flag(parser, "--max_tokens", "N", 100, "largest number of new tokens", least=1)
    add_flag(parser, "--temperature", "X", 0.8, "sampling temperature; 0 is greedy")
    add_flag(parser, "--seed", "N", 0, "random seed of texts and of the order of sides")
    add_flag(parser, "--port", "N", 0, "port of the page; 0 takes a free one")
    parser.add_switch("--chat", "treat prompts as user turns of the run's template")
    parser.add_switch("--report", "print results of ratings, and serve no page")


def run(args: Any, out: Output) -> int:
    if args.report:
        return _report([Path(each) for each in args.runs or [args.out]], out)
    runs = [*filter(None, [args.workdir]), *args.runs]
    if len(runs) != TWO or not args.prompts:
        raise CommandError(
            "ratings need two runs and a file of prompts",
            where=" ".join(["jaxlm", *args.words]),
            why=f"{len(runs)} runs and {'a' if args.prompts else 'no'} file are named",
            fix="jaxlm runs    # lists the runs\njaxlm rate --help",
        )

    from jaxlm.recipes.rate import texts
    from jaxlm.recipes.rate.server import RatingServer, Session

    target = Path(args.out)
    prompts = texts.read_prompts(Path(args.prompts))
    settings = read_settings(args, {"prompts": prompts, "seed": [args.seed]}, "jaxlm rate --help")
    earlier = texts.read_ratings(target) if target.exists() else []
    with contextlib.closing(texts.open_ratings(target)) as file, RatingServer(args.port) as server:
        names, pairs = texts.write_texts(runs, settings, is_chat=args.chat, say=out.log)
        server.session = Session(names, pairs, file, earlier, args.seed)
        if equal := len(pairs) - len(server.session.pairs):
            out.log(f"{equal} of {len(pairs)} prompts have equal texts and are not shown")
        if equal == len(pairs):
            raise DataError(
                "there are no texts to choose from",
                where=" and ".join(names),
                why=f"the texts of both are equal for all {equal} prompts",
                fix="jaxlm runs    # lists the runs",
            )
        out.log(f"open {server.address}\nCtrl-C ends; choices are appended to {target}")
        with _until_interrupted():
            server.serve_forever()
    return _report([target], out)


@contextlib.contextmanager
def _until_interrupted() -> Iterator[None]:
    """End the block at SIGINT or SIGTERM."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(files: list[Path], out: Output) -> int:
    """Print the results of files of ratings."""
    from jaxlm.evals import ratings
    from jaxlm.recipes.rate import texts

    known = [each for file in files for each in texts.read_ratings(file)]
    summary = ratings.summarize(known)
    head = ("B against A", "B", "ties", "A", "skipped", "prompts", "raters", "win rate of B")
    rows: list[tuple[str, ...]] = [head]
    for each in summary.pairs:
        counts = (each.wins_b, each.ties, each.wins_a, each.skips, each.prompts, each.raters)
        shown = (f"{each.run_b} / {each.run_a}", *map(str, counts), interval(each.win_rate))
        rows.append(shown)
    lines = columns(rows, "<") if summary.pairs else ["no ratings"]
    if len(summary.strengths) > TWO:
        strengths = [(run, interval(each)) for run, each in summary.strengths.items()]
        lines += ["", *columns([("run", "strength (log-odds)"), *strengths], "<")]
    if summary.left_share:
        lines.append(f"left side: {interval(summary.left_share)} of choices; 0.5 has no bias")
    if summary.agreement is not None:
        alpha = "-" if summary.alpha is None else f"{summary.alpha:.3f}"
        lines.append(
            f"agreement: {summary.agreement:.3f} of choices of two raters, Krippendorff's alpha "
            f"{alpha}, on {summary.rated_twice} prompts"
        )
    return out.result(summary.record(), lines)


def interval(value: Any) -> str:
    """Return an estimate as text: mean and 95% interval."""
    if value.low is None:
        return f"{value.mean:.3f}"
    return f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"
