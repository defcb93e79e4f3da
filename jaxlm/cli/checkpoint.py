"""List, inspect, diff and verify the checkpoints of a run, without modifying them.

jaxlm checkpoint list --workdir=RUN                       steps, and the steps in quarantine
jaxlm checkpoint inspect --workdir=RUN [--step=N]         record of a step, layout of each array
jaxlm checkpoint diff --workdir=RUN --step=2 --other=4    differences of two steps, by array
jaxlm checkpoint verify --workdir=RUN [--step=N]          digests; exit 65 if a byte has changed

RUN may also be the URL of `checkpoint.directory`; then no run directory is needed.
"""

import shlex
import time
from pathlib import Path
from typing import Any

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.cli.arguments import SHOWN, Parser, add_flag, needed_run
from jaxlm.cli.output import Output, columns, table
from jaxlm.core.errors import CommandError, DataError
from jaxlm.monitor import formatting

READS_STORES = True  # --workdir may be the URL of an object store


def add_arguments(parser: Parser) -> None:
    parser.withhold("checkpoints are shown as they were saved")
    parser.add_action("list", _list, "steps of the run, and steps in quarantine")
    inspect = parser.add_action("inspect", _inspect, "record and arrays of a step")
    add_flag(inspect, "--step", "N", int, "step (newest)")
    diff = parser.add_action("diff", _diff, "differences in state and config of two steps")
    add_flag(diff, "--step", "A", int, "first step", required=True)
    add_flag(diff, "--other", "B", int, "second step (A, of the other run)")
    add_flag(diff, "--other_workdir", "RUN", str, "run of the second step (--workdir)")
    verify = parser.add_action("verify", _verify, "comparison of every byte with the digests")
    add_flag(verify, "--step", "N", int, "step (all)")


def _opened(args: Any) -> tuple[Path | str, Any]:
    """Return the run or the URL, and the module that reads its checkpoints, which imports JAX."""
    place = _place(needed_run(args))
    from jaxlm.recipes.use import checkpoints

    return place, checkpoints


def _place(text: str) -> Path | str:
    return text if CheckpointConfig.is_url(text) else Path(text)


def _list(args: Any, out: Output) -> int:
    workdir, checkpoints = _opened(args)
    answer = checkpoints.listing(workdir)
    rows = [("step", "written", "size", "loss", "")]
    for row in answer["steps"]:
        remarks = [name for name in ("newest", "best") if answer[name] == row["step"]]
        if row["healthy"] is False:
            remarks.append("steps were skipped shortly before")
        remarks += [row["problem"]] if row["problem"] else []
        size, loss = formatting.size(row["bytes"]), formatting.number(row["loss_nats"])
        rows.append((str(row["step"]), _when(row["time_unix"]), size, loss, ", ".join(remarks)))
    lines = columns(rows, "><>><")
    if not answer["steps"]:
        lines = ["the run has no checkpoint yet"]
    for each in answer["quarantine"]:
        reason = (each["reason"] or "no reason is recorded").partition("\n")[0]
        lines.append(f"{each['path']}: {reason}")
    return out.result(answer, lines)


def _inspect(args: Any, out: Output) -> int:
    workdir, checkpoints = _opened(args)
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
    lines = [f"step {answer['step']}", *(f"  {line}" for line in table(facts))]
    width = max(len(leaf["path"]) for leaf in answer["leaves"])
    for group, size in answer["groups"].items():
        lines.append(f"{group}: {formatting.size(size)}")
        for leaf in answer["leaves"]:
            if leaf["path"].partition("/")[0] == group:
                layout = f"{leaf['dtype']}{leaf['shape']}  {formatting.size(leaf['bytes'])}"
                lines.append(f"  {leaf['path']:<{width}}  {layout}")
    return out.result(answer, lines)


def _diff(args: Any, out: Output) -> int:
    workdir, checkpoints = _opened(args)
    if args.other is None and args.other_workdir is None:
        names = [path.name for path in Path(workdir, "checkpoints").glob("[0-9]*")]
        others = sorted({int(name) for name in names if name.isdecimal()} - {args.step})
        what, where = "diff needs a second step", "jaxlm checkpoint diff"
        why = "a step is compared with another one, or with the same one of another run"
        listing = f"jaxlm checkpoint list --workdir={shlex.quote(str(workdir))}"
        fix = "\n".join(f"--other={step}" for step in others[-SHOWN:]) or listing
        raise CommandError(what, where=where, why=why, fix=fix)
    other = args.step if args.other is None else args.other
    answer = checkpoints.diff(workdir, args.step, _place(args.other_workdir or str(workdir)), other)
    lines = [f"{each['path']}: {each['old']} -> {each['new']}" for each in answer["config"]]
    for leaf in answer["layouts"]:
        lines.append(f"{leaf['path']}: {leaf['old'] or 'absent'} -> {leaf['new'] or 'absent'}")
    lines += [
        f"{leaf['path']}: {leaf['elements']} of {leaf['of']} elements differ, "
        f"by at most {leaf['max_abs_difference']:.4g}"
        for leaf in answer["different"]
    ]
    lines.append(
        f"{answer['identical']} arrays are equal bit for bit, {len(answer['different'])} are not, "
        f"{len(answer['layouts'])} have no counterpart of the same layout"
    )
    return out.result(answer, lines)


def _verify(args: Any, out: Output) -> int:
    workdir, checkpoints = _opened(args)
    answer = checkpoints.verify(workdir, args.step, out.log)
    damaged = answer["damaged"].items()
    lines = [f"step {step}: {problem}" for step, problems in damaged for problem in problems]
    counts = f"{len(answer['sound'])} sound, {len(answer['damaged'])} damaged"
    lines.append(f"{counts}; no file was modified")
    return out.result(answer, lines, DataError.code if answer["damaged"] else 0)


def _when(time_unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_unix))
