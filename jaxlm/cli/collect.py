"""Draw answers of a run to prompts, score them, and keep the best ones or pairs to train on.

jaxlm collect --workdir=runs/a --prompts=p.jsonl --judge=number --out=best    the best of 8 answers
jaxlm collect --workdir=runs/a --prompts=p.txt --judge=judge:runs/b --keep=pairs --out=pairs

The judge is a reward (exact, number, choice, json, regex:PATTERN, format:TAGS, length:TOKENS, ended
or FILE.py:FUNCTION), a reward model (reward:RUN), a run that is asked if the answer is good
(judge:RUN: the score is log p(Yes) - log p(No)), or a run that is shown every two answers of a
prompt in both orders (compare:RUN: the mean log p(A) - log p(B)). A line of the prompts has prompt,
text or messages, and the answer that some rewards need. The folder has samples.jsonl, from which
the same command resumes, and kept.jsonl.

With --truth a second judge scores the samples, and a table and a page show the truth of the best of
n answers by --judge, for n up to --samples: a judge that is over-optimized chooses worse answers
from more.

With --critique a run criticizes each of its answers by a principle that is drawn, and revises it.
Then pairs are a revision and its draft, without a judge; a judge scores both.

With --ask two answers are shown to a person, whose choices are saved in ratings.jsonl at each key.
"""

import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser, add_flag, check_seed, needed_run, selection
from jaxlm.cli.output import Output, columns
from jaxlm.core.errors import CommandError

RATINGS = "ratings.jsonl"
KINDS = {"best": "completion", "pairs": "pairs"}  # of the data that is kept


def add_arguments(parser: Parser) -> None:
    doc = (
        "files of prompts: JSON lines with prompt (.jsonl), else a prompt on each line; repeatable"
    )
    add_flag(parser, "--prompts", "GLOB", [], doc)
    doc = "number, FILE.py:FUNCTION or another reward, reward:RUN, judge:RUN or compare:RUN"
    add_flag(parser, "--judge", "JUDGE", str, doc)
    doc = "a second judge, of what is true: how far the best of n by --judge can be trusted"
    add_flag(parser, "--truth", "JUDGE", str, doc)
    add_flag(parser, "--samples", "N", 8, "answers to each prompt", least=1)
    doc = "the best answer of each prompt, pairs of answers, or all samples"
    add_flag(parser, "--keep", ["best", "pairs", "all"], "best", doc)
    doc = "of each prompt the best and the worst answer, or all pairs of different scores"
    add_flag(parser, "--pairs", ["best", "all"], "best", doc)
    add_flag(parser, "--out", "DIR", str, "folder of the samples", required=True)
    add_flag(parser, "--max_tokens", "N", 256, "largest number of new tokens", least=1)
    add_flag(parser, "--temperature", "X", 1.0, "sampling temperature")
    add_flag(parser, "--seed", "N", 0, "random seed of the samples")
    add_flag(parser, "--slots", "N", 16, "answers that are drawn at a time", least=1)
    doc = "file with a principle a line: each answer is criticized by one and revised"
    add_flag(parser, "--critique", "FILE", str, doc)
    add_flag(parser, "--rounds", "N", 1, "critiques of each answer", least=1)
    parser.add_switch("--chat", "treat prompts as user turns of the run's template")
    parser.add_switch(
        "--ask", "ask in this terminal which of two answers is better, without a judge"
    )
    add_flag(parser, "--rater", "NAME", "me", "name of the rater")
    parser.add_run_selection()


def run(args: Any, out: Output) -> int:
    workdir = Path(needed_run(args))
    check_seed("jaxlm collect", args.seed)
    if not args.prompts or not (args.judge or args.ask or args.critique):
        missing = "judge" if args.prompts else "prompts"
        raise CommandError(
            f"a collection needs --{missing}",
            where=" ".join(["jaxlm", *args.words]),
            why="answers are drawn to prompts, and a judge scores them",
            fix="--judge=ended    # 1 for an answer that ends by itself"
            if args.prompts
            else "--prompts=prompts.jsonl",
        )

    from jaxlm.evals.best_of_n import BestOfN
    from jaxlm.recipes.collect import over_optimization
    from jaxlm.recipes.collect.run import KEPT, REPORT, CollectSettings, collect

    if args.truth and (args.critique or args.ask):
        raise CommandError(
            "no judge chooses the best of n answers whose truth is scored",
            where=f"--truth={args.truth}",
            why=f"with --{'ask' if args.ask else 'critique'} there are two answers to a prompt",
            fix="leave out --truth",
        )
    settings = CollectSettings(
        prompts=tuple(args.prompts),
        judge="" if args.ask else args.judge or "",
        truth=args.truth or "",
        samples=(1 if args.critique else 2) if args.ask else args.samples,
        keep=args.keep,
        pairs=args.pairs,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        is_chat=args.chat,
        slots=args.slots,
        critique=args.critique or "",
        rounds=args.rounds,
    )
    if args.ask:
        return _ask(workdir, args, settings, out)
    answer = collect(workdir, Path(args.out), settings, say=out.log, **selection(args))
    target = Path(args.out) / KEPT
    scored = ""
    if answer["mean_score"] is not None:
        scored = f", mean score {answer['mean_score']:.4f}, {answer['unscored']} without a score"
    lines = [
        f"{answer['samples']} samples of {answer['prompts']} prompts{scored}",
        f"kept: {answer['kept']} ({answer['keep']}) in {target}",
    ]
    if answer["best_of_n"]:
        best = [BestOfN(**each) for each in answer["best_of_n"]]
        cells = [over_optimization.COLUMNS, *over_optimization.rows(best)]
        lines += columns(cells)
        lines += filter(None, [over_optimization.warning(best)])
        lines.append(f"page  {Path(args.out) / REPORT}")
    if answer["left_out"]:
        reasons = (f"{number} {reason}" for reason, number in answer["left_out"].items())
        lines.append(f"left out: {', '.join(reasons)}")
    if args.keep in KINDS and answer["kept"]:
        kind, name = KINDS[args.keep], "finetune/sft" if args.keep == "best" else "preference/dpo"
        words = [
            *("jaxlm", "train", f"--config={name}", f"--init_from={workdir}"),
            *(f"--config.data.kind={kind}", f"--config.data.train={target}"),
            f"--workdir={workdir}-{args.keep}",
        ]
        lines.append(f"next  {shlex.join(words)}")
    return out.result(answer, lines)


def _ask(workdir: Path, args: Any, settings: Any, out: Output) -> int:
    """Draw two answers to each prompt, and ask a person which one is better."""
    from jaxlm.recipes.collect import ask
    from jaxlm.recipes.collect.run import collect, pairs_to_ask

    target = Path(args.out)
    with ask.keys() as read_key:
        answer = collect(workdir, target, settings, say=out.log, **selection(args))
        file, name = target / RATINGS, f"{workdir}@{answer['step']}"
        pairs = pairs_to_ask(target)
        rated = ask.ask(pairs, name, file, args.rater, read_key=read_key, say=out.log)
    lines = [
        f"{rated} ratings in {file}",
        f"next  {shlex.join(['jaxlm', 'rate', '--report', str(file)])}",
    ]
    return out.result({"out": str(target), "rated": rated}, lines)
