"""Parts of a user: classes in files or installed modules, as arms of a union, and functions.

`FILE.py:CLASS` or `MODULE:CLASS` as the name of an arm, such as `--config.objective.name`, is a
class that subclasses the base of the union, a frozen dataclass whose fields are its settings. The
arm has one setting more: `source`, the digest of the file, which identifies the code of a run.

A file that the user names is copied to the cache. A config that records a digest runs that copy, or
the file if it is the same; without a copy it runs no code.

An entry `FILE.py:FUNCTION` of a setting with `names_code` is a function. A run records its result
instead, so a config that is only read names none.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import linecache
import re
import shlex
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from jaxlm.core import disk, sections
from jaxlm.core.errors import ConfigError, JaxlmError
from jaxlm.core.nearest import nearest_word
from jaxlm.core.span import Span

FOLDER = "own"  # of the copies, in the cache and in a run directory
DIGITS = 16  # of a digest
FORM = "FILE.py:CLASS or MODULE:CLASS"
_NAME = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):([A-Za-z_]\w*)")
_FUNCTION = re.compile(r"(?:[A-Za-z]\w*=)?(.+\.py):([A-Za-z_]\w*)")
_PLAIN = (bool, int, float, str, type(None), Span)


@dataclasses.dataclass(frozen=True)
class Interface:
    """The requirements of a union on classes of a user, as `PARTS` of the base of its arms.

    Args:
      section: path of the union.
      needs: attributes that the class has, besides those of the base.
    """

    section: str
    needs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """The file of a part."""

    path: Path
    content: bytes
    package: str = ""  # of an installed module

    @property
    def digest(self) -> str:
        """The first digits of its sha256."""
        return hashlib.sha256(self.content).hexdigest()[:DIGITS]


def source_of(section: Any) -> Source | None:
    """Return the file of a section that is a part of a user; None for other sections."""
    return getattr(type(section), "SOURCE", None)


def base_of(arms: tuple[type, ...]) -> type | None:
    """Return the class that parts of a user subclass to be an arm; None if there is none."""
    return next((each for each in arms[0].__mro__ if "PARTS" in vars(each)), None)


def find(arms: tuple[type, ...], name: Any, recorded: str = "") -> type | None:
    """Return the arm of a name; None if it names none.

    Raises ConfigError if it names a part of a user that cannot be used.

    Args:
      arms: the arms of the union.
      name: the name of an arm, or `FILE.py:CLASS` or `MODULE:CLASS`.
      recorded: digest of the file that a run was made with; empty for the file as it is.
    """
    if not isinstance(name, str):
        return None
    if (known := sections.by_name(arms).get(name)) is not None:
        return known
    base, match = base_of(arms), _NAME.fullmatch(name)
    if base is None or match is None:
        return None
    interface: Interface = vars(base)["PARTS"]
    label = sections.tag(arms[0]) or ""
    where = f"{interface.section}.{label} = {name}"
    place = match[1]
    if not recorded:
        source = _source(place, where)
        _trust(place, source)
        return _as_type(_arm(base, label, name, source))
    copy = _copy(place, recorded)
    try:
        source = _source(place, where)
    except ConfigError:
        if copy is None:
            raise
        source = copy
    if source.digest != recorded or not _has_run(source):
        if copy is None:
            raise _unknown(place, recorded, where)
        source = copy
    return _as_type(_arm(base, label, name, source))


def named_file(place: str, where: str) -> Source:
    """Return a file that the user names, and keep a copy: a config that records it may run it.

    Raises ConfigError if there is none.
    """
    source = _source(place, where)
    _trust(place, source)
    return source


def recorded_file(place: str, digest: str, where: str) -> Source:
    """Return a file as a config records it, from the copies in the cache.

    Raises ConfigError if the user never named such a file.
    """
    copy = _copy(place, digest)
    if copy is None:
        raise _unknown(place, digest, where)
    path = Path(place)
    is_same = path.is_file() and path.read_bytes() == copy.content
    return dataclasses.replace(copy, path=path) if is_same else copy


def check_recorded(schema: Any, raw: Any, where: str) -> None:
    """Raise ConfigError if a config of a file names code without its digest.

    Such code is not executed: `find` runs what a config records only if this user ran it before.
    """
    for path, known in sections.fields(schema).items():
        section = raw.get(path) if isinstance(raw, dict) else None
        if not known.arms or not isinstance(section, dict):
            continue
        name = section.get(sections.tag(known.arms[0]) or "")
        is_code = isinstance(name, str) and _NAME.fullmatch(name) is not None
        if base_of(known.arms) is not None and is_code and not section.get("source"):
            raise _without_digest(f"{where}: {path} = {name}")
        # A section with files of functions and their digests.
        files_of = getattr(known.arms[0], "files_without_digest", None)
        if files_of is not None and (files := files_of(section)):
            raise _without_digest(f"{where}: {path} = {files[0]}")
        for arm in known.arms:
            for name in [name for name, each in sections.fields(arm).items() if each.names_code]:
                entries = section.get(name)
                for entry in entries if isinstance(entries, list) else ():
                    if isinstance(entry, str) and names_function(entry):
                        raise _without_digest(f"{where}: {path}.{name} = {entry}")


def _without_digest(where: str) -> ConfigError:
    return ConfigError(
        "the config names code without its digest",
        where=where,
        why="a config of a run is only read, and a program in it is not executed",
        fix="name it in a Python config\nname it on the command line",
    )


def names_function(entry: str) -> bool:
    """Return whether an entry of a setting is `FILE.py:FUNCTION`, or `NAME=FILE.py:FUNCTION`."""
    return _FUNCTION.fullmatch(entry) is not None


def function(entry: str, setting: str) -> Callable[[], Any]:
    """Return the function that an entry of a setting names.

    Raises ConfigError if there is none, or the file fails.
    """
    match = _FUNCTION.fullmatch(entry)
    assert match is not None, entry
    where, (place, name) = f"{setting} = {entry}", match.groups()
    source = _source(place, where)
    module = _executed(source, where)
    result = getattr(module, name, None)
    if not callable(result):
        functions = [n for n, each in vars(module).items() if isinstance(each, types.FunctionType)]
        meant = nearest_word(name, functions) or next(iter(functions), None)
        raise ConfigError(
            f"{source.path.name} has no function {name}",
            where=where,
            why=f"it has {', '.join(functions) or 'no function'}",
            fix=shlex.quote(f"--config.{setting}={entry.removesuffix(name)}{meant}")
            if meant
            else f"def {name}(): yield 'a text'",
        )
    return typing.cast(Callable[[], Any], result)


@contextlib.contextmanager
def failures_named(entry: str, setting: str) -> Iterator[None]:
    """Name the line of the file of an entry in an error that its function raises."""
    try:
        yield
    except JaxlmError:
        raise
    except Exception as error:
        source = _source(entry.rpartition("=")[2].rpartition(":")[0], setting)
        if str(source.path) not in (f.filename for f in traceback.extract_tb(error.__traceback__)):
            raise
        raise _failed(source, error, f"{setting} = {entry}") from error


def _as_type(arm: Any) -> type:
    result: type = arm
    return result


def _trust(place: str, source: Source) -> None:
    """Keep a copy of a file that the user named: a config that records it may run it again."""
    folder = disk.user_cache() / FOLDER
    with contextlib.suppress(OSError):  # then this process alone runs it
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        target = folder / name_of_copy(place, source.digest)
        if not target.is_file() or target.read_bytes() != source.content:
            disk.replace(target, source.content)


def _has_run(source: Source) -> bool:
    """Return whether this process has executed the file."""
    return _module_name(source) in sys.modules


def _module_name(source: Source) -> str:
    name = f"jaxlm_own_{source.digest}"
    return f"{source.package}.{name}" if source.package else name


def keep(run: Any, workdir: Path) -> None:
    """Write copies of the files of a config to the directory of a run.

    They are for people: a run directory from elsewhere is opened without running its code.
    """
    kind: Any = type(run)
    parts = [getattr(run, name) for name in sections.fields(kind)]
    for section in parts:
        copies = dict(getattr(section, "recorded_files", ()))
        contents = {
            name_of_copy(place, digest): recorded_file(place, digest, "reward.functions").content
            for place, digest in copies.items()
        }
        if (source := source_of(section)) is not None:
            contents[copy_name(section)] = source.content
        for name, content in contents.items():
            (workdir / FOLDER).mkdir(exist_ok=True)
            disk.replace(workdir / FOLDER / name, content)


def copy_name(section: Any) -> str:
    """Return the name of the copy of the file of a part."""
    place = sections.arm_name(type(section)).rpartition(":")[0]
    return name_of_copy(place, section.source)


def name_of_copy(place: str, digest: str) -> str:
    """Return the name of the copy of a file with a digest."""
    stem = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    return f"{stem}-{digest}.py"


def _source(place: str, where: str) -> Source:
    """Return the file that `FILE.py` or `MODULE` names."""
    path, package = Path(place), ""
    if not place.endswith(".py"):
        try:
            spec = importlib.util.find_spec(place)
        except (ImportError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            raise _missing(f"there is no module {place}", where, why, _find(place)) from error
        if spec is None or not (spec.origin or "").endswith(".py"):
            why = "it is not installed here, or has no Python file"
            raise _missing(f"there is no module {place}", where, why, _find(place))
        path, package = Path(str(spec.origin)), spec.parent or ""
    try:
        return Source(path, path.read_bytes(), package)
    except OSError as error:
        why = f"{type(error).__name__}: {error.strerror}; a path is relative to {Path.cwd()}"
        raise _missing(f"there is no file {path}", where, why, _find(path.name)) from error


def _find(name: str) -> str:
    stem = name.rpartition(".")[2] if not name.endswith(".py") else name.removesuffix(".py")
    return f"find . -name {shlex.quote(stem + '.py')}"


def _missing(what: str, where: str, why: str, fix: str) -> ConfigError:
    return ConfigError(what, where=where, why=why, fix=fix)


def _copy(place: str, digest: str) -> Source | None:
    """Return the copy in the cache of a file as it was when a run was made; None without one."""
    package = "" if place.endswith(".py") else place.rpartition(".")[0]
    path = disk.user_cache() / FOLDER / name_of_copy(place, digest)
    source = Source(path, path.read_bytes() if path.is_file() else b"", package)
    return source if source.digest == digest else None


def _unknown(place: str, digest: str, where: str) -> ConfigError:
    copy, folder = name_of_copy(place, digest), disk.user_cache() / FOLDER
    return ConfigError(
        "the code of the config has not run here before",
        where=where,
        why=f"the config records the digest {digest} of {place}, and there is no {folder}/{copy}",
        fix=f"read {FOLDER}/{copy} of the run directory; if you trust it, copy it to {folder}",
    )


@functools.cache
def _module(source: Source) -> types.ModuleType:
    """Run the file of a part once."""
    name = _module_name(source)
    spec = importlib.util.spec_from_file_location(name, source.path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look a class's module up by name
    linecache.checkcache(str(source.path))
    try:
        exec(compile(source.content, str(source.path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _executed(source: Source, where: str) -> types.ModuleType:
    """Return the module of a file. Raises ConfigError, with the line, if it fails."""
    try:
        return _module(source)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(source, error, where) from error


def _failed(source: Source, error: BaseException, where: str) -> ConfigError:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(source.path)]
    at = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
    line = at or (lines and lines[-1]) or 1
    text = linecache.getline(str(source.path), line).strip()
    return ConfigError(
        f"{source.path.name} failed: {type(error).__name__}: {error}".partition("\n")[0],
        where=f"{source.path}:{line}",
        why=f"the line is: {text}; {where} runs the file",
        fix="correct that line; --trace shows the whole traceback",
    )


@functools.cache
def _arm(base: Any, label: str, name: str, source: Source) -> type:
    interface: Interface = vars(base)["PARTS"]
    where = f"{interface.section}.{label} = {name}"
    module = _executed(source, where)
    class_name = name.rpartition(":")[2]
    part = getattr(module, class_name, None)
    if not isinstance(part, type):
        classes = {n: each for n, each in vars(module).items() if isinstance(each, type)}
        classes = {n: each for n, each in classes.items() if each.__module__ == module.__name__}
        parts = [n for n, each in classes.items() if issubclass(each, base)]
        meant = nearest_word(class_name, parts) or next(iter(parts), None)
        flag = f"--config.{interface.section}.{label}={name.rpartition(':')[0]}:{meant}"
        raise ConfigError(
            f"{source.path.name} has no class {class_name}",
            where=where,
            why=f"it has {', '.join(parts) or 'no class for this'}",
            fix=shlex.quote(flag) if meant else f"class {class_name}({base.__name__}): ...",
        )
    problem = _wrong_class(part, base, interface) or _wrong_settings(part, label)
    if problem:
        why, fix = problem
        what = f"{class_name} cannot be used as the {interface.section} of a run"
        raise ConfigError(what, where=where, why=why, fix=fix)
    tag = (label, Literal[name], dataclasses.field(default=name))
    doc = "digest of the file of the class, which is part of the run's identity"
    digest = ("source", str, sections.setting(source.digest, doc))
    namespace = {"SOURCE": source, "__module__": part.__module__, "__doc__": part.__doc__}
    return dataclasses.make_dataclass(
        part.__name__, [tag, digest], bases=(part,), frozen=True, kw_only=True, namespace=namespace
    )


def _wrong_class(part: Any, base: type, interface: Interface) -> tuple[str, str] | None:
    """Return why a class is no part, and a fix; None if it is one."""
    head = f"@dataclasses.dataclass(frozen=True, kw_only=True)\nclass {part.__name__}"
    head += f"({base.__name__}):    # from {base.__module__}"
    if not issubclass(part, base):
        return f"it is no subclass of {base.__module__}.{base.__name__}", head
    parameters = part.__dict__.get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        return "it is no frozen dataclass of its own", head
    names = {field.name for field in dataclasses.fields(part)}
    lacking = [
        name
        for name in interface.needs
        if name not in names and getattr(part, name, None) is getattr(base, name, None)
    ]
    if lacking:
        return f"it has no {' and no '.join(lacking)}", "jaxlm docs extending"
    return None


def _wrong_settings(part: Any, label: str) -> tuple[str, str] | None:
    """Return why a field cannot be a setting, and a fix; None if all can."""
    from ml_collections import ConfigDict  # has methods, whose names no setting can have

    for field in dataclasses.fields(part):
        is_taken = field.name == "source" or hasattr(ConfigDict, field.name)
        if is_taken and field.name != label:
            fix = f"{field.name}_: ...    # another name"
            return f"no setting can have the name {field.name}", fix
    try:
        settings = sections.fields(part)
    except (TypeError, NameError) as error:
        return f"its fields: {error}", "gamma: float = setting(2.0, 'exponent')    # as an example"
    for name, known in settings.items():
        if not _is_supported(known.kind):
            why = f"its setting {name} is of the type {known.kind}"
            why += "; a setting is a bool, int, float, str, None, Literal, tuple or section"
            return why, f"{name}: tuple[str, ...] = setting((), '...')    # as an example"
        try:
            default = sections.plain(known.default)
            if not known.arms:
                sections.check(known.kind, default)
        except ValueError as error:
            why = f"the default {known.default!r} of its setting {name} is wrong: {error}"
            return why, f"{name}: {sections.describe(known.kind)} = setting(..., '...')"
    return None


def _is_supported(kind: Any) -> bool:
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return all(isinstance(each, bool | int | float | str) for each in members)
    if sections.is_union(kind) or origin is tuple:
        return all(each is Ellipsis or _is_supported(each) for each in members)
    return kind in _PLAIN or sections.is_section(kind)
