"""Evaluate a run: loss, perplexity, bits per byte, accuracy, calibration; on any text with --text.

jaxlm eval --workdir=runs/a                                           the validation sets of the run
jaxlm eval --workdir=runs/a --text='new/*.txt'                        other text
jaxlm eval --workdir=runs/a --tasks=arc.toml,math.toml --limit=200    tasks

Loss and perplexity are means over all targets, ends of documents included. bits/byte is their nll
divided by the bytes of the text (bits_per_byte); "without ends" excludes the nll of targets without
bytes (bits_per_byte_text), as lm-evaluation-harness and nanochat do.

With --tasks the items of task files are scored, see `jaxlm docs evaluation`: samples and results
are in the folder evals of the run, and the same command resumes. Intervals are at 95%.
--against_training searches the documents that the run trained on for the items.

With --verify the last answer of each conversation is generated and compared: exact compares texts
without white space around them, number the number after #### or else the last one.
With --against=RUN2 --judge=JUDGE both runs answer the prompts of --text, and the judge scores each
answer; see `jaxlm collect`.
"""

import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import (
    ADAPTER,
    Parser,
    add_flag,
    check_seed,
    needed_run,
    selection,
    without_flag,
)
from jaxlm.cli.output import Output, columns
from jaxlm.core.errors import CommandError

COLUMNS = {
    "nats": "loss_nats",
    "perplexity": "perplexity",
    "bits/byte": "bits_per_byte",
    "without ends": "bits_per_byte_text",
    "accuracy": "token_accuracy",
    "calibration error": "calibration_error",
}
REWARDED = {
    "reward": "reward",
    "pass@1": "pass_1",
    "greedy reward": "greedy_reward",
    "greedy pass": "greedy_pass",
    "ended": "ended_share",
}
COMPARED = {"preferred": "preference_accuracy", "margin": "margin", "chosen nats": "chosen_nats"}
VERIFYING = ("samples", "prompts", "max_tokens", "seed")  # flags that need --verify
TASK_FLAGS = ("shots", "form", "limit", "too_long")  # flags that need --tasks


def add_arguments(parser: Parser) -> None:
    add_flag(parser, "--text", "GLOB", [], "files to evaluate (validation sets of the run)")
    add_flag(parser, "--sequence", "T", int, "tokens per row (that of the run)", least=1)
    add_flag(parser, "--batch", "ROWS", int, "rows per step; does not change the totals", least=1)
    doc = "generate the last answer of each conversation, and compare texts or last numbers"
    add_flag(parser, "--verify", ["exact", "number"], str, doc)
    add_flag(
        parser,
        "--samples",
        "N",
        int,
        "answers per prompt at temperature 1, besides greedy",
        least=1,
    )
    add_flag(parser, "--prompts", "N", int, "conversations of each set to verify (all)", least=1)
    add_flag(
        parser, "--max_tokens", "N", int, "largest number of tokens of an answer (256)", least=1
    )
    add_flag(parser, "--seed", "N", int, "random seed of the samples, or of examples (0)")
    add_flag(parser, "--tasks", "FILE,...", str, "task files to score instead of validation sets")
    add_flag(parser, "--shots", "N", int, "examples before each item of a task (0)", least=0)
    doc = "choices as text, or as letters after a list (cloze)"
    add_flag(parser, "--form", ["cloze", "letters"], str, doc)
    add_flag(
        parser,
        "--limit",
        "N",
        int,
        "items of each task, drawn by a hash of their ids (all)",
        least=1,
    )
    parser.add_switch("--chat", "make each prompt of a task a user's turn by the run's template")
    doc = "refuse tasks with items longer than a row, or skip and count these items (refuse)"
    add_flag(parser, "--too_long", ["refuse", "skip"], str, doc)
    doc = "search the training data for items of tasks, and score contaminated items separately"
    parser.add_switch("--against_training", doc)
    parser.add_switch("--allow_code", "run the programs that the model writes for tasks with tests")
    doc = "run whose answers to the prompts of --text are compared with those of this run"
    add_flag(parser, "--against", "RUN[@STEP]", str, doc)
    doc = "judge of --against: a reward, FILE.py:FUNCTION, reward:RUN, judge:RUN or compare:RUN"
    add_flag(parser, "--judge", "JUDGE", str, doc)
    parser.add_run_selection()
    add_flag(parser, *ADAPTER)


