"""Config under construction: a locked ConfigDict with a schema and the origin of each value."""

import copy
import os
import re
from collections.abc import Mapping
from typing import Any

import ml_collections
from ml_collections import ConfigDict, FieldReference

from jaxlm.core import problems, sections, user_code
from jaxlm.core.nearest import nearest_word
from jaxlm.core.problems import Origin, caller, unknown_arm

_OURS = (__file__, os.path.dirname(ml_collections.__file__))


class SchemaConfigDict(ConfigDict):
    """A section under construction with exactly the settings of its arm.

    Names are checked here, at the line that sets them; values are checked together, at loading.
    """

    def __init__(self, arms: tuple[type, ...], value: Any, path: str = "", root: Any = None):
        super().__init__(type_safe=False, sort_keys=False)
        attributes: dict[str, Any] = {
            "_arms": arms,
            "_path": path,
            "_root": root or self,
            "_origins": {},
        }
        for name, attribute in attributes.items():
            object.__setattr__(self, name, attribute)
        self._fill(value)
        self.lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SchemaConfigDict":
        clone = SchemaConfigDict(self._arms, self._arm(), self._path, memo.get(id(self._root)))
        memo[id(self)] = clone
        clone._origins.update(self._origins)
        clone._fields.update(copy.deepcopy(dict(self._fields), memo))
        return clone

    def _fill(self, value: Any) -> None:
        arm: Any = type(value)
        object.__setattr__(self, "_arm", arm)
        self._fields.clear()
        self._origins.clear()
        for name, known in sections.fields(arm).items():
            if hasattr(ConfigDict, name):
                raise TypeError(
                    f"a setting cannot be named {name!r}: ConfigDict has a method of that name"
                )
            inner = getattr(value, name)
            if known.arms:
                inner = SchemaConfigDict(
                    known.arms, inner, sections.join(self._path, name), self._root
                )
            self._fields[name] = inner if known.arms else sections.plain(inner)

    def _assign(self, value: Any, origin: Origin) -> None:
        """Assign a section or a mapping, its arm first."""
        if isinstance(value, self._arms):
            self._fill(value)
            for path in sections.flat(sections.plain(value)):
                self._at(path, origin)
        elif isinstance(value, Mapping | ConfigDict):
            label = sections.tag(self._arm)
            for name in sorted(value.keys(), key=lambda name: name != label):
                self[name] = value[name]
        else:
            self._fields.clear()
            label = sections.tag(self._arms[0])
            is_name = label and isinstance(value, str)
            meant = nearest_word(value, sections.by_name(self._arms)) if is_name else None
            name, line = self._path.rpartition(".")[2], problems.line_of(origin)
            line = re.sub(rf"\.{name} *= *[^;]+", f".{name}.{label} = {meant!r}", line)
            fix = line if meant and line else problems.explain(self._path)
            raise problems.error([problems.not_a_section(self._path, value, origin, fix)])

    def _at(self, path: str, origin: Origin) -> None:
        name, _, rest = path.partition(".")
        if rest:
            self._fields[name]._at(rest, origin)
        else:
            self._origins[name] = origin

    def __setitem__(self, key: str, value: Any) -> None:
        origin = caller(lambda file: file.startswith(_OURS))
        key, value = self._current(key, value)
        known = sections.fields(self._arm).get(key)
        if known is None:
            raise self._unknown(key, value, origin)
        if key == sections.tag(self._arm):
            arm = user_code.find(self._arms, value)
            if arm is None:
                raise problems.error([unknown_arm(self._arms, self._path, value, origin)])
            if arm is not self._arm:
                self._fill(arm())
            self._origins[key] = origin
        elif known.arms:
            is_name = isinstance(value, str)
            self._fields[key]._assign(known.named.get(value, value) if is_name else value, origin)
        else:
            present = self._fields.get(key)
            if isinstance(present, FieldReference) and not isinstance(value, FieldReference):
                present.set(value, type_safe=False)
            else:
                self._fields[key] = value
            self._origins[key] = origin

    def _current(self, key: str, value: Any = None) -> tuple[str, Any]:
        """Return the current name and value of a setting; a former name gives a warning."""
        path = sections.join(self._path, str(key))
        new, value = sections.current(self._root._arm, path, value)
        if new != path:
            problems.warn_renamed(path, new)
        return new.rpartition(".")[2], value

    def __getitem__(self, key: str) -> Any:
        try:
            return super().__getitem__(self._current(key)[0])
        except KeyError:
            raise self._unknown(key, None, caller(lambda file: file.startswith(_OURS))) from None

    # ml_collections would wrap our error in its own.
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def _unknown(self, key: str, value: Any, origin: Origin) -> problems.UnknownSetting:
        root = self._root
        path = sections.join(self._path, str(key))
        unknown = problems.unknown(root._arm, root.to_dict(), path, value, origin, origins(root))
        return problems.error([unknown], kind=problems.UnknownSetting)  # type: ignore[return-value]

    def update(self, *other: Any, **values: Any) -> None:
        """Assign the settings of mappings, the arm of each section first."""
        origin = caller(lambda file: file.startswith(_OURS))
        for mapping in (*other, values):
            self._assign(mapping, origin)


def kind(draft: "SchemaConfigDict") -> type:
    """Return the class of the section under construction."""
    return draft._arm


def origins(draft: ConfigDict) -> dict[str, Origin]:
    """Return the origin of each setting that a config file set, by dotted path."""
    result = {}
    for name, value in draft._fields.items():
        if isinstance(value, SchemaConfigDict):
            result.update(
                {sections.join(name, inner): origin for inner, origin in origins(value).items()}
            )
    return result | dict(draft._origins)


def new(schema: type) -> SchemaConfigDict:
    """Return a locked ConfigDict with the defaults of `schema`; see `config.new`."""
    return SchemaConfigDict((schema,), schema())
