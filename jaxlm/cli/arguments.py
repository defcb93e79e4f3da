"""Command-line arguments: settings of the config, flags of every verb, and a verb's own flags."""

import argparse
import contextlib
import dataclasses
import glob
import importlib
import itertools
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxlm.core import hub, load, problems, shipped
from jaxlm.core.errors import CommandError, JaxlmError
from jaxlm.core.nearest import distance, nearest_word
from jaxlm.core.sections import Setting, show

RUN = "jaxlm.recipes.config:Run"  # schema of the settings on the command line
RUNS = ("*", "*/*")  # folders that are searched for runs
SHOWN = 4  # lines of a fix
# Actions under names of other programs.
OTHER_ACTIONS = {"print": "show", "cat": "show", "get": "show", "ls": "list", "info": "inspect"}
REPLACED = {"--prompt_lookup": "--draft=lookup"}  # former flags, and what does the same now
SAVED_CONFIG = "the run uses the config that it was saved with"
DATA_TRAIN = "--config.data.train="
CPU_DEVICES = ("--cpu_devices", "N", int, "number of devices to split the CPU into", 1)
ADAPTER = (
    "--adapter",
    "DIR|RUN[@STEP]",
    str,
    "folder of PEFT, or run, with an adapter for the model of --workdir",
)

SHARED = {
    "--config": ("FILE|NAME[:ARG]", "config file, shipped config or published size; ARG of a file"),
    "--config.a.b": ("VALUE", "value of a setting; see `jaxlm config explain a.b`"),
    "--workdir": ("DIR", "run directory"),
    "--json": (None, "one JSON object on stdout, all other output on stderr"),
    "--quiet": (None, "only the result"),
    "--trace": (None, "traceback of an error"),
}


@dataclasses.dataclass(kw_only=True)
class Shared:
    """Flags of every verb."""

    config: str | None = None
    overrides: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    workdir: str | None = None
    json: bool = False
    quiet: bool = False
    trace: bool = False

    def words(self, without: Collection[str] = ()) -> list[str]:
        """Return the flags as typed, without some of SHARED."""
        settings = {f"--config.{path}": value for path, value in self.overrides}
        flags = {"--config": self.config, **settings, "--workdir": self.workdir}
        named = {name: f"{name}={value}" for name, value in flags.items() if value is not None}
        switches = [f"--{name}" for name in ("json", "quiet", "trace") if getattr(self, name)]
        named |= {name: name for name in switches}
        return [word for name, word in named.items() if known_as(name) not in without]


def is_run(place: str) -> bool:
    """Return whether a place is a run directory, which has the config of the run."""
    return (Path(place) / "config.json").is_file()


def without_flag(words: Sequence[str], flag: str) -> list[str]:
    """Return the words of a command line without a flag and its value."""
    pairs = zip(words, ["", *words], strict=False)
    return [each for each, before in pairs if flag not in (each.partition("=")[0], before)]


def known_as(flag: str) -> str:
    """Return the name of a shared flag in SHARED: settings have one for all."""
    return "--config.a.b" if flag.startswith("--config.") else flag


def check_taken(prog: str, withheld: dict[str, str], shared: Shared, rest: list[str]) -> None:
    """Raise CommandError for a shared flag that the verb does not take; `rest` are its own words.

    The fix is the command line without the flag; words after `--` take the flag instead.
    """
    accepted = shared.words(withheld)
    if refused := [word for word in shared.words() if word not in accepted]:
        name = refused[0].partition("=")[0]
        what, where = f"{prog.removeprefix('jaxlm ')} takes no {name}", shlex.join(refused)
        moved = refused if "--" in rest else []
        config, workdir = shared.config or "", withheld.keys() & {"--workdir"}
        if name == "--config" and is_run(config) and not (shared.workdir or workdir or moved):
            accepted = [f"--workdir={config}", *accepted]
        fix = shlex.join([*prog.split()[:2], *accepted, *rest, *moved])
        raise CommandError(what, where=f"{prog} {where}", why=withheld[known_as(name)], fix=fix)