def run(args: Any, out: Output) -> int:
    workdir = Path(needed_run(args))
    task_flags = _named(args, *TASK_FLAGS) | ({"chat": True} if args.chat else {})
    if args.against or args.judge:
        return _run_against(workdir, args, out)
    if args.tasks:
        return _run_tasks(workdir, args, out)
    switches = [name for name in ("against_training", "allow_code") if getattr(args, name)]
    if task_flags or switches:
        name = next(iter([*task_flags, *switches]))
        raise CommandError(
            f"--{name} needs --tasks",
            where=shlex.join(["jaxlm", *args.words]),
            why="it is a setting of tasks",
            fix="find . -name '*.toml'    # task files, for --tasks",
        )
    drawn = _named(args, *VERIFYING)
    check_seed("jaxlm eval", args.seed)
    if drawn and args.verify is None:
        name, value = next(iter(drawn.items()))
        raise CommandError(
            f"--{name} needs --verify",
            where=f"jaxlm eval --{name}={value}",
            why="answers are generated only to be compared",
            fix="--verify=exact\n--verify=number",
        )

    from jaxlm.recipes.use.evaluate import evaluate
    from jaxlm.recipes.use.verify import VerifySettings

    flags = selection(args) | selection(args, "text", "sequence", "batch", "adapter")
    verify = VerifySettings(check=args.verify, **drawn) if args.verify else None
    answer = evaluate(workdir, verify=verify, say=out.log, **flags)
    is_compared = any("preference_accuracy" in figures for figures in answer["sets"].values())
    is_rewarded = any("pass_1" in figures for figures in answer["sets"].values())
    columns_shown = COLUMNS | COMPARED if is_compared else REWARDED if is_rewarded else COLUMNS
    unit = "prompts" if is_rewarded else "tokens"
    rows, lines = [("set", unit, *columns_shown)], list[str]()
    for name, figures in answer["sets"].items():
        values = [figures.get(key) for key in columns_shown.values()]
        shown = ["-" if value is None else f"{value:.4f}" for value in values]
        rows.append((name, str(figures[unit]), *shown))
        if figures.get("pairs"):
            name = f"{name}: {figures['preference_accuracy']:.1%} of {figures['pairs']} preferred"
            ends = (f"{figures[f'preference_accuracy_{each}']:.1%}" for each in ("low", "high"))
            lines.append(f"{name}, 95% interval {' to '.join(ends)}")
    head = f"step {answer['step']}, rows of {answer['sequence']} tokens"
    return out.result(answer, [head, *columns(rows), *lines, *_verified(answer["sets"])])


def _run_against(workdir: Path, args: Any, out: Output) -> int:
    """Print the win rate against another run with its 95% interval."""
    needed = {"against": "RUN", "judge": "ended", "text": "prompts.jsonl"}
    if missing := [name for name in needed if not getattr(args, name)]:
        raise CommandError(
            f"a win rate needs --{missing[0]}",
            where=shlex.join(["jaxlm", *args.words]),
            why="answers of two runs to prompts are scored by a judge",
            fix=" ".join(f"--{name}={needed[name]}" for name in missing),
        )

    from jaxlm.recipes.collect.run import CollectSettings
    from jaxlm.recipes.collect.win_rate import win_rate

    settings = CollectSettings(
        prompts=tuple(args.text),
        judge=args.judge,
        is_chat=args.chat,
        samples=args.samples or 1,
        **_named(args, "max_tokens", "seed"),
    )
    answer = win_rate(workdir, args.against, settings, say=out.log, **selection(args))
    rate = answer["win_rate"]
    ends = "" if rate["low"] is None else f", 95% interval {rate['low']:.1%} to {rate['high']:.1%}"
    lines = [
        f"{answer['run']} against {answer['against']}: {rate['mean']:.1%} of {answer['prompts']} "
        f"prompts{ends}",
        f"answers: {answer['wins']} wins, {answer['ties']} ties, {answer['losses']} losses, "
        f"{answer['unscored']} without a score",
    ]
    if answer["orders_agree"] is not None:
        lines.append(f"both orders prefer the same answer in {answer['orders_agree']:.1%}")
    return out.result(answer, lines)


def _named(args: Any, *names: str) -> dict[str, Any]:
    """Return the flags that have a value."""
    return {name: value for name, value in selection(args, *names).items() if value is not None}


