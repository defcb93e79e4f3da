"""Task files of lm-evaluation-harness, as far as they have no code and read local files.

Example:
  >>> text = "output_type: multiple_choice\\ndataset_path: json"
  >>> text += "\\ndataset_kwargs: {data_files: a.jsonl}"
  >>> text += "\\ndoc_to_text: 'Q: {{q}}'\\ndoc_to_choice: options\\ndoc_to_target: gold"
  >>> settings(text)["choices"], settings(text)["answer"]
  ('options', 'gold')
"""

import re
from typing import Any

SUFFIXES = (".yaml", ".yml")
MAX_BYTES = 2**20
TYPES = {"multiple_choice": "choice", "generate_until": "answer", "loglikelihood_rolling": "text"}
# Settings that are read, or do not change requests and scores.
READ = {
    *("task", "output_type", "dataset_path", "dataset_name", "dataset_kwargs", "metadata"),
    *("training_split", "validation_split", "test_split", "fewshot_split"),
    *("doc_to_text", "doc_to_target", "doc_to_choice", "description"),
    *("target_delimiter", "fewshot_delimiter", "generation_kwargs", "filter_list"),
}
WITHOUT_EFFECT = {
    *("tag", "metric_list", "should_decontaminate", "doc_to_decontamination_query"),
    *("num_fewshot", "repeats", "task_alias"),  # --shots has the number of examples
}
EXPRESSION = re.compile(r"\s*\{\{(?P<inner>(?:(?!\}\}|\{\{).)*)\}\}\s*", re.DOTALL)
FIELD = re.compile(r"[A-Za-z_]\w*")
DEFAULT_TOKENS = 256  # of lm-evaluation-harness
DEFAULT_REGEX = r"#### (\-?[0-9\.\,]+)"  # of its filter
FLAGS = re.compile(r"\(\?[aiLmsux]+\)")  # at the beginning of a regular expression
# Settings of a greedy generation that are read, or have no effect on it.
GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p"}