def extract(words: Sequence[str]) -> tuple[Shared, list[str]]:
    """Separate the shared flags before a `--` from the verb's own words.

    Raises CommandError if a flag lacks its value, or a switch has one.
    """
    shared, rest = Shared(), []
    index = 0
    while index < len(words) and words[index] != "--":
        word = words[index]
        name, equals, value = word.partition("=")
        index += 1
        if name in ("--json", "--quiet", "--trace"):
            if equals:
                why = "the flag is a switch"
                raise CommandError(f"{name} takes no value", where=word, why=why, fix=name)
            setattr(shared, name[2:], True)
        elif name in ("--config", "--workdir") or name.startswith("--config."):
            if not equals:
                if index == len(words) or words[index].startswith("--"):
                    fix, why = _example(name), "nothing follows it"
                    raise CommandError(f"{name} needs a value", where=word, why=why, fix=fix)
                value = words[index]
                index += 1
            if name.startswith("--config."):
                shared.overrides.append((name.removeprefix("--config."), value))
            else:
                setattr(shared, name[2:], value)
        else:
            rest.append(word)
    return shared, [*rest, *words[index:]]


def needed(args: Any, name: str, *, fix: str = "") -> str:
    """Return a shared flag that the verb needs. Raises CommandError; `fix` is what to add."""
    value = getattr(args, name)
    if not value:
        where = f"jaxlm {shlex.join(args.words)}"
        why = f"this verb needs the {SHARED[f'--{name}'][1].partition(';')[0]}"
        fix = fix or _example(f"--{name}")
        raise CommandError(f"--{name} is needed", where=where, why=why, fix=fix)
    return value


