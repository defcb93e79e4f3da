"""Does one step of a run again, and shows what it saw: its documents, loss, gradient by layer, and the guard's verdict.

The run directory is only read. On the mesh of the run the loss is the one that was logged, in every bit.
"""

import argparse
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import needed_run, withhold
from jaxlm.cli.output import Output
from jaxlm.core.quoting import cut
from jaxlm.monitor import formatting

MOST_SHOWN = 16  # documents, to a person; --json has more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    withhold(parser, "--config", why="it goes by the config that the run was saved with")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step")
    parser.add_argument(
        "--rewinds",
        type=int,
        metavar="K",
        help="as the run was after its first K rewinds (all): 0 leads to what the first rewind gave up",
    )
    parser.add_argument("--cpu_devices", type=int, metavar="N", help="split the CPU into N devices")


def run(args: argparse.Namespace, out: Output) -> int:
    workdir = Path(needed_run(args))

    from jaxlm.recipes.diagnose.replay import Options, replay

    options = Options(
        workdir=workdir,
        step=args.step,
        overrides=tuple(args.overrides),
        rewinds=args.rewinds,
        cpu_devices=args.cpu_devices,
    )
    answer = replay(options, out.say)
    out.result(answer, _text(answer))
    return 0


def _text(answer: dict[str, Any]) -> str:
    logged = {
        None: "this step was not logged",
        True: "as logged, in every bit",
        False: f"the log has {answer['logged_loss_nats']}: another mesh, version or setting",
    }[answer["is_as_logged"]]
    lines = [
        f"step {answer['step']}, batch {answer['batch']} of the stream",
        f"  verdict   {'applied' if answer['is_applied'] else 'not applied: ' + answer['kind']}",
        f"  loss      {answer['loss_nats']:.6g} nats, {logged}",
        f"  gradient  {answer['grad_norm']:.6g}",
        f"  rate      {answer['learning_rate']:.6g}",
        "gradient's norm by parameter, and by layer",
    ]
    width = max(map(len, answer["layers"]))
    for path, norms in answer["layers"].items():
        shown = [
            "not finite" if norm is None else formatting.number(norm)
            for norm in (norms if isinstance(norms, list) else [norms])
        ]
        lines.append(f"  {path:<{width}}  {'  '.join(shown)}")
    lines.append("rows with the highest loss, without dropout")
    lines += [f"  row {row['row']}: {row['loss_nats']:.4g}" for row in answer["rows"]]
    # A person is shown the documents of the worst rows first.
    rank = {row["row"]: place for place, row in enumerate(answer["rows"])}
    documents = sorted(answer["documents"], key=lambda d: rank.get(d["row"], len(rank)))
    lines.append("documents")
    lines += [
        f"  row {d['row']}: {d['file']}, record {d['record']}: {cut(d['preview'], 100)!r}"
        for d in documents[:MOST_SHOWN]
    ]
    if more := max(len(documents) - MOST_SHOWN, 0) + answer["documents_left_out"]:
        lines.append(f"  and {more} more")
    return "\n".join(lines)
