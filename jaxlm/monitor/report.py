"""The report of a run: one self-contained HTML file, made by the template `report.html.jinja`."""

import contextlib
import itertools
import json
import os
import re
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from jaxlm.core.errors import DataError
from jaxlm.core.quoting import printable
from jaxlm.monitor import charts, formatting, layer_maps, reward_report, sinks, task_results
from jaxlm.monitor.charts import Chart, Series
from jaxlm.monitor.plots import PLOTS
from jaxlm.monitor.sinks import FIGURES, Record, Shape

STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")  # also used by corpus

CONTENTS = "<!-- contents -->"
HEADING = re.compile(r'<h2 id="([a-z-]+)">([^<]*)</h2>')
MAX_LINKS = 24  # to other runs
SURPRISES = (1, 2, 4, 6)  # nats from which a token has the next color
MAX_DEPTH = 20  # levels of a JSON file that get rows of their own
SAMPLES: Shape = {"step": sinks.is_step, "prompt": sinks.is_text, "text": sinks.is_text}
FORECAST: Shape = {
    **dict.fromkeys(
        ("bytes_per_device", "compiled_bytes_per_device"),
        lambda value: isinstance(value, dict) and sinks.is_number(value.get("total")),
    ),
    **dict.fromkeys(
        ("step_seconds", "tokens_per_second"),
        lambda value: isinstance(value, list) and list(map(sinks.is_number, value)) == [True] * 2,
    ),
    "assumed": lambda value: isinstance(value, list),
}
EXIT: Shape = {"code": sinks.is_number, "cause": sinks.is_text, "time_unix": sinks.is_number}

Rows = list[list[str]]


def write(run: str | os.PathLike[str]) -> Path:
    """Write report.html of a run directory from the files in it; parts without a file are left out.

    `baselines.json` gives {name: bits per byte} of other ways to code the validation set. Raises
    DataError if a file of the run is damaged, NotWritable if the report cannot be written.
    """
    target = Path(run) / "report.html"
    sinks.replace(target, render(Path(run)).encode())
    return target


def render(run: Path) -> str:
    """Return the report as HTML."""
    import markupsafe

    records = sinks.read(run / "metrics.jsonl")
    train = [record for record in records if record.get("split") == "train"]
    environment = read_object(run / "environment.json")
    config = read_object(run / "config.json")
    coders = _coders(run)
    best = best_evaluation(config, records)
    files = sorted(run.glob(task_results.FILES))
    results = [read_object(path, task_results.SHAPE) for path in files]
    return filled(
        "report.html.jinja",
        title=f"jaxlm run {run.resolve().name}",
        lead=_lead(run, config, environment, records, best, coders),
        summary=_summary(run, records),
        charts=drawn(_charts(records, best, coders)),
        links=_links(run),
        **_result(run, records, train),
        task_head=task_results.HEAD,
        tasks=task_results.rows(results),
        task_charts=drawn(task_results.curves(results, records)),
        reward_charts=drawn(reward_report.curves(records)),
        rewarded=reward_report.samples(run),
        speed=_speed(train),
        advice=batch_advice(records),
        sources=_sources(train),
        experts=_experts(train),
        **_plan(run, train),
        maps=markupsafe.Markup("".join(map(layer_maps.render, layer_maps.every(records)))),
        samples=_samples(run),
        warnings=_warnings(run),
        **_configuration(run),
        environment=_rows(environment),
    )


def filled(template: str, **values: Any) -> str:
    """Return a page of this folder with its values, the style, and the script of its charts.

    The page gets a table of contents, with a link to each heading that has an id.
    """
    import jinja2
    import markupsafe

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    templates = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    templates.filters["printable"] = printable  # of texts that a model wrote
    style, script = markupsafe.Markup(STYLE), markupsafe.Markup(charts.SCRIPT)
    values |= {"style": style, "script": script, "contents": markupsafe.Markup(CONTENTS)}
    return with_contents(templates.get_template(template).render(**values))


def with_contents(page: str) -> str:
    """Return a page with its table of contents in the place of CONTENTS."""
    heads = HEADING.findall(page)
    items = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in heads)
    contents = f'<nav aria-label="contents"><ul>{items}</ul></nav>' if heads else ""
    return page.replace(CONTENTS, contents, 1)


