"""Fields of records under other names than a kind reads: `data.fields`.

An entry is NAME=FIELD: the kind reads FIELD as NAME. FIELD may be several, joined by +: their texts
that are not empty, with an empty line between. The names `system`, `user` and `assistant` are turns
of a conversation, for data sets with a column for each.

Example:
  >>> record = {"question": "6 * 7?", "answer": "42"}
  >>> renamed(record, "chat", parsed(("user=question", "assistant=answer")))["messages"]
  [{'role': 'user', 'content': '6 * 7?'}, {'role': 'assistant', 'content': '42'}]
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlm.core.nearest import nearest_word
from jaxlm.data.conversations import NO_FIELD, OTHER_FORM, Entry, Fields, Kind, Rejected, described

TURNS = ("system", "user", "assistant")
_PROMPT = ("prompt", "system", "user", "tools")
NAMES: Mapping[Kind, tuple[str, ...]] = {
    "text": (),
    "chat": ("messages", *TURNS, "tools"),
    "completion": (*_PROMPT, "completion", "weight"),
    "pairs": (*_PROMPT, "chosen", "rejected", "margin"),
    "labeled": (*_PROMPT, "completion", "label"),
    "steps": (*_PROMPT, "steps", "labels"),
    "prompts": (*_PROMPT, "answer", "info"),
}
_TURN_KEYS = ("role", "content"), ("from", "value")
# Usual names of a question and of its answer.
_QUESTIONS = ("question", "instruction", "query", "problem", "input", "prompt", "user")
_ANSWERS = ("answer", "output", "response", "completion", "solution", "assistant")
_CONTEXTS = ("input", "context")  # of an instruction
# Usual names of the fields of a pair.
_PAIR = {
    "prompt": _QUESTIONS,
    "chosen": ("chosen", "good", "better", "preferred", "accepted", "winner"),
    "rejected": ("rejected", "bad", "worse", "dispreferred", "refused", "loser"),
}
# Names of a question and of its answer in a proposal.
_PROPOSED: Mapping[Kind, tuple[tuple[str, str], ...]] = {
    "chat": (("user", "assistant"),),
    "completion": (("prompt", "completion"),),
    "labeled": (("prompt", "completion"),),
    "prompts": (("user", "answer"), ("prompt", "answer")),
}


def parsed(entries: Sequence[str]) -> Fields:
    """Return the names, each with its fields, of entries NAME=FIELD or NAME=FIELD+FIELD."""
    pairs = (entry.partition("=") for entry in entries)
    return tuple((name, tuple(fields.split("+"))) for name, _, fields in pairs)


def renamed(record: Mapping[str, Any], kind: Kind, fields: Fields) -> dict[str, Any]:
    """Return a record with the names that its kind reads.

    Args:
      record: a record, which has each field; null is as good as absent to the kind.
      kind: the kind of the record; names that it does not read are of other kinds in a mixture.
      fields: names and fields.

    Raises:
      Rejected: if the record has no such field, or fields that are joined are no texts.
    """
    result = dict(record)
    turns: list[dict[str, Any]] = []
    for entry in fields:
        name = entry[0]
        if name not in NAMES[kind]:
            continue
        value = _value(record, kind, entry, fields)
        if name not in TURNS:
            result[name] = value
        elif value or name != "system":
            turns.append({"role": name, "content": value})
    if turns:
        turns.sort(key=lambda turn: TURNS.index(turn["role"]))
        result["messages" if kind == "chat" else "prompt"] = turns
    return result


def _value(record: Mapping[str, Any], kind: Kind, entry: Entry, fields: Fields) -> Any:
    """Return what a record has for an entry; raise Rejected if it has no such field."""
    name, sources = entry
    if missing := next((each for each in sources if each not in record), None):
        near = nearest_word(missing, list(map(str, record)))
        better = [(n, tuple(near if s == missing and near else s for s in f)) for n, f in fields]
        fix = setting(better) if near else proposed(record, kind)
        why = f"data.fields reads {name} from {missing}; {described(record)}"
        raise Rejected(NO_FIELD, why, fix or "'--config.data.fields=()'")
    if len(sources) == 1:
        return record[sources[0]]
    texts = [record[each] for each in sources if record[each] is not None]
    if other := next((each for each in texts if not isinstance(each, str)), None):
        why = f"{'+'.join(sources)} joins texts, and one is a {type(other).__name__}"
        raise Rejected(OTHER_FORM, why, f"--config.data.fields={name}={sources[0]}")
    return "\n\n".join(each for each in texts if each.strip())


def setting(fields: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return the flag that sets `data.fields`."""
    entries = ",".join(f"{name}={'+'.join(sources)}" for name, sources in fields)
    return f"--config.data.fields={entries}"