def settings(text: str) -> dict[str, Any]:
    """Return the settings of a task file of jaxlm.

    Raises ValueError if the file has code, names a set of the hub, or has a setting that is not
    read.
    """
    import yaml  # type: ignore[import-untyped]

    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = str(error).replace("\n", " ")
        why = "it has code, which is not run: " if "!function" in reason else "it is not YAML: "
        raise ValueError(f"{why}{reason:.300}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"it contains {type(raw).__name__}, not settings")
    if unread := sorted(map(str, raw.keys() - READ - WITHOUT_EFFECT)):
        raise ValueError(f"jaxlm does not read {', '.join(unread)}")
    label = raw.get("output_type")
    if label not in TYPES:
        raise ValueError(f"output_type is {label!r}, and must be one of {', '.join(TYPES)}")
    kind = TYPES[label]
    version = raw.get("metadata", {}).get("version", 1)
    result: dict[str, Any] = {"kind": kind, "version": int(float(version)), **_files(raw, kind)}
    if isinstance(raw.get("task"), str):
        result["name"] = raw["task"]
    if kind == "text":
        return result | {"text": _template(raw.get("doc_to_target", "{{text}}"))}
    result |= {
        "context": _template(raw.get("doc_to_text", "")),
        "preamble": raw.get("description", ""),
        "delimiter": raw.get("target_delimiter", " "),
        "between": raw.get("fewshot_delimiter", "\n\n"),
    }
    if kind == "choice":
        choices = raw.get("doc_to_choice")
        if not isinstance(choices, list):
            choices = _expression(choices, "doc_to_choice")
        return result | {"choices": choices, "answer": _target(raw.get("doc_to_target"))}
    return result | {"answer": _template(raw.get("doc_to_target")), **_generation(raw)}


def _files(raw: dict[str, Any], kind: str) -> dict[str, str]:
    """Return the files of items and examples."""
    if raw.get("dataset_path") != "json":
        raise ValueError(
            f"dataset_path is {raw.get('dataset_path')!r}; no set is downloaded, so it must be json"
            ", with dataset_kwargs.data_files"
        )
    options = raw.get("dataset_kwargs") or {}
    if unread := sorted(options.keys() - {"data_files", "trust_remote_code"}):
        raise ValueError(f"jaxlm does not read dataset_kwargs.{unread[0]}")
    files = options.get("data_files")
    if isinstance(files, str):
        files = {"train": files}
    if not isinstance(files, dict) or not all(isinstance(each, str) for each in files.values()):
        raise ValueError("dataset_kwargs.data_files is not a file for each split")
    names = [raw.get(f"{split}_split") for split in ("test", "validation", "training")]
    items = next((files[name] for name in names if name in files), None)
    if items is None and len(files) == 1:
        (items,) = files.values()
    if items is None:
        raise ValueError(f"none of the splits {names} has a file in data_files")
    examples = raw.get("fewshot_split") or raw.get("training_split")
    has_examples = kind != "text" and files.get(examples, items) != items
    return {"items": items, **({"examples": files[examples]} if has_examples else {})}


def _template(value: Any) -> str:
    """Return a template; a name alone is that of a field."""
    if isinstance(value, str):
        return f"{{{{ {value} }}}}" if FIELD.fullmatch(value) else value
    raise ValueError(f"{value!r:.60} is not a template")


def _expression(value: Any, name: str) -> str:
    """Return the Jinja expression of a template that is one expression, of a field or a number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and (match := EXPRESSION.fullmatch(value)):
        return match["inner"].strip()
    if isinstance(value, str) and FIELD.fullmatch(value):
        return value
    raise ValueError(f"{name} is {value!r:.60}, and must be a field or one expression in braces")


def _target(value: Any) -> str:
    """Return the expression of the right choice.

    Digits that a template renders are an index, also if a choice is the same text. The text of a
    field is a choice.

    Example:
      >>> _target("label"), _target("{{ label }}")
      ('label', '(label) | int if ((label) | string).isdigit() else (label)')
    """
    expression = _expression(value, "doc_to_target")
    if not isinstance(value, str) or FIELD.fullmatch(value):
        return expression
    return f"({expression}) | int if (({expression}) | string).isdigit() else ({expression})"


def _generation(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of greedy generation and of the first filter."""
    options = raw.get("generation_kwargs") or {}
    if options.get("do_sample") or options.get("temperature"):
        raise ValueError("generation_kwargs ask for samples, and answers are greedy")
    if unread := sorted(map(str, options.keys() - GENERATION)):
        raise ValueError(f"jaxlm does not read generation_kwargs.{unread[0]}")
    until = options.get("until", raw.get("fewshot_delimiter", "\n\n"))
    result = {
        "stop": [until] if isinstance(until, str) else until,
        "max_tokens": options.get("max_gen_toks", DEFAULT_TOKENS),
    }
    filters = [
        step
        for each in (raw.get("filter_list") or [])[:1]
        for step in each.get("filter", [])
        if step.get("function") != "take_first"
    ]
    if not filters:
        return result
    if len(filters) > 1 or filters[0].get("function") != "regex":
        raise ValueError("filter_list has other filters than one regex")
    pattern = filters[0].get("regex_pattern", DEFAULT_REGEX)
    select = filters[0].get("group_select", 0)
    if select not in (0, -1):
        raise ValueError(f"the regex has group_select: {select!r}, and must have 0 or -1")
    return result | {"extract": pattern if select else _first_match(pattern)}


def _first_match(pattern: str) -> str:
    """Return a regular expression whose only match ends with the first match of another one.

    `extract` compares the last match, the filter of lm-evaluation-harness by default the first.

    Example:
      >>> [re.findall(each, "no 1, 2") for each in (r"\\d", _first_match(r"\\d"))]
      [['1', '2'], ['1']]
    """
    try:
        has_groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"regex_pattern has no regular expression: {error}") from error
    flags = match[0] if (match := FLAGS.match(pattern)) else ""
    rest = pattern.removeprefix(flags)
    return rf"{flags}\A[\s\S]*?" + (f"(?:{rest})" if has_groups else f"({rest})")
