"""Reading of config files: a Python config is run, a resolved config.json is only parsed."""

import dataclasses
import importlib.machinery
import importlib.util
import inspect
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Collection
from pathlib import Path
from types import CodeType
from typing import Any

from jaxlm.core import shipped, user_code
from jaxlm.core.errors import ConfigError, InputMissing, JaxlmError
from jaxlm.core.nearest import nearest_word
from jaxlm.core.problems import Origin, short
from jaxlm.core.sections import flat, plain


def read_file(
    text: str, schema: Any, published: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, Origin]]:
    """Return the settings of a config as nested dicts, and their origins.

    Args:
      text: a file or a run directory; without such a file, the name of a shipped config. A program
        may have an argument after a colon.
      schema: class of the section that the caller reads.
      published: further names that --config takes, for the error of an unknown one.

    Raises:
      InputMissing: if there is no such file, and no shipped config has the name.
      ConfigError: if it fails, does not return a config, or returns that of another verb.
    """
    match = re.fullmatch(r"(.+?\.py)(?::(.*))?", text, re.DOTALL)
    path = Path(match[1] if match else text)
    if (path / "config.json").is_file():
        path = path / "config.json"
    if not path.is_file():
        name, colon, argument = text.partition(":")
        if program := shipped.find(name):
            return _from_program(program, argument if colon else None, schema)
        if path.is_dir():
            path = path / "config.json"
        raise _missing(path, match[2] if match else None, published)
    if match:
        return _from_program(path, match[2], schema)
    if path.suffix != ".json":
        raise ConfigError(
            f"{short(path)} is not a config",
            where=f"--config={text}",
            why="a config is a Python file with get_config(), or a resolved config.json",
            fix=_list_folder(path),
        )
    raw = _strict_json(path)
    if not isinstance(raw, dict):
        raise _not_resolved(path, short(path), f"it contains {type(raw).__name__}, not sections")
    user_code.check_recorded(schema, raw, short(path))
    return raw, {name: Origin("file", short(path)) for name in flat(raw)}


def _missing(path: Path, argument: str | None, published: Collection[str]) -> InputMissing:
    ending = f":{argument}" if argument is not None else ""
    where = f"--config={path}{ending}"
    if not re.fullmatch(r"\.[a-z]+", path.suffix) and shipped.is_folder(str(path.parent)):
        return _unknown_name(str(path), published)
    why, fix = f"there is no folder {path.parent}", _list_folder(path)
    if path.parent.is_dir():
        names = sorted(each.name for each in path.parent.glob(f"*{path.suffix or '.py'}"))
        why = f"{path.parent} contains {', '.join(names[:6]) or 'no such files'}"
        if meant := nearest_word(path.name, names):
            fix = shlex.quote(f"--config={path.with_name(meant)}{ending}")
    inside = path.with_suffix("").as_posix().removeprefix("configs/")
    if shipped.find(inside):
        fix = shlex.quote(f"--config={inside}{ending}")
        why += f"\njaxlm ships a config of the name {inside}"
    return InputMissing("the config file does not exist", where=where, why=why, fix=fix)


def _unknown_name(text: str, published: Collection[str]) -> InputMissing:
    """Return the error of a --config that is no file and no known name."""
    name, colon, argument = text.partition(":")
    names = shipped.every_name()
    known = names + [each for each in published if shipped.find(each) is None]
    offered = shipped.values()[:4]
    if Path(f"{name}.py").is_file():
        offered = [f"{name}.py"]
    elif elsewhere := [each for each in names if Path(each).name == Path(name).name]:
        offered = elsewhere  # in another folder
    elif meant := nearest_word(name, known):
        offered = [meant]
    elif meant := nearest_word(name, (Path(each).name for each in names)):  # without its folder
        offered = [each for each in names if Path(each).name == meant]
    return InputMissing(
        "no config has this name",
        where=f"--config={text}",
        why=f"there is no file {name}; jaxlm ships {', '.join(names)}"
        + ("; or a published size: see `jaxlm config explain model`" if published else ""),
        fix="\n".join(shlex.quote(f"--config={each}{colon}{argument}") for each in offered),
    )


def _not_resolved(path: Path, where: str, why: str) -> ConfigError:
    fix = "copy config.json again from the run directory\npass the .py file that made it"
    return ConfigError(f"{short(path)} is not a resolved config", where=where, why=why, fix=fix)