def proposed(record: Mapping[str, Any], kind: Kind) -> str:
    """Return flags that read turns, a question and its answer, or a pair, from other fields.

    Empty if the record has no fields of usual names, or the kind has other fields.
    """
    if kind == "pairs":
        return _pair(record)
    if kind == "chat" and has_turns(record):
        return setting([("messages", _lists(record, *_TURN_KEYS))])
    texts = [name for name, value in record.items() if isinstance(value, str)]
    source = next((each for each in _QUESTIONS if each in texts), None)
    target = next((each for each in _ANSWERS if each in texts and each != source), None)
    flags = []
    for question, answer in _PROPOSED.get(kind, ()):
        is_needed = answer != "answer"  # a prompt may have none
        if source is None or (is_needed and target is None):
            continue
        more = [each for each in _CONTEXTS if source == "instruction" and each in texts]
        fields = [(question, [source, *more])]
        if target is not None and target != answer:
            fields.append((answer, [target]))
        flags.append(setting(fields))
    return "\n".join(flags)


def has_turns(record: Mapping[str, Any]) -> bool:
    """Return whether exactly one field holds turns."""
    return len(_lists(record, *_TURN_KEYS)) == 1


def hint(record: Mapping[str, Any], kind: Kind) -> str:
    """Return `proposed`, or how `data.fields` may read a record without fields of usual names."""
    if flags := proposed(record, kind):
        return flags
    if kind == "chat" and len(lists := _lists(record)) == 1:
        return setting([("messages", lists)])
    names = [name for name in _PAIR if record.get(name) is None]
    others = [name for name in _values(record) if name not in _PAIR]
    if kind != "pairs" or len(others) < len(names):
        return ""
    form = setting([(name, ["FIELD"]) for name in names])
    return f"name the fields in {form}, each FIELD one of {', '.join(map(str, others)):.300}"


def _pair(record: Mapping[str, Any]) -> str:
    fields = []
    for name, usual in _PAIR.items():
        if record.get(name) is not None:
            continue
        source = next((each for each in usual if each in _values(record)), None)
        if source is None and name != "prompt":  # both answers may have it
            return ""
        fields += [(name, [source])] if source else []
    return setting(fields) if fields else ""


def _values(record: Mapping[str, Any]) -> list[str]:
    """Return the fields that hold a text or a list."""
    return [name for name, value in record.items() if isinstance(value, str | list)]


def _lists(record: Mapping[str, Any], *keys: tuple[str, str]) -> list[str]:
    """Return the fields that `setting` can name and that hold objects, each with a pair of keys."""
    return [
        name
        for name, value in record.items()
        if isinstance(value, list)
        and value
        and all(isinstance(each, dict) for each in value)
        and (not keys or any(all(each.keys() >= {*pair} for each in value) for pair in keys))
        and re.fullmatch(r"[\w.-]+", str(name))
    ]


def problems(entries: Sequence[str], kinds: Sequence[Kind]) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, why, fix) for the first entry that no kind of the data can use.

    Args:
      entries: the value of `data.fields`.
      kinds: the kinds of the sources and of the validation sets.
    """
    fields = parsed(entries)
    names = [name for name, _ in fields]
    known = list(dict.fromkeys(name for kind in kinds for name in NAMES[kind]))
    none = "'--config.data.fields=()'"
    if not entries:
        return
    if not known:
        yield (
            "fields",
            "it names fields of conversations, and data.kind is text",
            (f"--config.data.kind=chat\n--config.data.text_key={fields[0][1][0] or 'text'} {none}"),
        )
        return
    for number, (name, sources) in enumerate(fields):
        if not all(sources):
            yield "fields", f"{entries[number]!r} is not NAME=FIELD", none
            return
        if name not in known:
            near = nearest_word(name, known)
            better = [(near or n if n == name else n, s) for n, s in fields]
            why = f"{name} is none of: {', '.join(known)}"
            yield "fields", why, setting(better) if near and near not in names else none
            return
    if len(set(names)) < len(names):
        once = dict(reversed(fields))
        yield "fields", "a name is set twice", setting([*once.items()][::-1])
        return
    whole = "messages" if "chat" in kinds else "prompt"
    if whole in names and not {*TURNS}.isdisjoint(names):
        rest = [(name, sources) for name, sources in fields if name not in TURNS]
        yield "fields", f"{whole} has the turns, and others are named too", setting(rest)
    elif "chat" in kinds and not {*TURNS}.isdisjoint(names) and not {*TURNS[1:]} <= {*names}:
        why = "a conversation of fields has a user and an assistant"
        missing = [(name, [name]) for name in TURNS[1:] if name not in names]
        yield "fields", why, setting([*fields, *missing])
