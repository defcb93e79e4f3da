"""Evaluate a run: loss, perplexity, bits per byte, accuracy, calibration; on any text with --text.

Loss and perplexity are means over all targets, ends of documents included. bits/byte is their nll
divided by the bytes of the text (bits_per_byte); "without ends" excludes the nll of targets without
bytes (bits_per_byte_text), as lm-evaluation-harness and nanochat do.

With --verify the last answer of each conversation is generated and compared: exact compares texts
without white space around them, number the number after #### or else the last one.
"""

from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import ADAPTER, Parser, add_flag, at_least_one, needed_run, selection
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
VERIFYING = ("samples", "prompts", "max_tokens", "seed")  # flags that need --verify


def add_arguments(parser: Parser) -> None:
    add_flag(parser, "--text", "GLOB", [], "files to evaluate (validation sets of the run)")
    add_flag(parser, "--sequence", "T", int, "tokens per row (that of the run)")
    add_flag(parser, "--batch", "ROWS", int, "rows per step; does not change the totals")
    doc = "generate the last answer of each conversation, and compare texts or last numbers"
    add_flag(parser, "--verify", ["exact", "number"], str, doc)
    add_flag(parser, "--samples", "N", int, "answers per prompt at temperature 1, besides greedy")
    add_flag(parser, "--prompts", "N", int, "conversations of each set to verify (all)")
    add_flag(parser, "--max_tokens", "N", int, "largest number of tokens of an answer (256)")
    add_flag(parser, "--seed", "N", int, "random seed of the samples (0)")
    parser.add_run_selection()
    add_flag(parser, *ADAPTER)


def run(args: Any, out: Output) -> int:
    workdir = Path(needed_run(args))

    drawn = {
        name: value for name, value in selection(args, *VERIFYING).items() if value is not None
    }
    at_least_one("jaxlm eval", args, *(name for name in drawn if name != "seed"))
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
    rows = [("set", "tokens", *COLUMNS)]
    for name, figures in answer["sets"].items():
        values = [figures[key] for key in COLUMNS.values()]
        shown = ["-" if value is None else f"{value:.4f}" for value in values]
        rows.append((name, str(figures["tokens"]), *shown))
    head = f"step {answer['step']}, rows of {answer['sequence']} tokens"
    return out.result(answer, [head, *columns(rows), *_verified(answer["sets"])])


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
