"""Shows what a run would be, and says who decided it.

jaxlm config show --config=FILE          every value, and who set it
jaxlm config explain optim.lr            doc, type, unit, range, default, value
jaxlm config diff A B                    what differs; A and B are config files, config.json files or run directories
jaxlm config validate --config=FILE      exit 0 where it is right, 2 where it is not
jaxlm config plot --config=FILE          the learning rate over the run, as a picture
"""

import argparse
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import withhold
from jaxlm.cli.output import Output
from jaxlm.core import config, problems
from jaxlm.core.schema import fields
from jaxlm.core.values import show
from jaxlm.corpus.config import Recipe
from jaxlm.corpus.mix.config import Mix
from jaxlm.recipes.config import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The five actions."""
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="show|explain|diff|validate|plot"
    )
    actions.add_parser("show", help="every value, and who set it")
    actions.add_parser("validate", help="whether a config is right")
    explain = actions.add_parser("explain", help="all there is to know about a setting")
    explain.add_argument(
        "paths",
        nargs="*",
        metavar="path",
        help="such as optim.lr, or a section such as optim; none is the whole config; `recipe` and "
        "`mix` are those of jaxlm data run and data mix",
    )
    diff = actions.add_parser(
        "diff", help="what differs between two configs; --config.a.b=V applies to the second"
    )
    withhold(diff, "--config", why="A and B are the two; --config.a.b=V changes B")
    diff.add_argument("a", help="a config file, a config.json or a run directory")
    diff.add_argument("b", help="another")
    plot = actions.add_parser("plot", help="draw the learning rate over the run")
    plot.add_argument(
        "--out",
        default="learning_rate.png",
        metavar="FILE",
        help="the picture, which replaces an earlier one (learning_rate.png)",
    )


def run(args: Any, out: Output) -> int:
    """Answers the question that the action asks."""
    actions = {
        "show": _show,
        "validate": _validate,
        "explain": _explain,
        "diff": _diff,
        "plot": _plot,
    }
    return actions[args.action](args, out)


def _show(args: Any, out: Output) -> int:
    loaded = _load(args)
    values = {path: show(value) for path, value in config.flatten(loaded.value).items()}
    width = max(len(path.rpartition(".")[2]) + 2 * path.count(".") for path in values)
    room = max(len(text) for text in values.values() if len(text) <= 40)
    lines: list[str] = []
    shown: list[str] = []
    for path, text in values.items():
        *sections, name = path.split(".")
        for depth, section in enumerate(sections):
            if shown[: depth + 1] != sections[: depth + 1]:
                lines.append(f"{'  ' * depth}{section}")
                shown = sections[: depth + 1]
        label = f"{'  ' * len(sections)}{name}"
        lines.append(f"{label:<{width}}  {text:<{room}}  {loaded.provenance[path]}")
    origins = {path: str(origin) for path, origin in loaded.provenance.items()}
    out.result({"config": config.to_json(loaded.value), "provenance": origins}, "\n".join(lines))
    return 0


def _validate(args: Any, out: Output) -> int:
    loaded = _load(args)
    count = len(loaded.provenance)
    chosen = sum(origin.kind != "default" for origin in loaded.provenance.values())
    cautions = list(loaded.value.cautions())
    lines = [f"valid: {count} settings, {chosen} of them not left at their default"]
    lines += [f"but {path}: {why}; if that is not meant, {fix}" for path, why, fix in cautions]
    told = [dict(zip(("path", "why", "fix"), each, strict=True)) for each in cautions]
    out.result(
        {"valid": True, "settings": count, "chosen": chosen, "cautions": told}, "\n".join(lines)
    )
    return 0


def _explain(args: Any, out: Output) -> int:
    """Explain each of the settings or sections, or list the whole config."""
    paths = args.paths or [""]
    explained = [_explained(args, path) for path in paths]
    answer = explained[0][0] if len(paths) == 1 else {path: each for path, (each, _) in zip(paths, explained, strict=True)}  # fmt: skip
    out.result(answer, "\n".join(text for _, text in explained))
    return 0


def _explained(args: Any, path: str) -> tuple[dict[str, Any], str]:
    """Return what is known of a setting as JSON, and as text."""
    schema = _schema(path)
    if args.config or args.workdir or args.overrides:
        loaded = config.load(schema, args.config or args.workdir, args.overrides)
    else:  # the defaults need not be a config that runs: a mix has no sources
        loaded = config.Loaded(schema(), {})
    if path in ("", problems.root_name(schema)):
        names = _sections(loaded.value)
        return {"settings": names}, "\n".join(_line(schema, loaded, name) for name in names)
    found = config.explain(schema, loaded, path)
    rows = {
        "doc": found.doc,
        "type": found.type,
        "unit": found.unit,
        "range": found.range,
        "default": _shown(found.default),
        "value": _shown(found.value),
        "set by": str(found.origin),
    }
    if found.value is config.ABSENT:
        rows |= (
            {"default": "", "value": "", "set by": ""}
            if found.settings
            else {"value": "not a setting of this config", "set by": ""}
        )
    text = [found.path, *(f"  {label:<8} {value}" for label, value in rows.items() if value)]
    inner = [f"  {_line(schema, loaded, name)}" for name in found.settings]
    answer = {
        "path": found.path,
        "doc": found.doc,
        "type": found.type,
        "unit": found.unit,
        "range": found.range,
        "default": _plain(found.default),
        "value": _plain(found.value),
        "origin": str(found.origin),
        "settings": list(found.settings),
        "named": found.named,
    }
    if found.named:
        inner += ["", f"published, as --config.{found.path}=NAME"]
        inner += [f"  {arm:<12} {', '.join(names)}" for arm, names in found.named.items()]
    return answer, "\n".join(text + inner)


def _schema(path: str) -> type:
    """Return the config that a path belongs to: a run's, unless only another has such a setting."""
    first = path.partition(".")[0]
    known: tuple[type, ...] = (Run, Recipe, Mix)
    for schema in known:
        if first in (problems.root_name(schema), *fields(schema)):
            return schema
    return Run


