"""Measure the training speed of this machine on standard sizes: tokens/s, step time, MFU, memory.

jaxlm bench
jaxlm bench --sizes=124M --config.train.remat=full

The memory is compared with the plan. Only the compiled step is timed, on random rows in device
memory: no data is read. --config.a.b=V changes a setting of all sizes. --compare=FILE compares with
the JSON of an earlier measurement or of another machine.
"""

import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser, add_flag
from jaxlm.cli.output import Output, columns
from jaxlm.core.disk import read_json
from jaxlm.core.errors import DataError
from jaxlm.monitor import environment, formatting, sinks

MAX_BYTES = 2**20  # of an earlier result


def add_arguments(parser: Parser) -> None:
    why = "all machines use the same sizes, to be comparable; --config.a.b=V changes all of them"
    parser.withhold(why, "--config")
    doc = "sizes among 0.8M, 4M, 124M, 1B (two that suit the devices)"
    add_flag(parser, "--sizes", "A,B", str, doc)
    add_flag(parser, "--seconds", "X", 10.0, "time of the steps of each size", least=0)
    add_flag(parser, "--compare", "FILE", str, "JSON of an earlier bench")


def run(args: Any, out: Output) -> int:
    before = _read(Path(args.compare), args.sizes) if args.compare else {}
    from jaxlm.recipes.diagnose import bench

    rows = list(bench.measure(bench.sizes(args.sizes), args.overrides, args.seconds, out.log))
    for row in rows:
        if row["size"] in before:
            row["speed_up"] = row["tokens_per_second"] / before[row["size"]]
    facts = environment.facts()
    answer = {"rows": rows, "environment": {name: facts[name] for name in ("packages", "devices")}}
    return out.result(answer, _text(rows))


def _read(path: Path, sizes: str | None) -> dict[str, float]:
    """Return tokens per second by size.

    Raises InputMissing without the file; the fix writes it, with the same sizes. Raises DataError
    if the file is no result of bench; the fix does not overwrite it.
    """
    command = f"jaxlm bench{f' --sizes={sizes}' if sizes else ''} --json"
    other = shlex.quote(str(path.with_name(f"{path.stem}-2.json")))
    missing = f"{command} > {shlex.quote(str(path))}"
    damaged = f"{command} > {other}    # then --compare={other}"
    content = read_json(path, MAX_BYTES, "the bench file", missing=missing, damaged=damaged)
    try:
        known = {row["size"]: row["tokens_per_second"] for row in content["rows"]}
        is_named = all(isinstance(size, str) for size in known)
        is_valid = is_named and all(sinks.is_number(each) and each > 0 for each in known.values())
    except (KeyError, TypeError):
        is_valid = False
    if not is_valid:
        what = "the bench file is not a bench result"
        why = "it is not an output of `jaxlm bench --json`"
        raise DataError(what, where=str(path), why=why, fix=damaged)
    return known


def _text(rows: list[dict[str, Any]]) -> list[str]:
    count, size = formatting.count, formatting.size
    head = "size,parameters,tokens/s,step seconds,MFU,memory,planned,speed-up"
    cells = [head.split(",")]
    for row in rows:
        low, middle, high = row["step_seconds"]
        counts = [count(row[name]) for name in ("parameters", "tokens_per_second")]
        seconds = f"{middle:.3g}, {low:.3g} {high:.3g}"
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.0%}"
        memory = [size(row[name]) for name in ("bytes_per_device", "planned_bytes_per_device")]
        speed_up = f"{row['speed_up']:.3f}" if "speed_up" in row else "-"
        cells.append([row["size"], *counts, seconds, mfu, *memory, speed_up])
    return columns(cells, "<")
