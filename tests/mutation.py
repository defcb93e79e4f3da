"""Seeded faults: a function with a changed line, in place of the real one."""

import inspect
import sys
import textwrap
from typing import Any


def mutate(monkeypatch: Any, owner: Any, name: str, old: str, new: str) -> None:
    """Replace a function by its source with one changed text, for the time of a test.

    Args:
      monkeypatch: fixture of pytest.
      owner: module or class of the function.
      name: name of the function.
      old: text of its source that occurs once.
      new: text in its place.
    """
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {name}"
    module = owner if inspect.ismodule(owner) else sys.modules[owner.__module__]
    made: dict[str, Any] = {}
    exec(source.replace(old, new), vars(module), made)
    monkeypatch.setattr(owner, name, made[name])