def drawn(figures: Sequence[Chart]) -> Any:
    """Return charts as markup for a page."""
    import markupsafe

    return markupsafe.Markup("".join(map(charts.render, figures)))


def batch_advice(records: Sequence[Record]) -> str | None:
    """Return the cost of doubling and of halving the batch; None without a noise scale above 0.

    At a noise scale of N, a batch of B tokens needs 1 + N / B times the steps of an infinite batch
    to reach a loss, and 1 + B / N times the tokens of the smallest batch, each at its best rate.

    Source: McCandlish et al. 2018, arXiv:1812.06162, equation 2.11 and section 2.3.
    """
    train = [r for r in records if r.get("split") == "train" and sinks.is_number(r.get("tokens"))]
    scales = _numbers(train, "noise_scale_tokens")
    earlier = [r for r in train if r["step"] < train[-1]["step"]]
    if not earlier or not scales or scales[-1] <= 0:
        return None
    last, before, scale = train[-1], earlier[-1], scales[-1]
    batch = (last["tokens"] - before["tokens"]) / (last["step"] - before["step"])

    def cost(other: float) -> str:
        steps = (1 + scale / other) / (1 + scale / batch) - 1
        tokens = (1 + other / scale) / (1 + batch / scale) - 1
        changes = {"steps": steps, "tokens": tokens}.items()
        return " and ".join(f"{abs(x):.0%} {'more' if x > 0 else 'fewer'} {y}" for y, x in changes)

    tokens, noise = (formatting.count(round(value)) for value in (batch, scale))
    return (
        f"{tokens} tokens, and the noise scale of the gradient is {noise}: to the same loss, each "
        f"at its best rate, twice the batch would take {cost(2 * batch)}, half of it "
        f"{cost(batch / 2)}"
    )


def best_evaluation(config: Any, records: Sequence[Record]) -> Record | None:
    """Return the record with the lowest loss of the set that ranks checkpoints, None without one.

    That is the set that `eval.follow` names, or the first one of the records.
    """
    scored = [
        (loss, record)
        for record in records
        if record.get("split", "train") not in ("train", None)
        and sinks.is_number(record.get("loss_nats"))
        and (loss := sinks.ranking_loss(record)) is not None
    ]
    if not scored:
        return None
    section = config.get("eval")
    follow = section.get("follow") if isinstance(section, dict) else None
    splits = [record["split"] for _, record in scored]
    ranking = follow if follow in splits else splits[0]
    ranked = [(loss, record) for loss, record in scored if record["split"] == ranking]
    return min(ranked, key=lambda each: each[0])[1]


def _coders(run: Path) -> dict[str, float]:
    """Return bits per byte of coders without a model, by name."""
    path = run / "baselines.json"
    coders = read_object(path)
    if wrong := [name for name, bits in coders.items() if not sinks.is_number(bits)]:
        raise _misshapen(path, f"has no number for {wrong[0]!r}")
    return coders


def _charts(
    records: Sequence[Record], best: Record | None, coders: dict[str, float]
) -> list[Chart]:
    """Return the charts that have numbers; that of the loss has all sets, and the coders."""
    result = []
    for plot in PLOTS:
        splits = ["train"]
        if plot.every_split:
            others = (record.get("split") or "train" for record in records)
            splits = list(dict.fromkeys([*splits, *others]))
        curves = {split: charts.points(records, split, plot.field) for split in splits}
        series = [
            Series(split, points, number, is_marked=split != "train")
            for number, (split, points) in enumerate(curves.items())
            if points
        ]
        if not series:
            continue
        marked = [n for n, each in enumerate(series) if best and each.name == best["split"]]
        is_loss = plot.name == "loss"
        levels = charts.by_level(coders, best) if best and is_loss else []
        mark = marked[0] if marked and is_loss else None
        chart = Chart(plot.title, plot.label, series, plot.scale == "log", levels, mark)
        result.append(chart)
    return result


