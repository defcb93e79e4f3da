"""Configs: load, override, check, save, compare and explain settings in frozen dataclasses.

A section is a frozen, keyword-only dataclass whose fields are `setting`s, other sections, or a
union of sections. The arms of a union have a tag, `name: Literal["adamw"] = "adamw"`; so the union
is the registry. A section may define `problems(self) -> Iterator[(field, why, fix)]` for
constraints that types and ranges cannot express.

Example:
  >>> @dataclasses.dataclass(frozen=True, kw_only=True)
  ... class Sampling:
  ...     temperature: float = setting(1.0, "divisor of the logits", above=0)
  >>> load(Sampling, None, [("temperature", "0.7")]).value
  Sampling(temperature=0.7)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlm.core import problems, sections, user_code
from jaxlm.core.load import Loaded, from_json, load, loaded_json
from jaxlm.core.problems import DEFAULT, Origin
from jaxlm.core.sections import setting
from jaxlm.core.span import Span

__all__ = [
    "ABSENT",
    "Change",
    "Explanation",
    "Loaded",
    "Origin",
    "Span",
    "diff",
    "explain",
    "flatten",
    "from_json",
    "json_value",
    "load",
    "loaded_json",
    "new",
    "setting",
    "to_json",
]


def new(schema: type) -> Any:
    """Return a locked ConfigDict with the defaults of `schema`, for a config file to change.

    Setting the name of an arm (`c.optim.name = "lion"`, `c.model.family = "gpt2"`) fills that
    section with the arm's own defaults.

    Raises:
      ConfigError: if the config file sets an unknown setting; it names the line and the nearest.
    """
    from jaxlm.core import config_dict  # reading a config.json needs no ml_collections

    return config_dict.new(schema)


def to_json(section: Any) -> dict[str, Any]:
    """Return a section as JSON: nested dicts, tuples as lists, spans as text. See `from_json`."""

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: convert(inner) for name, inner in value.items()}
        return [convert(item) for item in value] if isinstance(value, tuple) else value

    return convert(sections.plain(section))


def flatten(section: Any) -> dict[str, Any]:
    """Return the value of every setting by dotted path, names of arms included."""
    return {path: value for path, _, value in sections.leaves(section)}


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


def json_value(value: Any) -> Any:
    """Return a value of a `Change` or an `Explanation` as JSON holds it; None if it is absent."""
    if isinstance(value, Span):
        return value.plain()
    return None if value is ABSENT else value


@dataclasses.dataclass(frozen=True)
class Change:
    """A setting that differs between two configs; `ABSENT` if one config's arm lacks it."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.old} -> {self.new}"


def diff(a: Any, b: Any) -> list[Change]:
    """Return the changes from section `a` to section `b`, in the order of the settings."""
    old, new_ = flatten(a), flatten(b)
    pairs = ((path, old.get(path, ABSENT), new_.get(path, ABSENT)) for path in old | new_)
    return [
        Change(*pair) for pair in pairs if pair[1] != pair[2] or type(pair[1]) is not type(pair[2])
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """Documentation, type, range and value of a setting or section.

    For a section, `value` is its arm, `settings` its settings, and `named` the published values by
    arm.
    """

    path: str
    doc: str
    type: str
    unit: str
    range: str
    default: Any
    value: Any
    origin: Origin
    settings: tuple[str, ...] = ()
    named: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


def explain(schema: type, loaded: Loaded | None, path: str) -> Explanation:
    """Return the documentation, type, unit, range, default, value and origin of a setting.

    The value of a setting of an arm that is not in use is `ABSENT`.

    Raises:
      ConfigError: if there is no such setting; it names the nearest.
    """
    value = loaded.value if loaded is not None else schema()
    raw = sections.plain(value)
    present = sections.settings(schema, raw)
    known = present.get(path) or sections.settings(schema, raw, every_arm=True).get(path)
    origins = loaded.provenance if loaded is not None else {}
    if known is None:
        raise problems.error(
            [problems.unknown(schema, raw, path, None, Origin("command line", path), origins)]
        )
    if known.arms:
        arm = (
            sections.chosen(known.arms, problems.value_at(raw, path, {}), known.default)
            or known.arms[0]
        )
        label = sections.tag(arm)
        names = ", ".join(sections.by_name(known.arms))
        return Explanation(
            path=path,
            doc=known.doc or (arm.__doc__ or "").partition("\n")[0],
            type=f"section; {path}.{label} is one of {names}" if label else "section",
            unit="",
            range="",
            default=sections.arm_name(type(known.default)) if label else ABSENT,
            value=sections.arm_name(arm) if label else ABSENT,
            origin=origins.get(f"{path}.{label}", DEFAULT),
            settings=tuple(name for name in present if name.startswith(f"{path}.")),
            named=_by_arm(known.named),
        )
    section, _, name = path.rpartition(".")
    parent = present.get(section)
    # The parent section's choice for its default arm takes precedence over the arm's own default.
    used: type | None = schema
    if parent:
        used = sections.chosen(parent.arms, problems.value_at(raw, section, {}), parent.default)
    defaults = parent.default if parent else schema()
    is_used = type(defaults) is used and path in present
    doc, kind = known.doc, sections.describe(known.kind)
    if parent is not None and used is not None and name == sections.tag(used):
        doc = doc or f"arm of {section} in use"
        kind = f"one of {', '.join(sections.by_name(parent.arms))}"
        kind += f", or {user_code.FORM}" if user_code.base_of(parent.arms) is not None else ""
    return Explanation(
        path=path,
        doc=doc,
        type=kind,
        unit=known.unit,
        range=sections.bounds(known),
        default=getattr(defaults, name) if is_used else known.default,
        value=flatten(value).get(path, ABSENT),
        origin=origins.get(path, DEFAULT),
    )


def _by_arm(named: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the names of sections by their arm."""
    names: dict[str, tuple[str, ...]] = {}
    for name, section in named.items():
        arm = sections.arm_name(type(section))
        names[arm] = (*names.get(arm, ()), name)
    return names
