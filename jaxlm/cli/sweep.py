"""Train every combination of varied settings, with several seeds, and compare the runs.

jaxlm sweep --config=FILE --vary=optim.lr=1e-3,3e-3 --seeds=3 --workdir=runs/lr

--vary lists the values of a setting, separated by commas, or by semicolons if a value contains
commas; --config.a.b=V is one value for all runs. Each run has a directory in --workdir. The same
command resumes and does not repeat runs that ended. It ends with the page of `jaxlm compare`,
compare.html in --workdir.
"""

import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import (
    CPU_DEVICES,
    Parser,
    add_flag,
    free_workdir,
    is_run,
    needed,
    needed_config,
)
from jaxlm.cli.compare import show
from jaxlm.cli.output import Output
from jaxlm.core import config
from jaxlm.core.errors import CommandError, ConfigError


def add_arguments(parser: Parser) -> None:
    add_flag(parser, "--vary", "A.B=V,V", [], "values of a setting; repeatable: all combinations")
    add_flag(
        parser,
        "--seeds",
        "N",
        1,
        "seeds of each combination, counted from that of the config",
        least=1,
    )
    add_flag(parser, "--parallel", "N", 1, "runs at a time", least=1)
    add_flag(parser, "--init_from", "RUN[@STEP]", str, "run with the initial weights of all runs")
    add_flag(parser, *CPU_DEVICES)


def run(args: Any, out: Output) -> int:
    from jaxlm.recipes.config import Run

    free = free_workdir("sweep")
    workdir, file = Path(needed(args, "workdir", fix=free)), needed_config(args, Run)
    if is_run(str(workdir)):
        what, why = f"{workdir} is a run", "a sweep has a directory for each of its runs"
        raise CommandError(what, where=f"--workdir={workdir}", why=why, fix=free)

    from jaxlm.recipes.compare import comparison, sweep

    _check_overrides(args, file)
    has_base = args.init_from is not None
    settings = file, args.overrides, args.vary, args.seeds, workdir
    runs = sweep.members(*settings, has_base=has_base)
    if len(runs) < 2:
        raise CommandError(
            "a sweep needs two runs",
            where=f"jaxlm {shlex.join(args.words)}",
            why="no setting has two values, and there is one seed",
            fix="--seeds=2\n--vary=optim.lr=1e-3,3e-3",
        )
    named = {"init_from": args.init_from, "cpu_devices": args.cpu_devices}
    flags = [f"--{name}={value}" for name, value in named.items() if value is not None]
    codes = sweep.train_all(
        runs, file, args.overrides, flags=flags, parallel=args.parallel, say=out.log
    )
    failed = {path: code for path, code in codes.items() if code not in sweep.ENDED}
    paths = [each.path for each in runs if (each.path / "config.json").is_file()]
    code = next(iter(failed.values()), 0)
    if len(paths) < 2:
        text = [f"{path}: failed with exit code {each}" for path, each in failed.items()]
        return out.result({"codes": codes}, text, code)
    return show(comparison.compare(paths), workdir / "compare.html", out, {"codes": codes}, code)


def _check_overrides(args: Any, file: str) -> None:
    """Raise CommandError if a setting of --config has several values, which --vary takes."""
    from jaxlm.recipes.config import Run

    for path, text in args.overrides:
        others = [pair for pair in args.overrides if pair[0] != path]
        parts = text.split(",")
        try:
            config.load(Run, file, [*others, (path, text)])
        except ConfigError:
            if len(parts) < 2:
                raise
            for part in parts:
                config.load(Run, file, [*others, (path, part)])
            flag = f"--config.{path}"
            words = [word for word in args.words if word.partition("=")[0] != flag and word != text]
            raise CommandError(
                f"{flag} has several values",
                where=f"{flag}={text}",
                why="a setting of --config has one value in all runs; --vary takes several",
                fix=shlex.join(["jaxlm", *words, f"--vary={path}={text}"]),
            ) from None
