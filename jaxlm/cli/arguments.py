"""The words after a verb: settings of the config, what every verb takes, and the verb's own flags."""

import argparse
import contextlib
import dataclasses
import glob
import importlib
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxlm.core import config_file, load, problems
from jaxlm.core.errors import CommandError, JaxlmError
from jaxlm.core.schema import Setting
from jaxlm.core.spelling import distance, nearest
from jaxlm.core.values import show

RUN = "jaxlm.recipes.config:Run"  # what settings on the command line belong to
RUNS = ("*", "*/*")  # folders in which runs are looked for
SHOWN = 4  # lines of a fix
DEFAULTS = "defaults.json"  # a config that leaves every setting at its default

SHARED = {
    "--config": (
        "FILE[:ARG]",
        "a config file, the argument of its get_config, or a resolved config.json",
    ),
    "--config.a.b": (
        "VALUE",
        "a setting, whatever the file says; `jaxlm config explain a.b` tells what it takes",
    ),
    "--workdir": ("DIR", "the run directory"),
    "--json": (None, "one JSON object on stdout, all else on stderr"),
    "--quiet": (None, "only the answer"),
    "--trace": (None, "the whole traceback of an error"),
}


@dataclasses.dataclass(kw_only=True)
class Shared:
    """What every verb takes."""

    config: str | None = None
    overrides: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    workdir: str | None = None
    json: bool = False
    quiet: bool = False
    trace: bool = False

    def words(self, without: Collection[str] = ()) -> list[str]:
        """The flags as they could have been typed, some of SHARED left out."""
        settings = {f"--config.{path}": value for path, value in self.overrides}
        flags = {"--config": self.config, **settings, "--workdir": self.workdir}
        named = {name: f"{name}={value}" for name, value in flags.items() if value is not None}
        named |= {
            f"--{name}": f"--{name}" for name in ("json", "quiet", "trace") if getattr(self, name)
        }
        return [word for name, word in named.items() if known_as(name) not in without]


def known_as(flag: str) -> str:
    """The name in SHARED of a shared flag: settings have one for all."""
    return "--config.a.b" if flag.startswith("--config.") else flag


def withhold(parser: argparse.ArgumentParser, *flags: str, why: str) -> None:
    """Leaves flags of SHARED out of a verb, or of one action of it, where they would change nothing."""
    parser.set_defaults(withheld=dict.fromkeys(flags, why))


def check_taken(prog: str, withheld: dict[str, str], shared: Shared, rest: list[str]) -> None:
    """That no flag was given that the verb leaves out; `rest` are the verb's own words.

    Raises:
      CommandError: where one was; its fix is the command line without, or with what follows `--` taking it.
    """
    kept = shared.words(withheld)
    refused = [word for word in shared.words() if word not in kept]
    if not refused:
        return
    name = refused[0].partition("=")[0]
    moved = refused if "--" in rest else []
    raise CommandError(
        f"{prog.removeprefix('jaxlm ')} takes no {name}",
        where=f"{prog} {shlex.join(refused)}",
        why=withheld[known_as(name)],
        fix=shlex.join([*prog.split()[:2], *kept, *rest, *moved]),
    )


def extract(words: Sequence[str]) -> tuple[Shared, list[str]]:
    """Takes the shared flags out, wherever they stand before a `--`; the rest is the verb's.

    Raises:
      CommandError: where a flag that needs a value has none.
    """
    shared, rest = Shared(), []
    at = 0
    while at < len(words) and words[at] != "--":
        word = words[at]
        name, equals, value = word.partition("=")
        at += 1
        if name in ("--json", "--quiet", "--trace"):
            if equals:
                raise CommandError(
                    f"{name} takes no value", where=word, why="it is on where it is there", fix=name
                )
            setattr(shared, name[2:], True)
        elif name in ("--config", "--workdir") or name.startswith("--config."):
            if not equals:
                if at == len(words) or words[at].startswith("--"):
                    raise CommandError(
                        f"{name} needs a value",
                        where=word,
                        why="nothing follows it",
                        fix=_known(name),
                    )
                value = words[at]
                at += 1
            if name.startswith("--config."):
                shared.overrides.append((name.removeprefix("--config."), value))
            else:
                setattr(shared, name[2:], value)
        else:
            rest.append(word)
    return shared, [*rest, *words[at:]]


def needed(args: Any, name: str, *, fix: str = "") -> str:
    """Return the value of a shared flag that this verb cannot do without.

    Raises:
      CommandError: if it is not there; `fix` says what to add to this command line.
    """
    value = getattr(args, name)
    if not value:
        raise CommandError(
            f"--{name} is needed",
            where=f"jaxlm {shlex.join(args.words)}",
            why=SHARED[f"--{name}"][1],
            fix=fix or _known(f"--{name}"),
        )
    return value