def _lead(
    run: Path,
    config: dict[str, Any],
    environment: dict[str, Any],
    records: Sequence[Record],
    best: Record | None,
    coders: dict[str, float],
) -> str:
    """Return the run in a sentence: model, parameters, data, hardware, time, and the verdict."""
    settings = dict(leaves(config)) if config else {}
    family, steps = settings.get("model.family"), settings.get("train.steps")
    train = [record for record in records if record.get("split") == "train"]
    if not family or not train:
        return ""
    count = read_object(run / "forecast.json").get("parameters")
    size = f" of {formatting.count(count)} parameters" if sinks.is_number(count) else ""
    sources = settings.get("data.train")
    names = [str(each) for each in sources] if isinstance(sources, list) else [str(sources)]
    data = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    devices = environment.get("devices")
    machine = ""
    if isinstance(devices, dict) and devices:
        machine = " on " + ", ".join(f"{number} x {kind}" for kind, number in devices.items())
    spent = [r["elapsed_seconds"] for r in train if sinks.is_number(r.get("elapsed_seconds"))]
    starts = [a for a, b in itertools.pairwise(spent) if b < a]  # each begins at 0
    time_ = f" in {formatting.duration(sum([*starts, *spent[-1:]]))}" if spent else ""
    of = f" of {steps}" if sinks.is_number(steps) and steps != train[-1]["step"] else ""
    name = "An" if str(family)[:1] in "aeiou" else "A"
    text = (
        f"{name} {family} model{size}, trained on {data}{machine} for {train[-1]['step']}{of} steps"
    )
    return f"{text}{time_}. {_verdict(best, coders)}".rstrip()


def _verdict(best: Record | None, coders: dict[str, float]) -> str:
    """Return the best evaluation, and its place among the coders."""
    if best is None:
        return "It was not evaluated."
    text = (
        f"The best loss on {best['split']} is {best['loss_nats']:.4f} nats, at step {best['step']}"
    )
    bits: Any = best.get("bits_per_byte")
    if not sinks.is_number(bits):
        return f"{text}."
    text += f", {bits:.3f} bits per byte"
    ranked = sorted(coders.items(), key=lambda coder: coder[1])
    beaten = [name for name, value in ranked if value > bits]
    others = [name for name, value in ranked if value <= bits]
    parts = [f"better than {beaten[0]}"] if beaten else []
    parts += [f"worse than {others[-1]}"] if others else []
    return f"{text}: {', '.join(parts)}." if parts else f"{text}."


def _summary(run: Path, records: Sequence[Record]) -> str:
    """Return progress, time and end of the run in one line."""
    parts = []
    if records:
        last = max(records, key=lambda record: record["step"])
        parts.append(f"step {last['step']}")
        tokens = (r["tokens"] for r in records if r.get("tokens") and r.get("split") == "train")
        if (most := max(tokens, default=None)) is not None:
            parts.append(f"{formatting.count(most)} tokens")
        with contextlib.suppress(ValueError, OverflowError, OSError):  # not a valid time
            stamp = time.gmtime(last.get("time_unix") or 0)
            parts.append(time.strftime("%Y-%m-%d %H:%M UTC", stamp))
    if end := read_object(run / "exit.json", EXIT):
        parts.append(f"ended with code {end['code']}: {end['cause']}")
    return " · ".join(parts)


def _result(run: Path, records: Sequence[Record], train: Sequence[Record]) -> dict[str, Any]:
    """Return the verdict, the last losses, losses before and after, and baselines."""
    verdict = read_object(run / "divergence.json")
    is_worse = bool(verdict.get("worse_than"))
    scored = [record for record in records if record.get("loss_nats") is not None]
    last = {record.get("split", "train"): record for record in scored}
    result = [
        [split, record["step"], *(_measured(record, name) for name in FIGURES)]
        for split, record in last.items()
    ]
    coders = _coders(run)
    baselines = [(name, bits, "") for name, bits in coders.items()]
    newest = max((record["step"] for record in records), default=0)
    for split, record in last.items() if coders else ():
        if record.get("bits_per_byte") is not None:
            name = f"this run, {split}{formatting.evaluation_suffix(record, newest)}"
            mark = "worse" if is_worse or record.get("worse_than") else "ours"
            baselines.append((name, record["bits_per_byte"], mark))
    baselines.sort(key=lambda row: -row[1])
    return {
        "verdict": verdict if is_worse else None,
        "figures": list(FIGURES),
        "result": result,
        "is_sampled": any(record.get("loss_stderr") is not None for record in last.values()),
        "changed": list(_changed(records)),
        "baselines": [[name, _figure(bits)] for name, bits, _ in baselines],
        "baseline_classes": [mark for *_, mark in baselines],
    }