def _sections(value: Any) -> list[str]:
    return list(dict.fromkeys(path.partition(".")[0] for path in config.flatten(value)))


def _line(schema: type, loaded: config.Loaded, path: str) -> str:
    """A setting in one line."""
    found = config.explain(schema, loaded, path)
    return f"{path:<24} {'' if found.value is config.ABSENT else show(found.value):<14} {found.doc}"


def _diff(args: Any, out: Output) -> int:
    a = config.load(Run, args.a).value
    b = config.load(Run, args.b, args.overrides).value
    changes = config.diff(a, b)
    width = max((len(change.path) for change in changes), default=0)
    text = "\n".join(
        f"{change.path:<{width}}  {_shown(change.old)} -> {_shown(change.new)}"
        for change in changes
    )
    listed = [
        {"path": change.path, "old": _plain(change.old), "new": _plain(change.new)}
        for change in changes
    ]
    out.result({"changes": listed}, text or "no difference")
    return 0


def _plot(args: Any, out: Output) -> int:
    run = _load(args).value

    from jaxlm.recipes.diagnose import schedule_plot

    answer = schedule_plot.draw(run, Path(args.out))
    rates = [point["learning_rate"] for point in answer["points"]]
    text = (
        f"{answer['schedule']} over {run.train.steps:,} steps: "
        f"{rates[0]:.3g} at first, {max(rates):.3g} at most, {rates[-1]:.3g} at last"
    )
    out.result(answer, f"{text}\nplot  {answer['plot']}")
    return 0


def _shown(value: Any) -> str:
    return "(not there)" if value is config.ABSENT else show(value)


def _plain(value: Any) -> Any:
    return (
        value.plain()
        if isinstance(value, config.Span)
        else None
        if value is config.ABSENT
        else value
    )


def _load(args: Any) -> config.Loaded:
    return config.load(Run, args.config or args.workdir, args.overrides)