def needed_run(args: Any) -> str:
    """Return --workdir of a verb that reads a run.

    Raises:
      CommandError: if it is not there; the fix names runs near the current directory.
    """
    folders = {path.parent for pattern in RUNS for path in Path().glob(f"{pattern}/config.json")}
    runs = sorted(path for path in folders if (path / "checkpoints").is_dir())
    flags = [f"--workdir={shlex.quote(str(path))}" for path in runs[:SHOWN]]
    return needed(args, "workdir", fix="\n".join(flags) or "find . -name checkpoints")


def needed_config(args: Any, schema: type, folder: str = "") -> str:
    """Return --config of a verb that cannot do without.

    Raises:
      CommandError: if it is not there; the fix names configs that load with the other flags.
    """
    if args.config:
        return str(args.config)
    flags = []
    for path in config_file.shipped(folder):
        try:
            value = load.load(schema, str(path), args.overrides).value
        except JaxlmError:
            continue
        # A recipe whose files are not here would stop at once.
        sources = [each for each in getattr(value, "source", ()) if ":" not in each]
        if all(glob.glob(each, recursive=True) for each in sources):
            flags.append(f"--config={shlex.quote(str(path))}")
    return needed(args, "config", fix="\n".join(flags[:SHOWN]) or _defaults())


def _defaults() -> str:
    """Return what to paste if no config is near: an installed package has none."""
    if Path(DEFAULTS).exists():
        return f"--config={DEFAULTS}"
    return f"{_write_defaults()}    # every setting at its default; then add --config={DEFAULTS}"


def _write_defaults() -> str:
    return f"echo '{{}}' > {DEFAULTS}"


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Which of a run's weights are used: its parameters, or an average of them."""
    parser.add_argument(
        "--weights",
        choices=["raw", "ema", "swa"],
        default="raw",
        help="the parameters as they are, or the average that the run keeps of them (raw)",
    )


def train_next(folder: str, found: dict[str, str], file: str | None = None) -> str:
    """Return the line that names the command to train with data that was just written.

    Args:
      folder: what was written, which the run is named after.
      found: settings by path. Without a validation set there is no evaluation.
      file: the config that the data was made with; the first one that is shipped if there is none.
    """
    config = file or next(map(str, config_file.shipped()), None)
    flags = [f"--config.{path}={value or '()'}" for path, value in found.items()]
    words = [f"--config={config or DEFAULTS}", f"--workdir=runs/{Path(folder).name}", *flags]
    first = "" if config or Path(DEFAULTS).exists() else f"{_write_defaults()} && "
    return f"next: {first}jaxlm train {shlex.join(words)}"


def _for_setting(schema: type, name: str, value: str | None) -> str | None:
    """Return the flag of the setting that an unknown flag names, or None.

    If the setting cannot have that value and no other value is known to be meant, return the
    command that lists what is known of the setting: `--epochs=3` names no source.
    """
    fix = problems.for_flag(schema, name, value)
    if not fix or not fix.startswith(("--config.", "'--config.")):
        return fix
    path, _, text = shlex.split(fix)[0].removeprefix("--config.").partition("=")
    try:
        load.load(schema, None, [(path, text)])
    except JaxlmError as error:
        is_own = f"--config.{path}=" in error.where
        if is_own and error.fix.startswith(problems.EXPLAIN):
            return problems.explain(path)
    return fix


def _known(name: str) -> str:
    """Return what may be typed for a shared flag that has no value."""
    if name.startswith("--config."):
        return problems.explain(name.removeprefix("--config."))
    if name == "--workdir":
        return "--workdir=runs/a"
    path = next(iter(config_file.shipped()), None)
    return f"--config={shlex.quote(str(path))}" if path else _defaults()


