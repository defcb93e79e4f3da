"""Measures how fast this machine trains, on standard sizes: tokens a second, seconds a step, MFU, memory, beside the plan.

Only the compiled step counts, on random rows that lie on the device: no data is read. --config.a.b=V changes a setting of all
sizes. The JSON of an earlier time, or of another machine, is compared with --compare=FILE.
"""

import argparse
import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import withhold
from jaxlm.cli.output import Output
from jaxlm.core.errors import DataError, InputMissing
from jaxlm.monitor import environment, formatting, sinks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    withhold(
        parser,
        "--config",
        why="its sizes are the same everywhere, so that machines can be compared; --config.a.b=V changes all",
    )
    parser.add_argument(
        "--sizes", metavar="A,B", help="0.8M, 4M, 124M, 1B; by default two that suit the devices"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="X", help="of steps for each size (10)"
    )
    parser.add_argument("--compare", metavar="FILE", help="the JSON of an earlier bench")


def run(args: argparse.Namespace, out: Output) -> int:
    before = _read(Path(args.compare), args.sizes) if args.compare else {}
    from jaxlm.recipes.diagnose import bench

    rows = list(bench.measure(bench.sizes(args.sizes), args.overrides, args.seconds, out.say))
    for row in rows:
        if row["size"] in before:
            row["speed_up"] = row["tokens_per_second"] / before[row["size"]]
    facts = environment.facts()
    answer = {"rows": rows, "environment": {name: facts[name] for name in ("packages", "devices")}}
    out.result(answer, _text(rows))
    return 0


def _read(path: Path, sizes: str | None) -> dict[str, float]:
    """Return tokens per second by size.

    Raises:
      InputMissing: if there is no such file; the fix writes it, of the same sizes.
      DataError: if it holds something else, which the fix does not overwrite.
    """
    chosen = f" --sizes={sizes}" if sizes else ""
    if not path.exists():
        raise InputMissing(
            "there is no such bench",
            where=f"--compare={path}",
            why="no such file",
            fix=f"jaxlm bench{chosen} --json > {shlex.quote(str(path))}",
        )
    with contextlib.suppress(ValueError, KeyError, TypeError):
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        known = {row["size"]: row["tokens_per_second"] for row in rows}
        if all(
            isinstance(size, str) and sinks.is_number(speed) and speed > 0
            for size, speed in known.items()
        ):
            return known
    other = shlex.quote(str(path.with_name(f"{path.stem}-2.json")))
    raise DataError(
        "the file holds no bench",
        where=str(path),
        why="it is not what `jaxlm bench --json` writes",
        fix=f"jaxlm bench{chosen} --json > {other}    # then --compare={other}",
    )


def _text(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'size':<7}{'parameters':>11}{'tokens/s':>10}{'s a step, from to':>26}{'MFU':>6}{'memory':>10}{'planned':>10}{'speed-up':>10}"
    ]
    for row in rows:
        low, middle, high = row["step_seconds"]
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.0%}"
        speed_up = f"{row['speed_up']:.3f}" if "speed_up" in row else "-"
        lines.append(
            f"{row['size']:<7}{formatting.count(row['parameters']):>11}{formatting.count(row['tokens_per_second']):>10}"
            f"{f'{middle:.3g}, {low:.3g} {high:.3g}':>26}{mfu:>6}{formatting.size(row['bytes_per_device']):>10}"
            f"{formatting.size(row['planned_bytes_per_device']):>10}{speed_up:>10}"
        )
    return "\n".join(lines)
