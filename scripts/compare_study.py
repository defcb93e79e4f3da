"""The command line of the scripts that compare optimizers, objectives and schedules.

It writes the page of each.
"""

import argparse
import dataclasses
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import compare_table
from compare_runs import FILE, SMALL, Arm, Ended, Sweep, compare, finite, write
from compare_table import COLUMNS, Column, Measure

from jaxlm.cli.arguments import Parser, extract, needed
from jaxlm.core.errors import CommandError, JaxlmError
from jaxlm.core.nearest import nearest_word
from jaxlm.monitor import environment, sinks

ALT = "Bits per byte of the validation set, a mark for each seed"
# What each run sets for itself, and the flag that is meant.
OURS = {"train.steps": "--steps=200", "seed": "--seeds=5"}


def bits_per_byte(run: Ended) -> dict[str, float | None]:
    """The figure of a run in most studies."""
    return {"bits_per_byte": finite(run.bits)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """The comparison of a script, and the text of its page."""

    name: str  # of its files
    about: str  # for --help
    arms: Sequence[Arm]
    steps: int
    measures: Sequence[Measure]
    figures: Callable[[Ended], Mapping[str, float | None]] = bits_per_byte
    columns: Sequence[Column] = COLUMNS
    how: str  # text of the page around the table
    limits: str

    @property
    def is_timed(self) -> bool:
        """Return True if a column is at equal time."""
        return any(measure.runs == "equal_time" for measure in self.measures)


def main(study: Study) -> int:
    """Run the study of the command line; return the exit code."""
    try:
        return _run(study, sys.argv[1:])
    except JaxlmError as error:
        if "--trace" in sys.argv:
            raise
        print(error, file=sys.stderr)
        return error.code


def _run(study: Study, words: Sequence[str]) -> int:
    shared, rest = extract(words)
    args = _arguments(study, rest)
    if args is None:  # --help was all that was asked
        return 0
    arms = _chosen(study.arms, args.only)
    for path, flag in OURS.items():
        if path in dict(shared.overrides):
            raise CommandError(
                f"{path} is the comparison's own",
                where=f"--config.{path}",
                why="each run has another",
                fix=flag,
            )
    workdir = Path(needed(shared, "workdir"))
    if args.page:
        compare_table.around(args.page, study.name)  # a wrong flag must not cost an hour
    begun = time.monotonic()

    def say(text: str) -> None:
        if not shared.quiet:
            print(f"{time.monotonic() - begun:7.0f} s  {text}", file=sys.stderr, flush=True)

    file, settings = shared.config or FILE, {**SMALL, **dict(shared.overrides)}
    sweep = Sweep(file, settings, workdir, steps=args.steps, say=say, parallel=args.parallel)
    facts: dict[str, Any] = {
        "command": shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *words]),
        "config": file,
        "settings": {path: str(value) for path, value in settings.items()},
        "steps": args.steps,
        "tokens": args.steps * sweep.run(arms[0]).tokens_per_step,
        "seeds": args.seeds,
        "rates": args.rates,
        "machine": _machine(),
        "missing": len(arms),
    }

    def publish(rows: list[dict[str, Any]]) -> None:
        """Keep all measurements after an early end."""
        page_facts = facts | {"missing": len(arms) - len(rows), "arms": rows}
        _publish(study, page_facts, args.out or workdir, args.page)

    rows = compare(
        sweep,
        arms,
        seeds=args.seeds,
        most=args.rates,
        is_timed=study.is_timed,
        figures=study.figures,
        say=say,
        publish=publish,
    )
    text = compare_table.table(rows, study.measures, study.columns)
    print(json.dumps(facts | {"missing": 0, "arms": rows}) if shared.json else text)
    return 0


def _arguments(study: Study, rest: Sequence[str]) -> argparse.Namespace | None:
    names = ", ".join(arm.name for arm in study.arms)
    parser = Parser(prog=Path(sys.argv[0]).name, description=study.about)
    parser.add_argument("--only", metavar="A,B", help=names)
    parser.add_argument("--steps", type=int, default=study.steps, help=f"of a run ({study.steps})")
    parser.add_argument(
        "--seeds", type=int, default=3, help="seeds in addition to the one for rates (3)"
    )
    parser.add_argument("--rates", type=int, default=12, help="tried for each at most (12)")
    parser.add_argument("--parallel", type=int, default=1, help="seeds that train at a time (1)")
    parser.add_argument("--out", type=Path, help="where page, numbers and picture go (--workdir)")
    parser.add_argument("--page", type=Path, help="a page that gets the table too, at its marks")
    parser.add_shared()
    try:
        args, left = parser.read(rest, rest)
    except SystemExit:
        return None
    if left:
        raise parser.unknown(left, args)
    for flag in ("steps", "seeds", "rates", "parallel"):
        if getattr(args, flag) < 1:
            raise CommandError(
                f"--{flag} is at least 1",
                where=f"--{flag}={getattr(args, flag)}",
                why="there would be nothing to compare",
                fix=f"--{flag}=3",
            )
    return args


def _chosen(arms: Sequence[Arm], only: str | None) -> list[Arm]:
    """The arms that are named, in the order of the study; all of them for None."""
    names = [arm.name for arm in arms]
    chosen = names if only is None else only.split(",")
    if wrong := [name for name in chosen if name not in names]:
        raise CommandError(
            f"there is no {wrong[0]!r} to compare",
            where=f"--only={only}",
            why=f"there is {', '.join(names)}",
            fix=f"--only={nearest_word(wrong[0], names) or names[0]}",
        )
    return [arm for arm in arms if arm.name in chosen]


def _publish(study: Study, results: Mapping[str, Any], out: Path, manual: Path | None) -> None:
    """Write numbers, picture and page, and the manual's table if no arm is missing."""
    rows = results["arms"]
    write(out / f"{study.name}.json", results)
    sinks.replace(out / f"{study.name}.png", compare_table.draw(rows, study.measures))
    table = compare_table.table(rows, study.measures, study.columns)
    sinks.replace(out / f"{study.name}.md", _page(study, results, table).encode())
    if manual and not results["missing"]:
        before, after = compare_table.around(manual, study.name)
        sinks.replace(manual, f"{before}\n\n{table}\n\n{after}".encode())


def _page(study: Study, results: Mapping[str, Any], table: str) -> str:
    machine, rows = results["machine"], results["arms"]
    left = results["missing"]
    settings = ", ".join(f"`{path}={value}`" for path, value in results["settings"].items())
    return "\n".join(
        [
            f"# {study.name.capitalize()} compared",
            "",
            f"`{results['command']}`, {machine['cores']} cores, {machine['system']}, Python "
            f"{machine['python']}, jax {machine['jax']}."
            + (f" **Not done: {left} arms are missing.**" if left else ""),
            "",
            table,
            "",
            f"![{ALT}]({study.name}.png)",
            "",
            "## What it shows",
            "",
            compare_table.shown(rows, study.measures),
            "",
            "## How",
            "",
            study.how.format(**results),
            "",
            f"{results['config']} with {settings}.",
            "",
            "## What it cannot show",
            "",
            study.limits,
            "",
        ]
    )


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "jax": environment.installed(("jax",))["jax"],
    }
