"""Replay one step of a run: its documents, loss, gradient by layer, and the guard's verdict.

jaxlm replay --workdir=runs/a --step=120

The run directory is only read. On the mesh of the run the loss equals the logged one bit for bit.
"""

from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import CPU_DEVICES, SAVED_CONFIG, Parser, add_flag, needed_run, selection
from jaxlm.cli.output import Output
from jaxlm.core.quoting import cut
from jaxlm.monitor import formatting

MAX_SHOWN = 16  # printed documents; --json has more


def add_arguments(parser: Parser) -> None:
    parser.withhold(SAVED_CONFIG, "--config")
    add_flag(parser, "--step", "N", int, "step to replay", least=0, required=True)
    doc = "number of rewinds before the step (all); 0 replays what the first rewind abandoned"
    add_flag(parser, "--rewinds", "K", int, doc, least=0)
    add_flag(parser, *CPU_DEVICES)


def run(args: Any, out: Output) -> int:
    workdir = Path(needed_run(args))

    from jaxlm.recipes.diagnose.replay import ReplayOptions, replay

    flags = selection(args, "step", "rewinds", "cpu_devices")
    options = ReplayOptions(workdir=workdir, overrides=tuple(args.overrides), **flags)
    answer = replay(options, out.log)
    return out.result(answer, _text(answer))


def _text(answer: dict[str, Any]) -> list[str]:
    from jaxlm.data import formats

    logged = {
        None: "this step was not logged",
        True: "equal to the logged loss, bit for bit",
        False: f"the log has {answer['logged_loss_nats']}: another mesh, version or setting",
    }[answer["is_as_logged"]]
    lines = [
        f"step {answer['step']}, batch {answer['batch']} of the stream",
        f"  verdict   {'applied' if answer['is_applied'] else 'not applied: ' + answer['kind']}",
        f"  loss      {answer['loss_nats']:.6g} nats, {logged}",
        f"  gradient  {answer['grad_norm']:.6g}",
        f"  rate      {answer['learning_rate']:.6g}",
        "gradient norm by parameter, and by layer",
    ]
    width = max(map(len, answer["layers"]))
    for path, norms in answer["layers"].items():
        every = norms if isinstance(norms, list) else [norms]
        shown = ["not finite" if norm is None else formatting.number(norm) for norm in every]
        lines.append(f"  {path:<{width}}  {'  '.join(shown)}")
    if answer["rows"]:
        lines.append("rows with the highest loss of their tokens, without dropout")
    lines += [f"  row {row['row']}: {row['loss_nats']:.4g}" for row in answer["rows"]]
    # Documents of the rows with the highest loss come first.
    rank = {row["row"]: place for place, row in enumerate(answer["rows"])}
    documents = sorted(answer["documents"], key=lambda d: rank.get(d["row"], len(rank)))
    lines.append("documents")
    lines += [
        f"  row {d['row']}: {formats.place(d['file'], d['record'])}: {cut(d['preview'], 100)!r}"
        for d in documents[:MAX_SHOWN]
    ]
    if more := max(len(documents) - MAX_SHOWN, 0) + answer["documents_left_out"]:
        lines.append(f"  and {more} more")
    return lines
