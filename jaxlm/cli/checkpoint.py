"""Looks at the checkpoints of a run; none of the actions modifies anything.

jaxlm checkpoint list --workdir=RUN                       every step, and what lies in the quarantine
jaxlm checkpoint inspect --workdir=RUN [--step=N]         what was saved with a step, and each array's layout
jaxlm checkpoint diff --workdir=RUN --step=A --other=B    how two steps differ, array by array
jaxlm checkpoint verify --workdir=RUN [--step=N]          reads every byte; exit 65 where one is not as written
"""

import argparse
import shlex
import time
from pathlib import Path

from jaxlm.cli.arguments import SHOWN, needed_run, withhold
from jaxlm.cli.output import Output
from jaxlm.core.errors import CommandError, DataError
from jaxlm.monitor import formatting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The four actions."""
    withhold(
        parser, "--config", "--config.a.b", why="it shows what was saved, whatever a config says"
    )
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="list|inspect|diff|verify"
    )
    actions.add_parser("list", help="every step, and what lies in the quarantine")
    inspect = actions.add_parser("inspect", help="what was saved with a step")
    inspect.add_argument("--step", type=int, metavar="N", help="the newest unless named")
    diff = actions.add_parser("diff", help="how the state and config of two steps differ")
    diff.add_argument("--step", type=int, required=True, metavar="A", help="the first step")
    diff.add_argument("--other", type=int, metavar="B", help="the second; A of the other run")
    diff.add_argument("--other_workdir", metavar="RUN", help="the run of the second step")
    verify = actions.add_parser("verify", help="whether every byte is as it was written")
    verify.add_argument("--step", type=int, metavar="N", help="this step only")


def run(args: argparse.Namespace, out: Output) -> int:
    """Does what the action asks."""
    workdir = Path(needed_run(args))
    actions = {"list": _list, "inspect": _inspect, "diff": _diff, "verify": _verify}
    return actions[args.action](args, workdir, out)


def _list(args: argparse.Namespace, workdir: Path, out: Output) -> int:
    from jaxlm.recipes.use import checkpoints

    answer = checkpoints.listing(workdir)
    lines = [f"{'step':>10}  {'written':<19}  {'size':>8}  {'loss':>8}"]
    for row in answer["steps"]:
        step = row["step"]
        remarks = [name for name in ("newest", "best") if answer[name] == step]
        if row["healthy"] is False:
            remarks.append("steps were skipped shortly before")
        if row["problem"]:
            remarks.append(row["problem"])
        lines.append(
            f"{step:>10}  {_when(row['time_unix'])}  {formatting.size(row['bytes']):>8}  "
            f"{formatting.number(row['loss_nats']):>8}  {', '.join(remarks)}".rstrip()
        )
    if not answer["steps"]:
        lines = ["there is no checkpoint yet"]
    for found in answer["quarantine"]:
        reason = (found["reason"] or "no reason is written down").partition("\n")[0]
        lines.append(f"{found['path']}: {reason}")
    out.result(answer, "\n".join(lines))
    return 0


def _inspect(args: argparse.Namespace, workdir: Path, out: Output) -> int:
    from jaxlm.recipes.use import checkpoints

    answer = checkpoints.inspect(workdir, args.step)
    progress, evaluation, loss = answer["progress"], answer["evaluation"], answer["loss_nats"]
    facts = [
        ("written", f"{_when(answer['time_unix'])}, {formatting.size(answer['bytes'])} on disk"),
        ("by", answer["owner"] or "-"),
        ("loss", "not evaluated" if loss is None else f"{loss:.6g} nats"),
        ("healthy", "yes" if answer["healthy"] else "no, steps were skipped shortly before"),
        ("finished", "yes" if answer["finished"] else "no"),
        ("config", f"sha256 {answer['config_sha256']}"),
        *(("data", f"{name} {value}") for name, value in answer["data"].items()),
        *(("progress", f"{name} {value}") for name, value in progress.items()),
        *(("evaluation", f"{name} {value}") for name, value in (evaluation or {}).items()),
        *(("rewind", ", ".join(f"{k} {v}" for k, v in each.items())) for each in answer["rewinds"]),
        ("state", f"{formatting.size(answer['state_bytes'])} in {len(answer['leaves'])} arrays"),
    ]
    lines = [f"step {answer['step']}"]
    shown = ""
    for label, text in facts:
        lines.append(f"  {'' if label == shown else label:<10} {text}")
        shown = label
    width = max(len(leaf["path"]) for leaf in answer["leaves"])
    for group, size in answer["groups"].items():
        lines.append(f"{group}: {formatting.size(size)}")
        lines += [
            f"  {leaf['path']:<{width}}  {leaf['dtype']}{leaf['shape']}  {formatting.size(leaf['bytes'])}"
            for leaf in answer["leaves"]
            if leaf["path"].partition("/")[0] == group
        ]
    out.result(answer, "\n".join(lines))
    return 0


def _diff(args: argparse.Namespace, workdir: Path, out: Output) -> int:
    if args.other is None and args.other_workdir is None:
        names = [path.name for path in (workdir / "checkpoints").glob("[0-9]*")]
        others = sorted({int(name) for name in names if name.isdecimal()} - {args.step})
        raise CommandError(
            "a second step is needed",
            where="jaxlm checkpoint diff",
            why="a step differs from another one, or from the same one of another run",
            fix="\n".join(f"--other={step}" for step in others[-SHOWN:])
            or f"jaxlm checkpoint list --workdir={shlex.quote(str(workdir))}",
        )
    from jaxlm.recipes.use import checkpoints

    answer = checkpoints.diff(
        workdir,
        args.step,
        Path(args.other_workdir or workdir),
        args.step if args.other is None else args.other,
    )
    lines = [f"{change['path']}: {change['old']} -> {change['new']}" for change in answer["config"]]
    lines += [
        f"{leaf['path']}: {leaf['old'] or 'not there'} -> {leaf['new'] or 'not there'}"
        for leaf in answer["layouts"]
    ]
    lines += [
        f"{leaf['path']}: {leaf['elements']} of {leaf['of']} elements differ, "
        f"by at most {leaf['max_abs_difference']:.4g}"
        for leaf in answer["different"]
    ]
    lines.append(
        f"{answer['identical']} arrays are the same in every bit, {len(answer['different'])} are not, "
        f"{len(answer['layouts'])} have no counterpart of their layout"
    )
    out.result(answer, "\n".join(lines))
    return 0


def _verify(args: argparse.Namespace, workdir: Path, out: Output) -> int:
    from jaxlm.recipes.use import checkpoints

    answer = checkpoints.verify(workdir, args.step, out.say)
    lines = [f"step {step}: {line}" for step, found in answer["damaged"].items() for line in found]
    lines.append(
        f"{len(answer['sound'])} sound, {len(answer['damaged'])} damaged; nothing was modified"
    )
    out.result(answer, "\n".join(lines))
    return DataError.code if answer["damaged"] else 0


def _when(time_unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_unix))
