"""Print a shell script that completes verbs, flags, settings and their values.

jaxlm completion bash > ~/.local/share/bash-completion/completions/jaxlm
jaxlm completion zsh  > ~/.zfunc/_jaxlm     # a folder of fpath
jaxlm completion fish > ~/.config/fish/completions/jaxlm.fish

The script contains the words of the installed version, so that a completion starts no Python.
Write it again after an update.
"""

import argparse
import importlib
import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxlm.cli.arguments import RUN, Parser
from jaxlm.cli.output import Output
from jaxlm.core import sections, shipped
from jaxlm.monitor import chips

SHELLS = ("bash", "zsh", "fish")
SETTING = "--config.a.b"  # the flag that stands for all settings in SHARED
PATHS = ("DIR", "FILE", "RUN", "PATH", "GLOB")  # placeholders of files and folders


class Word(NamedTuple):
    """A word of a command line and its completions.

    `context` is a verb, a verb and its action, `@` and the schema of settings, or empty for verbs.
    `values` are separated by spaces; `.` is a file, `=` is a value of any kind. A word that takes
    no value has none.
    """

    context: str
    word: str
    values: str
    doc: str


def add_arguments(parser: Parser) -> None:
    parser.withhold("the words are those of every config")
    doc = "the shell (that of $SHELL, else bash)"
    parser.add_argument("shell", nargs="?", choices=SHELLS, help=doc)


def run(args: Any, out: Output) -> int:
    login = Path(os.environ.get("SHELL", "")).name
    shell = args.shell or (login if login in SHELLS else "bash")
    text = script(shell)
    return out.result({"shell": shell, "script": text}, text.rstrip("\n"))


def script(shell: str) -> str:
    """Return the script for a shell."""
    template = Path(__file__).with_name(f"completion.{shell}").read_text(encoding="utf-8")
    rows = []
    for each in words():
        doc = "" if shell == "bash" else each.doc
        cells = (each.context, each.word, each.values, doc)
        rows.append("|".join(cell.replace("|", "/").replace("'", "\u2019") for cell in cells))
    return template.replace("@WORDS@", "\n".join(rows))


def words() -> list[Word]:
    """Return all words that can be completed."""
    from jaxlm.cli.main import VERBS

    result, schemas = [], {}
    for name, verb in VERBS.items():
        result.append(Word("", name, "", verb.help))
        parser = Parser(prog=f"jaxlm {name}", description="")
        module = importlib.import_module(verb.module)
        module.add_arguments(parser)
        for action, each in parser.actions.items():
            result += _of_parser(f"{name} {action}", each)
            if schema := each.get_default("schema"):
                schemas[schema] = f"{name} {action}"
        parser.add_shared()  # after the actions, which share the flags of the verb
        result += _of_parser(name, parser)
    for schema in (RUN, *schemas):
        module_name, _, kind = schema.partition(":")
        section = getattr(importlib.import_module(module_name), kind)
        context = "@" if schema == RUN else f"@{schemas[schema]}"
        by_path: dict[str, tuple[dict[str, None], str]] = {}
        for path, (values, doc) in _settings(section):
            by_path.setdefault(path, ({}, doc))[0].update(dict.fromkeys(values))
        for path, (known, doc) in by_path.items():
            result.append(Word(context, f"--config.{path}", " ".join(known) or "=", doc))
    return result


def _of_parser(context: str, parser: Parser) -> Iterator[Word]:
    """Yield the flags, actions and named arguments of a parser."""
    for name, action in parser.actions.items():
        yield Word(context, name, "", (action.description or "").partition("\n")[0])
    for each in parser._actions:
        doc = (each.help or "").replace("%%", "%")
        if not each.option_strings:
            if each.choices and not parser.actions:
                yield from (Word(context, str(value), "", doc) for value in each.choices)
            elif any(path in str(each.metavar or "") for path in PATHS):
                yield Word(context, "", ".", doc)
            continue
        flag = each.option_strings[-1]
        if flag != SETTING:
            yield Word(context, flag, _values(flag, each), doc)


def _values(flag: str, action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if flag == "--config":
        names = shipped.every_name()
        sizes = sections.fields(_run_schema())["model"].named
        return " ".join([".", *names, *sizes])
    if action.metavar == "MACHINE":
        gpus = (name for name, chip in chips.CHIPS.items() if not chip.is_tpu)
        return " ".join(["cpu", *gpus, *chips.SLICES])
    if action.choices:
        return " ".join(map(str, action.choices))
    return "." if any(path in str(action.metavar) for path in PATHS) else "="


def _run_schema() -> type:
    module, _, kind = RUN.partition(":")
    schema: type = getattr(importlib.import_module(module), kind)
    return schema


def _settings(section: type, path: str = "") -> Iterator[tuple[str, tuple[list[str], str]]]:
    """Yield path, (values, meaning) of the settings of a section, once for each arm."""
    for name, known in sections.fields(section).items():
        inner = sections.join(path, name)
        if known.named:
            yield inner, (list(known.named), known.doc)
        for arm in known.arms:
            yield from _settings(arm, inner)
        if not known.arms:
            yield inner, (list(_choices(known.kind)), known.doc)


def _choices(kind: Any) -> Iterator[str]:
    """Yield the values that an annotation names."""
    if typing.get_origin(kind) is Literal:
        yield from map(str, typing.get_args(kind))
    elif kind is bool:
        yield from ("true", "false")
    else:
        for inner in typing.get_args(kind):
            yield from ["None"] if inner is type(None) else _choices(inner)
