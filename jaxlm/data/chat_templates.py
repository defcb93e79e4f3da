"""Chat templates: that of a model, a file, or ChatML with control tokens of any tokenizer."""

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data.chat import TODAY, ChatTemplate
from jaxlm.data.tokenizer import SPECIALS, Tokenizer

HUB = "hub"  # folder of a run: unchanged files that came with the weights, and the template
FILE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
DATE_COMMENT = re.compile(r"\{# today is (\d{4}-\d\d-\d\d) #\}\n")  # made by `dated`
TODAY_CALL = re.compile(r"""strftime_now\s*\(\s*(["'])((?:(?!\1).)*)\1\s*\)""")
TODAY_USE = re.compile(r"strftime_now(?!\s+is\s)")
CHATML = """{{- BOS }}
{%- if tools %}
    {{- START + 'system' + SEPARATOR }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
    {{- END + '\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- START + message.role + SEPARATOR + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + (call.function or call) | tojson + '\\n</tool_call>' }}
        {%- endfor %}
        {{- END + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- START + 'assistant' + SEPARATOR }}{% endif %}
"""


def choose(setting: str, tokenizer: Tokenizer, folders: tuple[Path, ...]) -> ChatTemplate:
    """Return the template of `data.template`, with a fixed date.

    Args:
      setting: `auto`, `chatml` or a file.
      tokenizer: the tokenizer of the run.
      folders: folders that may have the model's template; without one `auto` is ChatML.

    Raises:
      InputMissing: if there is no such file.
      DataError: if the template depends on the date in a way that cannot be fixed.
    """
    templates = (of_folder(folder) for folder in folders)
    template = next((each for each in templates if each is not None), None)
    if setting not in ("auto", "chatml"):
        path = Path(setting)
        if not path.is_file():
            raise InputMissing(
                f"the chat template {setting} does not exist",
                where="data.template",
                why="it is auto, chatml, or the path of a Jinja file",
                fix="--config.data.template=auto",
            )
        tokens = template.tokens if template is not None else _tokens(tokenizer)
        template = ChatTemplate(path.read_text(errors="replace"), tokens, setting)
    elif setting == "chatml" or template is None:
        template = chatml(tokenizer)
    fix = "--config.data.template=chatml"
    return ChatTemplate(dated(template), template.tokens, template.where, fix=fix)


def chatml(tokenizer: Tokenizer) -> ChatTemplate:
    """Return ChatML whose turns end with `<|im_end|>`, or else with the end of text.

    Turns begin with `<|im_start|>`, the last token that jaxlm reserves, or the end of text. A line
    break follows the role. A tokenizer trained here may have pieces of a line break and the word
    after it, which would hide the first word of an answer in the prompt: there the role ends with
    the last token but one that jaxlm reserves, as with Phi-4's `<|im_sep|>`.
    """
    tokens = _tokens(tokenizer)
    end, start = tokens["eos_token"], tokens["eos_token"]
    separator = "\n"
    if {"<|im_start|>", "<|im_end|>"} <= tokenizer.specials.keys():
        start, end = "<|im_start|>", "<|im_end|>"
    elif SPECIALS[-1] in tokenizer.specials:
        start, separator = SPECIALS[-1], SPECIALS[-2]
    source = CHATML
    texts = {"BOS": tokens.get("bos_token", ""), "START": start, "SEPARATOR": separator, "END": end}
    for name, text in texts.items():
        source = source.replace(name, repr(text))
    return ChatTemplate(source, tokens, "chatml")


def is_same(one: ChatTemplate, other: ChatTemplate) -> bool:
    """Return whether two templates write equal texts, apart from the comment of their date.

    Files of a model have tokens that its template does not name, such as that of padding.
    """

    def compared(template: ChatTemplate) -> tuple[str, dict[str, str]]:
        source = DATE_COMMENT.sub("", template.source, count=1)
        return source, {name: text for name, text in template.tokens.items() if name in source}

    return compared(one) == compared(other)


def digest(template: ChatTemplate) -> str:
    """Return the sha256 of a template, without the comment of its date, and its tokens."""
    source = DATE_COMMENT.sub("", template.source, count=1)
    return hashlib.sha256(serialized(dataclasses.replace(template, source=source))).hexdigest()


def serialized(template: ChatTemplate) -> bytes:
    """Return a template as JSON."""
    return json.dumps({"source": template.source, "tokens": dict(template.tokens)}).encode()


def parsed(content: bytes, where: str) -> ChatTemplate:
    """Return the template of `serialized`."""
    stored = json.loads(content)
    return ChatTemplate(stored["source"], stored["tokens"], where)


def of_folder(folder: Path) -> ChatTemplate | None:
    """Return the template among a model's files; None without one. Raise DataError."""
    settings = read_settings(folder)
    source, where = settings.get("chat_template"), folder / SETTINGS
    if isinstance(source, list):  # several, by name
        named = [entry for entry in source if isinstance(entry, dict)]
        source = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if (folder / FILE).is_file():
        where = folder / FILE
        source = where.read_text(errors="replace")
    if not isinstance(source, str):
        return None
    tokens = {
        name: text
        for name, token in settings.items()
        if name.endswith("_token")
        and isinstance(text := token.get("content") if isinstance(token, dict) else token, str)
    }
    return ChatTemplate(source, tokens, str(where))


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json; empty without it. Raise DataError."""
    path = folder / SETTINGS
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise DataError(
            "tokenizer_config.json is not JSON",
            where=str(path),
            why=str(error),
            fix="import the model again into another --workdir",
        ) from error
    return settings if isinstance(settings, dict) else {}


def keep(template: ChatTemplate, folder: Path) -> dict[str, bytes]:
    """Return the files by which `of_folder` finds a template again, by name.

    Args:
      folder: the folder of a run; settings that came with its weights are kept.
    """
    files, known = {FILE: template.source.encode()}, of_folder(folder)
    if known is None or known.tokens != template.tokens:
        settings = read_settings(folder) | dict(template.tokens)
        files[SETTINGS] = json.dumps(settings, indent=1).encode()
    return files


def _tokens(tokenizer: Tokenizer) -> dict[str, str]:
    names = {number: name for name, number in tokenizer.specials.items()}
    tokens = {"eos_token": names.get(tokenizer.eos, "")}
    if tokenizer.before:
        tokens["bos_token"] = names.get(tokenizer.before[0], "")
    return tokens


def dated(template: ChatTemplate) -> str:
    """Return the source with a fixed date in place of today's, so that a run stays the same.

    A comment at its beginning has the date. Raise DataError if the date cannot be fixed.
    """
    source, count = TODAY_CALL.subn(
        lambda match: json.dumps(TODAY.strftime(match[2]), ensure_ascii=False), template.source
    )
    if TODAY_USE.search(source):
        raise DataError(
            "a chat template depends on the date",
            where=template.where,
            why="it passes a computed format to strftime_now; each day would give other ids",
            fix="write a date in place of strftime_now, and --config.data.template=template.jinja",
        )
    return f"{{# today is {TODAY.isoformat()} #}}\n{source}" if count else source


def date_of(template: ChatTemplate) -> str | None:
    """Return the date that a template gets in place of today's; None if it has no date."""
    if comment := DATE_COMMENT.match(template.source):
        return comment[1]
    return TODAY.isoformat() if TODAY_USE.search(template.source) else None


def date_note(template: ChatTemplate) -> str | None:
    """Return the sentence about the date of a template; None if it has no date."""
    date = date_of(template)
    return date and f"the chat template's date is {date} on every day, in place of today's"
