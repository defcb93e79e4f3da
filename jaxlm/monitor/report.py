"""The report of a run: one HTML file that needs no other."""

import base64
import contextlib
import html
import json
import os
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxlm.core.errors import DataError
from jaxlm.monitor import formatting, noise, sinks
from jaxlm.monitor.plots import MAPS, PLOTS
from jaxlm.monitor.sinks import FIGURES, Shape

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --good: #1a7f37; --bad: #cf222e; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } caption { text-align: left; padding: .3rem 0; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; } tr.ours { font-weight: 600; color: var(--good); } tr.worse, p.worse { font-weight: 600; color: var(--bad); }
pre { background: var(--soft); padding: .7rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
.plots img { width: 100%; border-radius: 4px; } .scroll { overflow-x: auto; margin: 1rem 0; } .soft { opacity: .7; }
"""

DEEPEST = 20  # levels of a JSON file that are rows of their own
SAMPLES: Shape = {"step": sinks.is_step, "prompt": sinks.is_text, "text": sinks.is_text}
FORECAST: Shape = {
    "bytes_per_device": sinks.is_bytes,
    "compiled_bytes_per_device": sinks.is_bytes,
    "step_seconds": sinks.is_range,
    "tokens_per_second": sinks.is_range,
    "assumed": lambda value: isinstance(value, list),
}
EXIT: Shape = {"code": sinks.is_number, "cause": sinks.is_text, "time_unix": sinks.is_number}


def write(run: str | os.PathLike[str]) -> Path:
    """Writes report.html of a run directory, from the files in it alone; parts whose file is missing are left out.

    `baselines.json` gives {name: bits per byte} of other ways to code the validation set.

    Raises:
      DataError: where a file of the run is damaged.
      NotWritable: where the report cannot be written.
    """
    run = Path(run)
    target = run / "report.html"
    sinks.replace(target, render(run).encode())
    return target


def render(run: Path) -> str:
    """The report as HTML."""
    records = sinks.read(run / "metrics.jsonl")
    title = html.escape(f"jaxlm run {run.resolve().name}")
    sections = (
        ("Result", _result(run, records)),
        ("Sources", _sources(records)),
        ("Experts", _experts(records)),
        ("Plan", _plan(run, records)),
        ("Curves", _curves(run)),
        ("Samples", _samples(sinks.read(run / "samples.jsonl", SAMPLES))),
        ("Warnings", _warnings(sinks.read(run / "warnings.jsonl", {}))),
        ("Configuration", _configuration(run)),
        ("Environment", _environment(run)),
    )
    body = "\n".join(
        f"<h2>{name}</h2>\n{text}" for name, part in sections if (text := "\n".join(part))
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{title}</h1>\n{_summary(run, records)}\n{body}\n</body></html>\n"
    )


def _summary(run: Path, records: Sequence[Mapping[str, Any]]) -> str:
    """One line: how far it came, on what, and how it ended."""
    parts = []
    if records:
        last = max(records, key=lambda record: record["step"])
        parts.append(f"step {last['step']}")
        tokens = max(
            (r["tokens"] for r in records if r.get("tokens") and r.get("split") == "train"),
            default=None,
        )
        if tokens:
            parts.append(f"{formatting.count(tokens)} tokens")
        with contextlib.suppress(ValueError, OverflowError, OSError):  # no time of this world
            stamp = time.gmtime(last.get("time_unix") or 0)
            parts.append(time.strftime("%Y-%m-%d %H:%M UTC", stamp))
    end = _json(run / "exit.json", EXIT)
    if end:
        parts.append(f"ended with code {end['code']}: {end['cause']}")
    return f'<p class="soft">{html.escape(" · ".join(parts))}</p>'


def _verdict(run: Path) -> Iterator[str]:
    """That the run is worse than a coder without a model, why, and what to do."""
    verdict = _json(run / "divergence.json")
    if verdict.get("worse_than"):
        parts = [
            f"Since step {verdict.get('step', '-')}, {verdict.get('said', 'it has diverged')}.",
            f"Likely, {verdict.get('cause', 'the learning rate is too high')}.",
        ]
        command = html.escape(str(verdict.get("command", "jaxlm lr-find")))
        yield f'<p class="worse">{html.escape(" ".join(parts))}<br><code>{command}</code></p>'


def _result(run: Path, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    verdict = list(_verdict(run))
    yield from verdict
    last: dict[str, Mapping[str, Any]] = {}
    for record in records:
        if record.get("loss_nats") is not None:
            last[record.get("split", "train")] = record
    if last:
        rows = [
            [split, record["step"], *(_measured(record, name) for name in FIGURES)]
            for split, record in last.items()
        ]
        yield _table(["split", "step", *FIGURES], rows, numbers=True)
        if any(record.get("loss_stderr") is not None for record in last.values()):
            yield (
                "<p>&plusmn; is the standard error of a loss that was measured on a part of the"
                " set, by rows that were drawn.</p>"
            )
    if changed := list(_changed(records)):
        yield _table(
            ["validation set", "nats before", "nats after", "difference"], changed, numbers=True
        )
        yield "<p>Before is the run whose weights this one began with. Where the loss rose, it forgot.</p>"
    baselines = _json(run / "baselines.json")
    if wrong := [name for name, bits in baselines.items() if not sinks.is_number(bits)]:
        raise _misshapen(run / "baselines.json", f"has no number for {wrong[0]!r}")
    if baselines:
        newest = max((record["step"] for record in records), default=0)
        named = [(name, bits, "") for name, bits in baselines.items()]
        named += [
            (
                f"this run, {split}{formatting.limits(r, newest)}",
                r["bits_per_byte"],
                "worse" if verdict or r.get("worse_than") else "ours",
            )
            for split, r in last.items()
            if r.get("bits_per_byte") is not None
        ]
        named.sort(key=lambda row: -row[1])
        yield _table(
            ["coder of the validation set", "bits per byte"],
            [[name, _figure(bits)] for name, bits, _ in named],
            numbers=True,
            classes=[mark for *_, mark in named],
        )
    train = [r for r in records if r.get("split") == "train" and r.get("tokens_per_second")]
    if train:
        speeds = sorted(r["tokens_per_second"] for r in train)
        middle = speeds[len(speeds) // 2]
        mfu = [r["mfu"] for r in train if r.get("mfu") is not None]
        shown = (
            f"{sorted(mfu)[len(mfu) // 2]:.1%}"
            if mfu
            else "unknown: no published peak for this device"
        )
        peak = max((r.get("peak_bytes") or 0 for r in train), default=0)
        yield (
            f"<p>Median {formatting.count(middle)} tokens per second. MFU {shown} (6 x parameters that multiply x tokens, "
            f"and attention at the causal half). Peak memory {formatting.size(peak or None)}.</p>"
        )
    if told := noise.advice(records):
        yield f"<p>A batch has {html.escape(told)} (arXiv:1812.06162).</p>"


def _sources(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What was read of each source of a mixture, by the last record of the training."""
    trained = [r for r in records if r.get("split") == "train"]
    last = trained[-1] if trained else {}
    found: dict[str, dict[str, Any]] = {}
    for path, value in last.items():
        section, _, rest = path.partition("/")
        name, _, what = rest.partition("/")
        if section == "sources" and sinks.is_number(value):
            found.setdefault(name, {})[what] = value
    whole = {what: sum(f.get(what, 0) for f in found.values()) for what in ("rows", "tokens")}
    if not whole["rows"]:
        return
    rows = [
        [
            name,
            f"{values.get('rows', 0):,}",
            f"{values.get('rows', 0) / whole['rows']:.2%}",
            f"{values.get('tokens', 0):,}",
            f"{values.get('epochs', 0):.3f}",
            _figure(values.get("weight")),
        ]
        for name, values in found.items()
    ]
    rows.append(["all", f"{whole['rows']:,}", "", f"{whole['tokens']:,}", "", ""])
    head = ["source", "rows read", "share", "tokens", "epochs", "weight now"]
    yield _table(head, rows, numbers=True)


def _experts(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How the tokens went to experts, over the logged steps of the training."""
    rows = []
    for name, label, show in (
        ("moe_dropped", "choices dropped, the experts being full", "{:.3%}".format),
        ("moe_load_max", "largest expert's load, of the mean", "{:.3f}".format),
    ):
        found = [
            r[name] for r in records if r.get("split") == "train" and sinks.is_number(r.get(name))
        ]
        if found:
            rows.append([label, *map(show, (found[-1], statistics.fmean(found), max(found)))])
    if rows:
        yield _table(["", "last", "mean", "most"], rows, numbers=True)


def _changed(records: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Of each validation set its loss before the first step and at the last evaluation; only runs from other weights have one before."""
    found: dict[str, list[float]] = {}
    for record in records:
        split, loss = record.get("split", "train"), record.get("loss_nats")
        if split != "train" and loss is not None and (split in found or record["step"] == 0):
            found.setdefault(split, []).append(loss)
    for split, losses in found.items():
        if len(losses) > 1:
            yield [split, *map(_figure, (losses[0], losses[-1])), f"{losses[-1] - losses[0]:+.4f}"]


def _plan(run: Path, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What was forecast, and what was."""
    plan = _json(run / "forecast.json", FORECAST)
    if not plan:
        return
    train = [r for r in records if r.get("split") == "train"]

    def measured(name: str, said: Callable[[float], str]) -> str:
        known = [r[name] for r in train if sinks.is_number(r.get(name))]
        return said(statistics.median(known)) if known else "-"

    def seconds(value: float) -> str:
        return f"{value:.3g}"

    def between(name: str, said: Callable[[float], str]) -> str:
        return " to ".join(map(said, plan[name]))

    planned, compiled = (
        plan[name]["total"] for name in ("bytes_per_device", "compiled_bytes_per_device")
    )
    rows = [
        ["memory a device", formatting.size(planned), formatting.size(compiled)],
        ["seconds a step", between("step_seconds", seconds), measured("step_seconds", seconds)],
        [
            "tokens a second",
            between("tokens_per_second", formatting.count),
            measured("tokens_per_second", formatting.count),
        ],
    ]
    yield _table(["", "plan", "actual"], rows, numbers=True)
    yield "<p>Memory: the compiler's account of the step. Assumed in the plan:</p>"
    yield f"<pre>{html.escape(chr(10).join(map(str, plan['assumed'])))}</pre>"


def _curves(run: Path) -> Iterator[str]:
    images = []
    for plot in (*PLOTS, *MAPS):
        path = run / "plots" / f"{plot.name}.png"
        if path.exists():
            data = base64.b64encode(path.read_bytes()).decode()
            images.append(
                f'<img alt="{html.escape(plot.title)}" src="data:image/png;base64,{data}">'
            )
    if images:
        yield f'<div class="plots">{"".join(images)}</div>'


def _samples(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The texts of the last step that sampled, and of the first, folded."""
    steps = sorted({record["step"] for record in records})
    for step in dict.fromkeys([*steps[-1:], *steps[:1]]):
        texts = [
            f"<pre><b>{html.escape(record['prompt'])}</b>{html.escape(record['text'])}</pre>"
            for record in records
            if record["step"] == step
        ]
        is_open = " open" if step == steps[-1] else ""
        yield f"<details{is_open}><summary>step {step}</summary>{''.join(texts)}</details>"


def _warnings(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Each text once: what the data lacks is said at every start of the run."""
    steps: dict[str, list[Any]] = {}
    for record in records:
        steps.setdefault(str(record.get("text", record)), []).append(record.get("step", "-"))
    if steps:
        lines = [
            f"step {at[0]}{f', {len(at)} times' if len(at) > 1 else ''}: {text}"
            for text, at in steps.items()
        ]
        yield f"<pre>{html.escape(chr(10).join(lines))}</pre>"


def _configuration(run: Path) -> Iterator[str]:
    config, provenance = _json(run / "config.json"), _json(run / "provenance.json")
    if not config:
        return
    rows = [[path, json.dumps(value), provenance.get(path, "")] for path, value in _leaves(config)]
    chosen = [row for row in rows if row[2] not in ("", "default")]
    if chosen:
        yield _table(["setting", "value", "set by"], chosen)
    table = _table(["setting", "value", "set by"], rows)
    yield f"<details><summary>all {len(rows)} settings</summary>{table}</details>"
    command = run / "command.sh"
    if command.exists():
        lines = command.read_text(encoding="utf-8", errors="replace").splitlines()
        yield f"<pre>{html.escape(chr(10).join(lines[-1:]))}</pre>"


def _environment(run: Path) -> Iterator[str]:
    if environment := _json(run / "environment.json"):
        rows = [[path, json.dumps(value)] for path, value in _leaves(environment)]
        yield f"<details><summary>versions, devices, flags</summary>{_table(['fact', 'value'], rows)}</details>"


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    numbers: bool = False,
    classes: Sequence[str] = (),
) -> str:
    """A table; with `numbers`, every column but the first is set flush right."""

    def cells(tag: str, row: Sequence[Any]) -> str:
        return "".join(
            f"<{tag}{' class=number' if numbers and i else ''}>{html.escape(str(cell))}</{tag}>"
            for i, cell in enumerate(row)
        )

    rows = list(rows)
    marks = classes or [""] * len(rows)
    body = "".join(
        f"<tr{f' class={mark}' if mark else ''}>{cells('td', row)}</tr>"
        for row, mark in zip(rows, marks, strict=True)
    )
    return f'<div class="scroll"><table><tr>{cells("th", head)}</tr>{body}</table></div>'


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value and path.count(".") < DEEPEST:
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else key)
    else:
        yield path, value


def _measured(record: Mapping[str, Any], name: str) -> str:
    """Return a figure of a record, the loss with its standard error if it has one."""
    error = record.get("loss_stderr") if name == "loss_nats" else None
    return _figure(record.get(name)) + ("" if error is None else f" \u00b1 {error:.2g}")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _json(path: Path, shape: Shape = MappingProxyType({})) -> dict[str, Any]:
    """The object in a JSON file of the run, empty where there is no such file. Raises DataError where it is none, or of another shape."""
    if not path.exists():
        return {}
    value = sinks.read_json(path)
    if wrong := sinks.misshapen(value, shape):
        raise _misshapen(path, wrong)
    return value


def _misshapen(path: Path, wrong: str) -> DataError:
    return DataError(
        f"{path.name} of the run is damaged",
        where=str(path),
        why=f"it {wrong}",
        fix=f"mv {shlex.quote(str(path))} {shlex.quote(f'{path}.damaged')}    # the report leaves its part out",
    )