def free_workdir(name: str) -> str:
    """Return the flag of a run directory of this name, or with a number, that does not exist."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    folders = (Path("runs", each) for each in names)
    return f"--workdir={shlex.quote(str(next(each for each in folders if not each.exists())))}"


def needed_run(args: Any) -> str:
    """Return --workdir. Raises CommandError without it; the fix names runs near this directory."""
    folders = {path.parent for pattern in RUNS for path in Path().glob(f"{pattern}/config.json")}
    runs = sorted(path for path in folders if (path / "checkpoints").is_dir())
    flags = [f"--workdir={shlex.quote(str(path))}" for path in runs[:SHOWN]]
    return needed(args, "workdir", fix="\n".join(flags) or "find . -name checkpoints")


def needed_config(args: Any, schema: type, folder: str = "") -> str:
    """Return --config. Raises CommandError without it; the fix names configs that load."""
    if args.config:
        return str(args.config)
    flags = []
    for each in shipped.values(folder):
        try:
            value = load.load(schema, each, args.overrides).value
        except JaxlmError:
            continue
        # A recipe whose files are missing would fail at once.
        sources = [each for each in getattr(value, "source", ()) if ":" not in each]
        if all(glob.glob(each, recursive=True) for each in sources):
            flags.append(f"--config={shlex.quote(each)}")
    return needed(args, "config", fix="\n".join(flags[:SHOWN]) or _example("--config"))


PLACES = {"DIR", "FILE", "PLACE"}  # metavars of paths


def _path(value: str) -> str:
    """Return a path as it is typed. Raises ArgumentTypeError for none, as of an unset variable."""
    if not value:
        raise argparse.ArgumentTypeError("the path is empty")
    return value


class _Number:
    """Parses a number that is not below a limit."""

    def __init__(self, kind: type, least: float):
        self._kind, self._least, self.__name__ = kind, least, kind.__name__

    def __call__(self, text: str) -> Any:
        value = self._kind(text)
        if not value >= self._least:  # NaN too
            raise argparse.ArgumentTypeError(f"{text} is below {self._least:g}")
        return value


def add_flag(
    parser: Any,
    name: str,
    metavar: Any,
    kind: Any,
    doc: str,
    least: float | None = None,
    **options: Any,
) -> None:
    """Add a flag with a value.

    Args:
      parser: the parser or group.
      name: the flag, with dashes.
      metavar: placeholder of the value in `--help`, or the list of allowed values.
      kind: type of the value, or its default; [] for a flag that may be repeated.
      doc: help text, a noun phrase; a default is appended.
      least: smallest number that the flag takes.
      options: further options of `add_argument`.
    """
    if isinstance(kind, list):
        options |= {"action": "append", "default": kind}
    elif isinstance(kind, type):
        options |= {"type": kind}
    else:
        options |= {"type": type(kind), "default": kind}
        doc += f" ({kind:g})" if isinstance(kind, float) else f" ({kind})".replace("%", "%%")
    if least is not None:
        options["type"] = _Number(options["type"], least)
    if isinstance(metavar, str) and metavar in PLACES:
        options["type"] = _path
    options |= {"choices": metavar} if isinstance(metavar, list) else {"metavar": metavar}
    parser.add_argument(name, help=doc, **options)


def selection(args: Any, *names: str) -> dict[str, Any]:
    """Return the values of some flags, by default of those of `add_run_selection`."""
    names = names or ("step", "best", "weights", "cpu_devices")
    return {name: getattr(args, name) for name in names}


def train_next(folder: str, data: dict[str, str], file: str | None = None) -> str:
    """Return the line with the command that trains on newly written data.

    Args:
      folder: the written folder; the run is named after it.
      data: settings by path. Without a validation set there is no evaluation.
      file: the config that the data was made with; by default the first shipped one.
    """
    config = file or shipped.values()[0]
    flags = [f"--config.{path}={value or '()'}" for path, value in data.items()]
    words = [f"--config={config}", f"--workdir=runs/{Path(folder).name}", *flags]
    return f"next: jaxlm train {shlex.join(words)}"


def _for_setting(schema: type, name: str, value: str | None) -> str | None:
    """Return the flag of the setting that an unknown flag names, or None.

    If the setting cannot have that value and no other value is known to be meant, return the
    command that lists what is known of the setting: `--epochs=3` names no source.
    """
    fix = problems.for_flag(schema, name, value)
    if fix and fix.startswith(("--config.", "'--config.")):
        path, _, text = shlex.split(fix)[0].removeprefix("--config.").partition("=")
        try:
            load.load(schema, None, [(path, text)])
        except JaxlmError as error:
            is_own = f"--config.{path}=" in error.where
            if is_own and error.fix.startswith(problems.EXPLAIN):
                return problems.explain(path)
    return fix


def check_seed(verb: str, seed: int | None) -> None:
    """Raise CommandError if --seed has no key of its own: JAX reads its lowest 32 bits."""
    if seed is not None and not 0 <= seed < 2**32:
        what, why = f"--seed={seed} is out of range", "--seed must be 0 to 4294967295"
        raise CommandError(what, where=verb, why=why, fix=f"--seed={seed % 2**32}")


def read_share(text: str, most: float, flag: str, verb: str) -> float:
    """Parse a share such as 10% or 0.1. Raises CommandError if it is not in (0, most]."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= most:
        what, why = f"{flag}={text} is not a share", f"must be above 0% and at most {most:.0%}"
        raise CommandError(what, where=verb, why=f"{flag} {why}", fix=f"{verb} --help")
    return share


