"""Tries a config, made small, on fake devices: does its mesh compute what one device would, and send only what it must.

The answer is no, with exit code 1, where a loss or a gradient's norm differs by more than 1e-5, where a matrix of parameters is
whole on every device along an axis that should split it, where a device holds the logits of a whole vocabulary that the mesh
splits, or where activations, logits or parameters are sent that should stay where they are; each with its source line.
"""

import argparse
from typing import Any

from jaxlm.cli.arguments import needed_config
from jaxlm.cli.output import Output
from jaxlm.core import config
from jaxlm.monitor import formatting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps to compare (3)")
    parser.add_argument(
        "--devices",
        type=int,
        default=8,
        metavar="N",
        help="fake devices at most (8), unless two along each axis of the mesh are more",
    )
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help="instead compile the config as it is for a TPU slice such as v5e-16, without one; needs the extra `tpu`",
    )


def run(args: argparse.Namespace, out: Output) -> int:
    from jaxlm.recipes.config import Run

    loaded = config.load(Run, needed_config(args, Run), args.overrides)

    if args.topology:
        from jaxlm.recipes.diagnose.topology import compile_for

        answer = compile_for(loaded.value, args.topology, out.say)
        out.result(answer, _memory(answer))
        return 0 if answer["fits"] else 1

    from jaxlm.recipes.diagnose.check import CheckOptions, check

    answer = check(loaded.value, CheckOptions(steps=args.steps, devices=args.devices), out.say)
    out.result(answer, _text(answer))
    return 0 if answer["ok"] else 1


def _text(answer: dict[str, Any]) -> str:
    changes = [f"{path} {old} -> {new}" for path, (old, new) in answer["changes"].items()]
    lines = ["made small: " + ", ".join(changes)]
    verdict = "equal" if answer["is_equal"] else "NOT EQUAL"
    lines += [
        f"losses and gradient norms of {len(answer['losses'])} steps: {verdict}, "
        f"deviation {answer['deviation']:.1e} of {answer['tolerance']:.0e}",
        f"first gradient, leaf by leaf: deviation {answer['gradients'][answer['worst_gradient']]:.1e} of "
        f"{answer['gradient_tolerance']:.0e} at most, in {answer['worst_gradient']}",
        f"  {'step':<6}{'loss':>12}{'alone':>12}{'gradient':>12}{'alone':>12}",
    ]
    names = ("losses", "losses_alone", "grad_norms", "grad_norms_alone")
    for step, row in enumerate(zip(*(answer[name] for name in names), strict=True), 1):
        lines.append(f"  {step:<6}" + "".join(f"{value:>12.7g}" for value in row))
    for each in answer["replicated"]:
        lines.append(
            f"WHOLE ON EVERY DEVICE along {' and '.join(each['axes'])}: {each['path']}, "
            f"{formatting.number(each['parameters'])} parameters, {each['share']:.2%} of the model"
        )
    if not answer["replicated"]:
        lines.append("no matrix of parameters is whole on every device by accident")
    lines += [f"LOGITS OF THE WHOLE VOCABULARY: {each}" for each in answer["whole_logits"]]
    lines.append("collectives of one step (XLA for CPU writes a reduce-scatter as an all-reduce)")
    lines.extend(_collectives(answer))
    for each in answer["unexpected"]:
        lines.append(
            f"UNEXPECTED: {each['source']}: {each['kind']} over {','.join(each['axes'])} of "
            f"{each['largest']}: {each['why_unexpected']}"
        )
    lines.append("ok" if answer["ok"] else "the answer is no")
    return "\n".join(lines)


def _collectives(answer: dict[str, Any]) -> list[str]:
    """A table of what is sent; the count of a loop that cannot be told is a question mark."""
    rows = [("kind", "axes", "of", "count", "sent", "largest, from")]
    rows += [
        (
            each["kind"],
            ",".join(each["axes"]),
            each["content"],
            "?" if each["count"] is None else str(each["count"]),
            formatting.size(each["sent_bytes"]),
            f"{each['largest']} {each['source']}",
        )
        for each in answer["collectives"]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = "<<<>>"
    return [
        "  "
        + "  ".join(f"{row[i]:{to}{widths[i]}}" for i, to in enumerate(aligned))
        + f"  {row[-1]}"
        for row in rows
    ]


def _memory(answer: dict[str, Any]) -> str:
    held = answer["bytes_per_device"]
    parts = ", ".join(f"{name} {formatting.size(held[name])}" for name in held if name != "total")
    verdict = "fits" if answer["fits"] else "DOES NOT FIT"
    return "\n".join(
        [
            f"a step on {answer['devices']} chips, {answer['topology']}: {formatting.size(held['total'])} a chip ({parts}), "
            f"{verdict} {formatting.size(answer['hbm_bytes'])}",
            *_collectives(answer),
        ]
    )