def _changed(records: Sequence[Record]) -> Iterator[list[str]]:
    """Yield each set's first and last loss, if a loss before the first step is known."""
    by_split: dict[str, list[float]] = {}
    for record in records:
        split, loss = record.get("split", "train"), record.get("loss_nats")
        if split != "train" and loss is not None and (split in by_split or record["step"] == 0):
            by_split.setdefault(split, []).append(loss)
    for split, (first, *_, last) in ((s, each) for s, each in by_split.items() if len(each) > 1):
        yield [split, _figure(first), _figure(last), f"{last - first:+.4f}"]


def _speed(train: Sequence[Record]) -> dict[str, str] | None:
    """Return median throughput and MFU, and peak memory."""
    timed = [record for record in train if record.get("tokens_per_second")]
    if not timed:
        return None
    speed = statistics.median_high(record["tokens_per_second"] for record in timed)
    mfu = [record["mfu"] for record in timed if record.get("mfu") is not None]
    unknown = "unknown: no published peak for this device"
    return {
        "tokens": formatting.count(speed),
        "mfu": f"{statistics.median_high(mfu):.1%}" if mfu else unknown,
        "memory": formatting.size(max(r.get("peak_bytes") or 0 for r in timed) or None),
    }


def _sources(train: Sequence[Record]) -> Rows:
    """Return rows, share, tokens, epochs and weight of each source of a mixture."""
    sources: dict[str, dict[str, Any]] = {}
    for path, value in (train[-1] if train else {}).items():
        section, _, rest = path.partition("/")
        name, _, what = rest.partition("/")
        if section == "sources" and sinks.is_number(value):
            sources.setdefault(name, {})[what] = value
    total = {what: sum(s.get(what, 0) for s in sources.values()) for what in ("rows", "tokens")}
    if not total["rows"]:
        return []
    table = []
    for name, values in sources.items():
        rows, tokens, epochs = (values.get(what, 0) for what in ("rows", "tokens", "epochs"))
        figures = [f"{rows:,}", f"{rows / total['rows']:.2%}", f"{tokens:,}", f"{epochs:.3f}"]
        table.append([name, *figures, _figure(values.get("weight"))])
    return [*table, ["all", f"{total['rows']:,}", "", f"{total['tokens']:,}", "", ""]]


def _experts(train: Sequence[Record]) -> Rows:
    """Return last, mean and maximum of the expert statistics over the logged steps."""
    figures = (
        ("moe_dropped", "choices dropped, the experts being full", "{:.3%}".format),
        ("moe_load_max", "largest expert's load, of the mean", "{:.3f}".format),
    )
    return [
        [label, *map(show, (values[-1], statistics.fmean(values), max(values)))]
        for name, label, show in figures
        if (values := _numbers(train, name))
    ]


def _plan(run: Path, train: Sequence[Record]) -> dict[str, Any]:
    """Return the forecast, and the measured values."""
    plan = read_object(run / "forecast.json", FORECAST)
    if not plan:
        return {"plan": [], "assumed": ""}

    def row(label: str, name: str, show: Callable[[float], str]) -> list[str]:
        values = _numbers(train, name)
        measured = show(statistics.median(values)) if values else "-"
        return [label, " to ".join(map(show, plan[name])), measured]

    names = ("bytes_per_device", "compiled_bytes_per_device")
    planned, compiled = (formatting.size(plan[name]["total"]) for name in names)
    rows = [
        ["memory per device", planned, compiled],
        row("seconds per step", "step_seconds", "{:.3g}".format),
        row("tokens per second", "tokens_per_second", formatting.count),
    ]
    return {"plan": rows, "assumed": "\n".join(map(str, plan["assumed"]))}