def _example(name: str) -> str:
    """Return an example of a shared flag that lacks its value."""
    if name.startswith("--config."):
        return problems.explain(name.removeprefix("--config."))
    if name == "--workdir":
        return "--workdir=runs/a"
    return f"--config={shlex.quote(shipped.values()[0])}"


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors have four parts and name the flag that was probably meant."""

    def __init__(self, **options: Any):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, **options)
        self._choices: Any = None
        self.examples: str = self.description or ""  # has command lines, also those of actions

    def add_action(self, name: str, run: Any, doc: str) -> "Parser":
        """Add an action, whose `run(args, out)` returns the exit code, and return its parser."""
        if self._choices is None:
            self._choices = self.add_subparsers(dest="action", required=True)
        prefix = f"{self.prog} {name} "
        lines = [line for line in self.examples.splitlines() if line.startswith(prefix)]
        description = "\n".join([f"{doc[0].upper()}{doc[1:]}.", "", *lines]).strip()
        action = self._choices.add_parser(name, help=doc, description=description)
        action.set_defaults(run_action=run)
        action.examples = self.examples
        self._choices.metavar = "|".join(self._choices.choices)
        return action

    @property
    def actions(self) -> "dict[str, Parser]":
        """Parsers of the actions by name; empty for a verb without actions."""
        return dict(self._choices.choices) if self._choices else {}

    def add_switch(self, name: str, doc: str) -> None:
        """Add a flag without a value."""
        self.add_argument(name, action="store_true", help=doc)

    def withhold(self, why: str, *flags: str) -> None:
        """Remove flags of SHARED, by default those of the config, from a verb or an action."""
        self.set_defaults(withheld=dict.fromkeys(flags or ("--config", "--config.a.b"), why))

    def add_run_selection(self) -> None:
        """Add the flags that select a step and the weights of a run; see `selection`."""
        self.withhold(SAVED_CONFIG)
        add_flag(self, "--step", "STEP", int, "committed step to use (newest)")
        self.add_switch("--best", "use the step with the lowest validation loss")
        doc = "trained parameters, or the average that the run maintains"
        add_flag(self, "--weights", ["raw", "ema", "swa"], "raw", doc)
        add_flag(self, *CPU_DEVICES)

    def add_shared(self) -> None:
        """List the shared flags in `--help`, also of the actions; `extract` reads them."""
        for action in self.actions.values():
            action.add_shared()
        group = self.add_argument_group("every verb")
        withheld = self.get_default("withheld") or ()
        schema = (self.get_default("schema") or "").rpartition(":")[2].lower()
        for flag, (value, text) in SHARED.items():
            text = text.replace("explain a.b", f"explain {schema or 'a.b'}")
            if flag not in withheld:
                options: Any = {"metavar": value} if value else {"action": "store_true"}
                group.add_argument(flag, help=text, dest="_shared", **options)

    def unknown(self, words: Sequence[str], args: Any, line: Sequence[str] = ()) -> CommandError:
        """Return the error of words that the verb does not know.

        `args` are the parsed ones; with the whole command line, a word that lacks its flag gets it.
        """
        word = words[0]
        if not word.startswith("-"):
            return self._unexpected(words, args, line)
        name, equals, value = word.partition("=")
        typed = value if equals else next((w for w in words[1:2] if not w.startswith("-")), None)
        action = getattr(args, "action", None)
        flags = self._flags(action)
        meant = nearest_word(name, [flag for flag, each in flags.items() if _takes(each, typed)])
        spelled = name.replace("-", "_").replace("__", "--", 1)
        is_spelling = meant is not None and distance(spelled, meant) <= 1
        withheld = getattr(args, "withheld", {})
        schema = "" if "--config.a.b" in withheld else getattr(args, "schema", RUN)
        setting = None
        if schema and not is_spelling:  # verbs are parsed without the config's modules
            module, _, kind = schema.partition(":")
            loaded = getattr(importlib.import_module(module), kind)
            setting = _for_setting(loaded, name.lstrip("-"), typed)
        if (now := REPLACED.get(spelled)) and now.partition("=")[0] in flags:
            why, fix = f"{now} does the same", now
        elif setting:
            why, fix = "it is a setting of the config, not a flag of the verb", setting
        elif meant:
            why = f"the nearest is {meant}"
            fix = shlex.quote(meant if typed is None else f"{meant}={typed}")
        else:
            why = f"the flags are {', '.join(sorted(flags.keys() - {'--config.a.b'}))}"
            fix = f"{self.prog}{f' {action}' if action else ''} --help"
        return CommandError(f"unknown flag {name}", where=f"{self.prog} {word}", why=why, fix=fix)

    def _unexpected(self, words: Sequence[str], args: Any, line: Sequence[str]) -> CommandError:
        """Return the error of words that are no flags; the fix is the line with their flags."""
        word = words[0]
        where, why = f"{self.prog} ... {word}", "the verb takes no more words"
        what, fix = f"unexpected word {word!r}", f"{self.prog} --help"
        flags = self._flags(getattr(args, "action", None)).keys() - getattr(args, "withheld", {})
        pairs = {each: f"--{each}" for each in words if "=" in each}
        repaired = {
            each: flag for each, flag in pairs.items() if known_as(flag.partition("=")[0]) in flags
        }
        if word in repaired:
            why = "a flag begins with two dashes"
        elif flag := self._flag_of(word, line):
            why = f"a value follows its flag, here {flag}"
            name = hub.guessed_name(word) if flag == "--from" else None
            repaired[word] = f"{flag}={name or word}"
        is_text = self.prog.endswith(" train") and word not in repaired and Path(word).exists()
        if is_text and any(each.startswith(("--config=", DATA_TRAIN)) for each in line):
            why = "the text is a setting of the config, here data.train"
            repaired |= _in_one_setting([each for each in words if Path(each).exists()], line)
        if line and word in repaired:
            fixed = [repaired.get(each, each) for each in line]
            fix = shlex.join([self.prog.partition(" ")[0], *filter(None, fixed)])
        elif is_text:
            why = "a run is described by a config, which `jaxlm init` writes for a text"
            fix = shlex.join(["jaxlm", "init", f"--data={word}"])
        return CommandError(what, where=where, why=why, fix=fix)

    def _flags(self, action: str | None) -> dict[str, argparse.Action]:
        """Return the long flags of the verb and of one of its actions."""
        options = self._option_string_actions
        flags = {flag: each for flag, each in options.items() if flag.startswith("--")}
        for each in self._actions:
            if isinstance(each, argparse._SubParsersAction) and action in each.choices:
                flags |= each.choices[action]._flags(None)
        return flags

    def read(self, rest: Sequence[str], words: Sequence[str]) -> tuple[Any, list[str]]:
        """Parse the verb's own words, `rest` of the command line `words`. Raises CommandError."""
        try:
            return self.parse_known_args(rest)
        except _Misfit as misfit:
            raise misfit.explained(words) from None

    def _flag_of(self, word: str, line: Sequence[str]) -> str | None:
        """Return the flag that a word is probably the value of: a model, a run or a config."""
        has_run = is_run(word)
        is_file = word.endswith(".py") and "=" not in word
        is_config = is_file or shipped.find(word.partition(":")[0]) is not None
        flags = self._flags(None)
        is_name = word.startswith(hub.PREFIX) or hub.guessed_name(word) is not None
        if "--from" in flags and (has_run or is_name or Path(word).exists()):
            return "--from"
        withheld = self.get_default("withheld") or ()
        if is_config and "--config" not in withheld:
            return "--config"
        if has_run and "--workdir" not in withheld:
            if not any(each.startswith("--workdir=") for each in line):
                return "--workdir"
            return "--with" if "--with" in flags else None
        texts = (flag for flag in ("--data", "--text") if flag in flags and Path(word).exists())
        return next(texts, None)

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error, for `read` to explain."""
        raise _Misfit(self.prog, message, self.examples)


def _in_one_setting(texts: Sequence[str], line: Sequence[str]) -> dict[str, str]:
    """Return the words of a line that change if one data.train names all texts; "" is removed."""
    settings = [each for each in line if each.startswith(DATA_TRAIN)]
    first, *others = [*settings, *texts]
    values = [each.removeprefix(DATA_TRAIN) for each in (first, *others)]
    return {first: f"{DATA_TRAIN}{','.join(values)}"} | dict.fromkeys(others, "")


class _Misfit(Exception):
    """A word that argparse refused, and why."""

    def __init__(self, prog: str, message: str, examples: str):
        super().__init__(message)
        self.prog, self.message, self.examples = prog, message, examples

    def explained(self, words: Sequence[str]) -> CommandError:
        """Return the error; its fix is made of the typed command line."""
        choice = re.search(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)", self.message)
        named = re.match(r"argument (--\w+)", self.message)
        flag = named[1] if named else None
        if choice:
            choices = re.findall(r"[\w.-]+", choice[2])
            other = OTHER_ACTIONS.get(choice[1])
            meant = other if other in choices else nearest_word(choice[1], choices)
            fix, why = f"{self.prog} --help", "none of them is near"
            if meant:
                repaired = [meant if word == choice[1] else word for word in words]
                line = shlex.join([self.prog.partition(" ")[0], *repaired])
                fix, why = f"{flag}={meant}" if flag else line, "the fix has the nearest"
            what = f"{choice[1]!r} is not one of {', '.join(choices)}"
            return CommandError(what, where=self.prog, why=why, fix=fix)
        if below := re.fullmatch(r"argument --\w+: (\S+) is below (\S+)", self.message):
            value, least = below.groups()
            what, why = f"{flag}={value} is below {least}", f"{flag} must be at least {least}"
            return CommandError(what, where=self.prog, why=why, fix=f"{self.prog} --help")
        number = re.search(r"invalid (int|float) value: '(.*)'", self.message)
        if flag == "--step" and number and re.fullmatch(r"[0-9]+(,[0-9]+)+", number[2]):
            fix = "\n".join(f"{flag}={step}" for step in number[2].split(","))
            return self._error(fix, "a command reads one step; of several, each has its command")
        if flag and number:
            count = Setting(name=flag, kind=int if number[1] == "int" else float, default=0)
            with contextlib.suppress(ValueError):
                value = show(problems.same(count, number[2]))
                return self._error(f"{flag}={value}")
        return self._error(self._with_missing(words) or f"{self.prog} --help")

    def _with_missing(self, words: Sequence[str]) -> str | None:
        """Return the typed line with the flags that it lacks, each as an example has it."""
        missing = self.message.partition("the following arguments are required: ")[2]
        if missing == "--out" and (line := self._with_place(words)):
            return line
        flags = []
        for name in missing.split(", ") if missing else ():
            value = r"(?![A-Z]+\b)\S+"  # no placeholder
            line = rf"^{re.escape(self.prog)} (?:.* )?({re.escape(name)}={value})"
            if (example := re.search(line, self.examples, re.MULTILINE)) is None:
                return None
            flags.append(example[1])
        return " ".join([self.prog.partition(" ")[0], shlex.join(words), *flags]) if flags else None

    def _with_place(self, words: Sequence[str]) -> str | None:
        """Return the typed line of a run whose only word without a flag is the value of --out."""
        program, *verb = self.prog.split()
        places = [each for each in words[len(verb) :] if not each.startswith("-")]
        has_run = any(each.startswith("--workdir=") for each in words)
        if not has_run or len(places) != 1 or is_run(places[0]):
            return None
        typed = [f"--out={each}" if each == places[0] else each for each in words]
        return shlex.join([program, *typed])

    def _error(self, fix: str, why: str = "the command line does not fit the verb") -> CommandError:
        what = self.message.removeprefix("argument ")
        return CommandError(what, where=self.prog, why=why, fix=fix)


def _takes(action: argparse.Action, value: str | None) -> bool:
    """Return True if a flag accepts this value, or needs none."""
    if value is None or action.nargs == 0:
        return (value is None) == (action.nargs == 0)
    try:
        read = action.type(value) if callable(action.type) else value
    except (ValueError, argparse.ArgumentTypeError):
        return False
    return action.choices is None or read in action.choices
