"""Show, explain, compare and validate configs, with the origin of every value.

jaxlm config show --config=FILE          every value and its origin
jaxlm config explain optim.lr            doc, type, unit, range, default, value
jaxlm config diff A B                    changed settings of two config files or run directories
jaxlm config validate --config=FILE      exit 0 if the config is valid, else 2
jaxlm config plot --config=FILE          plot of the learning rate over the run
"""

from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser, add_flag
from jaxlm.cli.output import Output
from jaxlm.core import config, problems
from jaxlm.core.config_file import OtherSchema
from jaxlm.core.errors import ConfigError
from jaxlm.core.sections import fields, show
from jaxlm.corpus.config import Recipe
from jaxlm.corpus.mix.config import Mix
from jaxlm.recipes.config import Run

SCHEMAS: tuple[type, ...] = (Run, Recipe, Mix)


def add_arguments(parser: Parser) -> None:
    parser.add_action("show", _show, "every value and its origin")
    doc = "doc, type, range, default and value of a setting"
    explain = parser.add_action("explain", _explain, doc)
    doc = "settings as optim.lr, or sections (the whole config); `recipe`, `mix`: jaxlm data"
    explain.add_argument("paths", nargs="*", metavar="path", help=doc)
    doc = "changed settings of two configs; --config.a.b=V applies to the second"
    diff = parser.add_action("diff", _diff, doc)
    diff.withhold("A and B are the configs; --config.a.b=V changes B", "--config")
    diff.add_argument("a", help="config file, config.json or run directory")
    diff.add_argument("b", help="config file, config.json or run directory")
    parser.add_action("validate", _validate, "validity of a config, and cautions")
    plot = parser.add_action("plot", _plot, "plot of the learning rate over the run")
    doc = "image file, which replaces an earlier one"
    add_flag(plot, "--out", "FILE", "learning_rate.png", doc)


def _show(args: Any, out: Output) -> int:
    loaded = _load(args, is_part=True)
    try:
        _load(args)
    except ConfigError as error:  # a shipped config may lack what a user names, such as the data
        out.log(f"caution: a run would be refused: {error.what}; see jaxlm config validate")
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
    return out.result({"config": config.to_json(loaded.value), "provenance": origins}, lines)


def _validate(args: Any, out: Output) -> int:
    loaded = _load(args)
    count = len(loaded.provenance)
    chosen = sum(origin.kind != "default" for origin in loaded.provenance.values())
    lines, cautions = [f"valid: {count} settings, {chosen} of them not at their default"], []
    for path, why, fix in loaded.value.cautions() if isinstance(loaded.value, Run) else ():
        lines.append(f"caution: {path}: {why}; if this is not intended, {fix}")
        cautions.append({"path": path, "why": why, "fix": fix})
    answer = {"valid": True, "settings": count, "chosen": chosen, "cautions": cautions}
    return out.result(answer, lines)


def _explain(args: Any, out: Output) -> int:
    """Explain each of the settings or sections, or list the whole config."""
    paths = args.paths or [""]
    explained = [_explained(args, path) for path in paths]
    answers = {path: each for path, (each, _) in zip(paths, explained, strict=True)}
    answer = explained[0][0] if len(paths) == 1 else answers
    return out.result(answer, [text for _, text in explained])


def _explained(args: Any, path: str) -> tuple[dict[str, Any], str]:
    """Return the explanation of a setting as JSON, and as text.

    The path belongs to the config of a run, unless only another schema has the setting.
    """
    first = path.partition(".")[0]
    known_by = (each for each in SCHEMAS if first in (problems.root_name(each), *fields(each)))
    schema = next(known_by, Run)
    loaded = config.load(schema, args.config or args.workdir, args.overrides, is_part=True)
    if path in ("", problems.root_name(schema)):
        sections = [name.partition(".")[0] for name in config.flatten(loaded.value)]
        names = list(dict.fromkeys(sections))
        return {"settings": names}, "\n".join(_line(schema, loaded, name) for name in names)
    known = config.explain(schema, loaded, path)
    facts = {name: getattr(known, name) for name in ("doc", "type", "unit", "range")}
    rows = facts | {"default": _shown(known.default), "value": _shown(known.value)}
    rows["set by"] = str(known.origin)
    if known.value is config.ABSENT:
        rows["set by"] = ""
        if known.settings:
            rows["default"] = rows["value"] = ""
        else:
            rows["value"] = "not a setting of this config"
    text = [known.path, *(f"  {label:<8} {value}" for label, value in rows.items() if value)]
    inner = [f"  {_line(schema, loaded, name)}" for name in known.settings]
    values = {name: config.json_value(getattr(known, name)) for name in ("default", "value")}
    answer = {"path": known.path, **facts, **values, "origin": str(known.origin)}
    answer |= {"settings": list(known.settings), "named": known.named}
    if known.named:
        inner += ["", f"published, as --config.{known.path}=NAME"]
        inner += [f"  {arm:<12} {', '.join(names)}" for arm, names in known.named.items()]
    return answer, "\n".join(text + inner)


def _line(schema: type, loaded: config.Loaded, path: str) -> str:
    """Return a setting in one line."""
    known = config.explain(schema, loaded, path)
    return f"{path:<24} {'' if known.value is config.ABSENT else show(known.value):<14} {known.doc}"


def _diff(args: Any, out: Output) -> int:
    a = _read(args.a, (), is_part=True).value
    b = config.load(type(a), args.b, args.overrides, is_part=True).value
    changes, lines, records = config.diff(a, b), [], []
    width = max((len(each.path) for each in changes), default=0)
    for each in changes:
        lines.append(f"{each.path:<{width}}  {_shown(each.old)} -> {_shown(each.new)}")
        records.append(
            {
                "path": each.path,
                "old": config.json_value(each.old),
                "new": config.json_value(each.new),
            }
        )
    return out.result({"changes": records}, lines or "no difference")


def _plot(args: Any, out: Output) -> int:
    run = config.load(Run, args.config or args.workdir, args.overrides).value

    from jaxlm.recipes.diagnose import schedule_plot

    answer = schedule_plot.draw(run, Path(args.out))
    rates = [point["learning_rate"] for point in answer["points"]]
    steps = f"{answer['schedule']} over {run.train.steps:,} steps"
    curve = f"{rates[0]:.3g} at first, {max(rates):.3g} at most, {rates[-1]:.3g} at the end"
    return out.result(answer, [f"{steps}: {curve}", f"plot  {answer['plot']}"])


def _shown(value: Any) -> str:
    return "(absent)" if value is config.ABSENT else show(value)


def _load(args: Any, *, is_part: bool = False) -> config.Loaded:
    return _read(args.config or args.workdir, args.overrides, is_part=is_part)


def _read(file: str | None, overrides: Any, *, is_part: bool) -> config.Loaded:
    """Load the config of a run, or of `jaxlm data run` or `mix` if the file returns that."""
    try:
        return config.load(Run, file, overrides, is_part=is_part)
    except OtherSchema as error:
        return config.load(error.schema, file, overrides, is_part=is_part)