def _list_folder(path: Path) -> str:
    """Return the command that lists the nearest existing folder."""
    folder = next((each for each in path.parents if each.is_dir()), Path())
    return f"ls {shlex.quote(str(folder))}"


def _strict_json(path: Path) -> Any:
    """Parse a JSON file; duplicate keys, NaN and infinities are a ConfigError too."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{repeated[0]!r} occurs twice")
        return dict(pairs)

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number")

    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        why = f"{type(error).__name__}: {error}"
        raise _not_resolved(path, f"{short(path)}{line}", why) from error


class _Fresh(importlib.machinery.SourceFileLoader):
    """Compile the current file: cached byte code of the same second and size would be stale."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


class OtherSchema(ConfigError):
    """A config file of another verb; `schema` is the one that it returns."""

    schema: type


def _of_another_verb(kind: Any, schema: Any, path: Path, argument: str | None) -> OtherSchema:
    flag = f"--config={shipped.flag_value(path)}{'' if argument is None else f':{argument}'}"
    verb, _, rest = kind.VERB.partition(" --")
    error = OtherSchema(
        f"{short(path)} is a config of `jaxlm {verb}`",
        where=flag,
        why=f"it returns a {kind.__name__}, and this verb reads a {schema.__name__}",
        fix=f"jaxlm {verb} {shlex.quote(flag)} --{rest}",
    )
    error.schema = kind
    return error


def _from_program(
    path: Path, argument: str | None, schema: Any
) -> tuple[dict[str, Any], dict[str, Origin]]:
    result = _run(path, argument)
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = plain(result)
    config_dict = sys.modules.get("jaxlm.core.config_dict")
    if config_dict is not None and isinstance(result, config_dict.SchemaConfigDict):
        if (kind := config_dict.kind(result)) is not schema and hasattr(kind, "VERB"):
            raise _of_another_verb(kind, schema, path, argument)
        return result.to_dict(), config_dict.origins(result)
    raw = result.to_dict() if hasattr(result, "to_dict") else result
    if not isinstance(raw, dict):
        raise ConfigError(
            f"get_config() returned {type(raw).__name__}, not a ConfigDict",
            where=short(path),
            why="the config is what get_config() returns",
            fix="return c",
        )
    return raw, {name: Origin("file", short(path)) for name in flat(raw)}


def _run(path: Path, argument: str | None) -> Any:
    """Run a config file and return the result of its `get_config`."""
    name = f"jaxlm_config_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_Fresh(name, os.fspath(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look a class's module up by name
    try:
        spec.loader.exec_module(module)
        get_config = getattr(module, "get_config", None)
        if not callable(get_config):
            raise ConfigError(
                f"{short(path)} does not define get_config()",
                where=short(path),
                why="a config is the ConfigDict that get_config() returns",
                fix="def get_config(): c = config.new(Run); return c",
            )
        arguments = () if argument is None else (argument,)
        try:
            inspect.signature(get_config).bind(*arguments)
        except TypeError:
            signature = inspect.signature(get_config)
            parameter = next(iter(signature.parameters), "its parameter")
            more = f"add a colon and the value of {parameter} to "
            raise ConfigError(
                f"get_config() {'takes no argument' if arguments else 'needs an argument'}",
                where=f"{short(path)}:{get_config.__code__.co_firstlineno}",
                why=f"its signature is get_config{signature}",
                fix=f"{'' if arguments else more}--config={shipped.flag_value(path)}",
            ) from None
        return get_config(*arguments)
    except JaxlmError:
        raise
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ConfigError(
            f"{short(path)} failed: {cause}".rstrip(": "),
            where=f"{short(path)}:{_line(error, path)}",
            why=_source(error, path),
            fix="correct that line; --trace shows the whole traceback",
        ) from error
    finally:
        del sys.modules[name]


def _line(error: BaseException, path: Path) -> int:
    """Return the last line of the file that ran before the failure."""
    if isinstance(error, SyntaxError) and error.filename == os.fspath(path):
        return error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == os.fspath(path)]
    return (lines and lines[-1]) or 1


def _source(error: BaseException, path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    number = _line(error, path)
    return f"the line is: {lines[number - 1].strip()}" if number <= len(lines) else ""
