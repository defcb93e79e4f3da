"""Find a learning rate by a range test: the rate grows at every step until the loss grows too.

jaxlm lr-find --config=my_config.py
jaxlm lr-find --config=finetune/lora --init_from=runs/a --config.data.train=chat.jsonl

The suggestion is a third of the rate with the lowest smoothed loss, as flags to paste. The curve is
written to --out as lr-find.json and lr-find.png; no run directory is written. For fine-tuning,
--init_from names the model as in `jaxlm train`; without it the test begins at random weights.
Muon's two rates grow together: the printed rate is optim.lr, and the ratio of optim.adam_lr to it
stays. Exit code 1 if the loss falls at no rate of the range.
"""

from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import CPU_DEVICES, Parser, add_flag, needed_config, selection
from jaxlm.cli.init_from import add_init_from, with_init_from
from jaxlm.cli.output import Output
from jaxlm.core import config

SHOWN = 12  # printed rows of the curve; --json has all


def add_arguments(parser: Parser) -> None:
    add_flag(parser, "--low", "RATE", 1e-6, "rate of the first step")
    add_flag(parser, "--high", "RATE", 1.0, "rate of the last step")
    add_flag(parser, "--steps", "N", 100, "number of steps from --low to --high")
    add_flag(parser, "--out", "DIR", "lr-find", "folder of the curve and its plot")
    add_init_from(parser, "weights are")
    add_flag(parser, *CPU_DEVICES)


def run(args: Any, out: Output) -> int:
    from jaxlm.recipes.config import Run

    loaded = config.load(Run, needed_config(args, Run), args.overrides)
    loaded = with_init_from(loaded, args, out)

    from jaxlm.recipes.diagnose.lr_find import LrFindOptions, lr_find

    flags = selection(args, "low", "high", "steps", "init_from", "cpu_devices")
    answer = lr_find(loaded, LrFindOptions(out=Path(args.out), **flags), out.log)
    return out.result(answer, _text(answer), 0 if answer["flags"] else 1)


def _text(answer: dict[str, Any]) -> list[str]:
    curve = answer["curve"]
    every = -(-len(curve) // SHOWN)
    best = min(range(len(curve)), key=lambda number: curve[number]["smoothed"])
    lines = [f"  {'rate':>9}{'loss':>10}{'smoothed':>10}"]
    for number in sorted({*range(0, len(curve), every), len(curve) - 1, best}):
        point, lowest = curve[number], "  lowest" if number == best else ""
        losses = f"{point['loss_nats']:>10.4f}{point['smoothed']:>10.4f}"
        lines.append(f"  {point['rate']:>9.2e}{losses}{lowest}")
    return [
        *lines,
        f"{len(curve)} steps of {answer['optimizer']}: {answer['ended']}",
        f"plot      {answer['plot']}",
        f"rule      {answer['rule']}",
        f"suggested {' '.join(answer['flags']) or 'none: the loss falls at no rate of the range'}",
    ]