class Parser(argparse.ArgumentParser):
    """Argparse that fails in four parts and names the flag that was probably meant."""

    def __init__(self, **options: Any):
        shape = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=shape, **options)

    def add_shared(self) -> None:
        """Lists the shared flags in `--help`; `extract` reads them."""
        group = self.add_argument_group("every verb")
        withheld = self.get_default("withheld") or ()
        for flag, (value, text) in SHARED.items():
            if flag in withheld:
                continue
            if value:
                group.add_argument(flag, metavar=value, help=text, dest="_shared", default=None)
            else:
                group.add_argument(flag, action="store_true", help=text, dest="_shared")

    def unknown(self, words: Sequence[str], args: Any) -> CommandError:
        """Return the error of words that the verb does not know; `args` are those that it does."""
        word = words[0]
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            return CommandError(
                f"{word!r} is one word too many",
                where=f"{self.prog} ... {word}",
                why="the verb takes no more words",
                fix=f"{self.prog} --help",
            )
        given = value if equals else next((w for w in words[1:2] if not w.startswith("-")), None)
        taking = self._taking(getattr(args, "action", None))
        meant = nearest(name, [flag for flag, each in taking.items() if _takes(each, given)])
        spelled = name.replace("-", "_").replace("__", "--", 1)
        is_spelling = meant is not None and distance(spelled, meant) <= 1
        action = getattr(args, "action", None)
        withheld = getattr(args, "withheld", {})
        schema = "" if "--config.a.b" in withheld else getattr(args, "schema", RUN)
        if (
            schema
            and not is_spelling
            and (fix := _for_setting(_loaded(schema), name.lstrip("-"), given))
        ):
            return CommandError(
                f"unknown flag {name}",
                where=f"{self.prog} {word}",
                why="that is a setting of the config, not a flag of the verb",
                fix=fix,
            )
        flags = sorted(flag for flag in taking if flag != "--config.a.b")
        return CommandError(
            f"unknown flag {name}",
            where=f"{self.prog} {word}",
            why=f"the nearest is {meant}" if meant else f"the flags are {', '.join(flags)}",
            fix=shlex.quote(meant if given is None else f"{meant}={given}")
            if meant
            else f"{self.prog}{f' {action}' if action else ''} --help",
        )

    def _taking(self, action: str | None) -> dict[str, argparse.Action]:
        """Return the long flags of the verb and of one of its actions."""
        found = {
            flag: each
            for flag, each in self._option_string_actions.items()
            if flag.startswith("--")
        }
        for each in self._actions:
            if isinstance(each, argparse._SubParsersAction) and action in each.choices:
                found |= each.choices[action]._taking(None)
        return found

    def read(self, rest: Sequence[str], words: Sequence[str]) -> tuple[Any, list[str]]:
        """Parse the verb's own words, `rest` of the whole command line `words`.

        Raises:
          CommandError: if they do not fit the verb.
        """
        try:
            return self.parse_known_args(rest)
        except _Misfit as misfit:
            raise misfit.explained(words) from None

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong, for `read` to explain."""
        raise _Misfit(self.prog, message)


class _Misfit(Exception):
    """A word that argparse refused, and why."""

    def __init__(self, prog: str, message: str):
        super().__init__(message)
        self.prog, self.message = prog, message

    def explained(self, words: Sequence[str]) -> CommandError:
        """Return the error, its fix made of the command line that was typed."""
        choice = re.search(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)", self.message)
        named = re.match(r"argument (--\w+)", self.message)
        flag = named[1] if named else None
        if choice:
            choices = re.findall(r"[\w.-]+", choice[2])
            meant = nearest(choice[1], choices)
            if meant and not flag:
                meant = shlex.join(
                    [self.prog.partition(" ")[0], *(meant if w == choice[1] else w for w in words)]
                )
            return CommandError(
                f"{choice[1]!r} is not one of {', '.join(choices)}",
                where=self.prog,
                why="the nearest is the fix" if meant else "none of them is near",
                fix=(f"{flag}={meant}" if flag else meant) if meant else f"{self.prog} --help",
            )
        number = re.search(r"invalid (int|float) value: '(.*)'", self.message)
        if flag and number:
            count = Setting(name=flag, kind=int if number[1] == "int" else float, default=0)
            with contextlib.suppress(ValueError):
                value = show(problems.same(count, number[2]))
                return self._error(f"{flag}={value}")
        return self._error(f"{self.prog} --help")

    def _error(self, fix: str) -> CommandError:
        return CommandError(
            self.message.removeprefix("argument "),
            where=self.prog,
            why="the command line does not fit the verb",
            fix=fix,
        )


def _takes(action: argparse.Action, value: str | None) -> bool:
    """Whether a flag takes this value, or does without one."""
    if value is None or action.nargs == 0:
        return (value is None) == (action.nargs == 0)
    try:
        read = action.type(value) if callable(action.type) else value
    except (ValueError, argparse.ArgumentTypeError):
        return False
    return action.choices is None or read in action.choices


def _loaded(schema: str) -> type:
    """Return the class that `module:Class` names: verbs are read without the config's modules."""
    module, _, name = schema.partition(":")
    return getattr(importlib.import_module(module), name)