def _samples(run: Path) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return the samples of the last step that has any, and of the first."""
    records = sinks.read(run / "samples.jsonl", SAMPLES)
    steps = sorted({record["step"] for record in records})
    shown = dict.fromkeys([*steps[-1:], *steps[:1]])
    return [(step, [_with_spans(r) for r in records if r["step"] == step]) for step in shown]


def _with_spans(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with (text, nats, level of surprise) of each token, if known."""
    spans: list[tuple[str, str, int]] = []
    room = len(sample["text"])
    for entry in sample.get("tokens") or ():
        if not (isinstance(entry, list) and list(map(type, entry)) == [str, float]):
            return sample | {"spans": []}
        text, nats = entry
        if text[:room]:
            level = sum(nats >= least for least in SURPRISES)
            spans.append((text[:room], f"{nats:.2f}", level))
        room -= len(text[:room])
    whole = "".join(text for text, *_ in spans)
    return sample | {"spans": spans if whole == sample["text"] else []}


def _links(run: Path) -> list[tuple[str, str]]:
    """Return name and link of the reports of runs in the same folder, if it can be listed."""
    here, names = run.resolve(), []
    with contextlib.suppress(OSError):
        for folder in sorted(here.parent.iterdir()):
            files = (folder / "report.html", folder / "metrics.jsonl")
            if all(file.is_file() for file in files) and folder.resolve() != here:
                names.append(folder.name)
    return [(name, f"../{quote(name)}/report.html") for name in names[:MAX_LINKS]]


def _warnings(run: Path) -> list[str]:
    """Return each text once: warnings about the data are repeated at every start of the run."""
    by_text: dict[str, list[Any]] = {}
    for record in sinks.read(run / "warnings.jsonl", {}):
        by_text.setdefault(str(record.get("text", record)), []).append(record.get("step", "-"))
    texts = []
    for text, steps in by_text.items():
        first, times = f"step {steps[0]}", f", {len(steps)} times" if steps[1:] else ""
        is_named = text.startswith((f"{first}:", f"{first} ")) and not times
        texts.append(text if is_named else f"{first}{times}: {text}")
    return texts


def _configuration(run: Path) -> dict[str, Any]:
    """Return all settings, those that differ from the default, and the command line."""
    config, provenance = read_object(run / "config.json"), read_object(run / "provenance.json")
    rows = [[path, value, provenance.get(path, "")] for path, value in _rows(config)]
    command, last = run / "command.sh", None
    if config and command.exists():
        lines = command.read_text(encoding="utf-8", errors="replace").splitlines()
        last = "".join(lines[-1:])
    chosen = [row for row in rows if row[2] not in ("", "default")]
    return {"settings": rows, "chosen": chosen, "command": last}


def _rows(values: dict[str, Any]) -> Rows:
    return [[path, json.dumps(value)] for path, value in leaves(values) if values]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested JSON objects by dotted path."""
    if isinstance(value, dict) and value and path.count(".") < MAX_DEPTH:
        for key, child in value.items():
            yield from leaves(child, f"{path}.{key}" if path else key)
    else:
        yield path, value


def _numbers(records: Sequence[Record], name: str) -> list[float]:
    return [record[name] for record in records if sinks.is_number(record.get(name))]


def _measured(record: Record, name: str) -> str:
    """Return a figure of a record; the loss with its standard error, if known."""
    error = record.get("loss_stderr") if name == "loss_nats" else None
    return _figure(record.get(name)) + ("" if error is None else f" \u00b1 {error:.2g}")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def read_object(path: Path, shape: Shape = MappingProxyType({})) -> dict[str, Any]:
    """Return the object in a JSON file of the run, {} without one. DataError at another shape."""
    if not path.exists():
        return {}
    value = sinks.read_json(path)
    if wrong := sinks.misshapen(value, shape):
        raise _misshapen(path, wrong)
    return value


def _misshapen(path: Path, wrong: str) -> DataError:
    moved = shlex.join(["mv", str(path), f"{path}.damaged"])
    what, note = f"{path.name} of the run is damaged", "the report leaves its part out"
    return DataError(what, where=str(path), why=f"it {wrong}", fix=f"{moved}    # {note}")
