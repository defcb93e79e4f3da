"""Remove layers of a run: a smaller run to distil into, and the value of each layer.

jaxlm prune --workdir=runs/a --keep=harm:6 --out=runs/a-6    the 6 layers of most value
jaxlm prune --workdir=runs/a --keep=0,1,2,7 --out=runs/a-4

The harm of a layer is the rise of the validation loss without it. The new run has the kept layers
and all other weights unchanged: its loss is high until it is trained with `--init_from`, usually
with the original run as its teacher.
"""

from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser, add_flag, needed_run, selection
from jaxlm.cli.output import Output, columns


def add_arguments(parser: Parser) -> None:
    add_flag(parser, "--out", "DIR", str, "new run directory", required=True)
    doc = "layers from 0, as 0,2,4; even:N, N at even distances; harm:N, the N of most harm"
    add_flag(parser, "--keep", "LAYERS", str, doc, required=True)
    add_flag(parser, "--batches", "N", 16, "largest number of batches for each loss", least=1)
    doc = "glob of text for the losses (the validation set); repeatable"
    add_flag(parser, "--text", "GLOB", [], doc)
    parser.add_run_selection()


def run(args: Any, out: Output) -> int:
    workdir, target = Path(needed_run(args)), Path(args.out)

    from jaxlm.recipes.use.prune import PruneOptions, prune

    options = PruneOptions(
        workdir=workdir,
        out=target,
        keep=args.keep,
        batches=args.batches,
        text=tuple(args.text),
    )
    answer = prune(options, out.log, **selection(args))
    cells = [
        [str(number), f"{nats:+.4f}", "kept" if number in answer["kept"] else ""]
        for number, nats in enumerate(answer["harm_nats"])
    ]
    losses = answer["loss_nats"]
    lines = [
        *columns([["layer", "harm, nats", ""], *cells]),
        f"{target}: {len(answer['kept'])} layers, {answer['parameters']:,} parameters; "
        f"{losses['before']:.4f} nats with all layers, {losses['after']:.4f} with these, on "
        f"{args.batches} batches at most",
    ]
    return out.result(answer, lines)