def _run_tasks(workdir: Path, args: Any, out: Output) -> int:
    """Score tasks and print their metrics with 95% intervals."""
    if other := next(iter(_named(args, "verify", *VERIFYING[:-1])), "text" if args.text else None):
        raise CommandError(
            f"--{other} and --tasks exclude each other",
            where=f"jaxlm eval --{other} --tasks={args.tasks}",
            why="tasks have their own items",
            fix=shlex.join(["jaxlm", *without_flag(args.words, f"--{other}")]),
        )
    flags = _named(args, *TASK_FLAGS)

    from jaxlm.recipes.use import contamination
    from jaxlm.recipes.use.tasks import TaskSettings, evaluate_tasks

    switches = {"is_chat": args.chat, "allow_code": args.allow_code}
    settings = TaskSettings(**flags, **_named(args, "seed"), **switches)
    selected = selection(args) | selection(args, "sequence", "batch", "adapter")
    tasks = args.tasks.split(",")
    training = contamination.training_parts(workdir) if args.against_training else None
    answer = evaluate_tasks(workdir, tasks, settings, say=out.log, **selected)
    if training is not None:
        compared = contamination.check_tasks(training, tasks, answer["tasks"], out.log)
        answer["against_training"] = compared
    rows: list[tuple[str, ...]] = [
        ("task", "metric", "mean", "low", "high", "chance", "items", "groups")
    ]
    notes = []
    for name, result in answer["tasks"].items():
        rows += _task_rows(name, result)
        for subset, figures in result.get("subsets", {}).items():
            rows += _task_rows(f"  {subset}", figures)
        counts = {**result["left_out"], "with a token across the border": result["spans_border"]}
        notes += [f"{name}: {count} items {reason}" for reason, count in counts.items() if count]
        if (error := result.get("calibration_error")) is not None:
            notes.append(f"{name}: calibration error {error:.4f} of the likeliest choices")
        for metric, all_items in result.get("corpus", {}).items():
            interval = f"[{all_items['low']:.2f}, {all_items['high']:.2f}]"
            signature = all_items["signature"]
            notes.append(f"{name}: {metric} {all_items['score']:.2f} {interval}, {signature}")
        notes.append(f"{name}: {result['folder']}")
        if training is not None:
            more, lines = _against_training(name, compared[name])
            rows += more
            notes += lines
    return out.result(answer, [f"step {answer['step']}", *columns(rows), *notes])


def _against_training(
    name: str, compared: dict[str, Any]
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the rows of contaminated and other items, and notes on contaminated ones."""
    labels = {"touched": "  in training data", "untouched": "  not in it"}
    rows = [row for part, label in labels.items() for row in _task_rows(label, compared[part])]
    notes = [f"{name}: {compared['file']} names the documents of each item in the training data"]
    if compared["first"]:
        item, listed = compared["first"]
        notes.append(f"{name}: {item} is in {listed['documents']}: {'; '.join(listed['first'])}")
    if compared["too_short"]:
        notes.append(f"{name}: {compared['too_short']} items are too short to look for")
    return rows, notes


def _task_rows(name: str, result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a line for each metric; the name and the counts are in the first."""
    rows: list[tuple[str, ...]] = []
    for metric, figures in result["metrics"].items():
        values = [figures.get(key) for key in ("mean", "low", "high", "chance")]
        shown = ["-" if value is None else f"{value:.4f}" for value in values]
        counts = ("", "") if rows else (str(result["items"]), str(result["groups"]))
        rows.append(("" if rows else name, metric, *shown, *counts))
    return rows


def _verified(sets: dict[str, Any]) -> list[str]:
    """Return the lines about generated answers; none without them."""
    rows: list[tuple[str, ...]] = [
        ("set", "answers", "prompts", "exact match", "standard error", "ended", "marked")
    ]
    left_out = []
    for name, figures in sets.items():
        if (answers := figures.get("answers")) is None:
            continue
        for kind in ("greedy", "sampled"):
            if (score := answers[kind]) is None:
                continue
            drawn = f"{score['samples']} sampled" if kind == "sampled" else kind
            names = ("exact_match", "standard_error", "ended_share", "marked_share")
            shares = [score[name] for name in names]
            shown = ["-" if value is None else f"{value:.4f}" for value in shares]
            rows.append((name, drawn, str(answers["prompts"]), *shown))
        counts = [f"{number} {reason}" for reason, number in answers["left_out"].items()]
        left_out += [f"left out of {name}: {', '.join(counts)}"] if counts else []
    return ["", *columns(rows), *left_out] if len(rows) > 1 else []
