"""The license that a text states: its SPDX tag, else the words of license notices.

Names are those of SPDX's list; others begin with `LicenseRef-`, as SPDX defines.
Source: SPDX specification 2.3, annex D (expressions) and annex E (short identifiers in source
files).
"""

import re
from collections import Counter
from collections.abc import Iterator

from jaxlm.corpus.config import Licence
from jaxlm.corpus.document import CorpusDocument, Removed, Stage

_TAG = re.compile(r"SPDX-License-Identifier:[ \t]*([A-Za-z0-9.+() \t-]{2,200})")
_NAME = re.compile(r"[A-Za-z0-9.+-]+")
_BETWEEN = re.compile(r"[^a-z0-9.+]+")
OPERATORS = ("AND", "OR", "WITH")

# Searched in lower case, with runs of other characters than letters, digits, . and + as a space.
WORDS = {
    "Apache-2.0": r"licensed under the (?:terms of the )?apache licen[sc]e v(?:ersion|\.)? ?2"
    r"|licen[sc]e apache(?: licen[sc]e)?(?: version)? ?2",
    "MIT": r"permission is hereby granted free of charge to any person obtaining a copy"
    r"|(?:licen[sc]ed|released|distributed|available) under (?:the )?(?:terms of the )?mit"
    r" licen[sc]e|licen[sc]e mit\b",
    "BSD-4-Clause": r"redistribution and use in source and binary forms.{0,900}?all advertising"
    r" materials mentioning",
    "BSD-3-Clause": r"redistribution and use in source and binary forms.{0,1500}?(?:neither the"
    r" names? of|names? of (?:its|the)(?: copyright)? (?:holders?|contributors|authors?).{0,40}"
    r" may)|(?:3 clause|new|modified|revised) bsd licen[sc]e",
    "BSD-2-Clause": r"redistribution and use in source and binary forms|(?:2 clause|simplified)"
    r" bsd licen[sc]e",
    "LicenseRef-BSD-style": r"governed by a bsd style licen[sc]e|under (?:the|a) bsd(?: style)?"
    r" licen[sc]e|and the bsd licen[sc]e|licen[sc]e bsd\b",
    "MPL-2.0": r"terms of the mozilla public licen[sc]e v(?:ersion|\.)? ?2",
    "MPL-1.1": r"mozilla public licen[sc]e (?:v|version )?1\.1",
    "ISC": r"permission to use copy modify and ?(?:or )?distribute this software for any"
    r" purpose with or without fee is hereby granted provided",
    "0BSD": r"permission to use copy modify and ?(?:or )?distribute this software for any"
    r" purpose with or without fee is hereby granted\. ",
    "Unlicense": r"this is free and unencumbered software released into the public domain",
    "CC0-1.0": r"cc0 1\.0 universal|creativecommons\.org publicdomain zero 1\.0",
    "BSL-1.0": r"boost software licen[sc]e version 1\.0",
    "EPL-2.0": r"(?:terms of|under) the eclipse public licen[sc]e (?:v|version )?(?:v\. )?2",
    "EPL-1.0": r"(?:terms of|under) the eclipse public licen[sc]e (?:v|version )?(?:v\. )?1",
    "PSF-2.0": r"licen[sc]ed to (?:psf|the python software foundation) under a contributor"
    r" agreement|under the psf licen[sc]e",
    "Zlib": r"provided as is without any express or implied warranty\. in no event will the"
    r" authors? be held liable",
    "WTFPL": r"do what the fuck you want to public licen[sc]e",
    "LicenseRef-public-domain": r"(?:placed in|released (?:in)?to|is in|dedicated to) the"
    r" public domain",
    "LicenseRef-proprietary": r"proprietary and confidential|confidential and proprietary"
    r"|unauthorized copying of this file",
}
# Every pattern contains one of these.
SIGNS = (
    *"licen gpl permission redistribution warranty unencumbered domain creative".split(),
    *("cc by", "cc-by", "cc0", "proprietary", "unauthorized"),
)
# Names that are implied by a more specific one.
WEAKER = {
    "BSD-2-Clause": ("BSD-3-Clause", "BSD-4-Clause"),
    "BSD-3-Clause": ("BSD-4-Clause",),
    "LicenseRef-BSD-style": ("BSD-2-Clause", "BSD-3-Clause", "BSD-4-Clause"),
    "LicenseRef-public-domain": ("Unlicense", "CC0-1.0"),
}
_PATTERNS = {name: re.compile(words) for name, words in WORDS.items()}
_GNU = re.compile(
    r"(?:terms of|licen[sc]ed under|released under|distributed under|subject to)"
    r" (?:either )?(?:the )?"
    r"(?:(?:version|v) ?(?P<before>\d(?:\.\d)?) (?:or any later version )?of the )?"
    r"(?:gnu (?P<kind>lesser |library |affero )?general public licen[sc]e"
    r"|(?:gnu )?(?P<short>[al]?)gpl)(?P<rest>.{0,220})"
)
_VERSION = re.compile(r"^.{0,60}?\bv(?:ersion)?\.? ?(\d(?:\.\d)?)|^ ?v?(\d(?:\.\d)?)")
_LATER = re.compile(r"any later version|or later|or newer|^ ?v?\d(?:\.\d)?\+")
_CREATIVE = re.compile(
    r"creativecommons\.org licen[sc]es (by(?: nc)?(?: nd| sa)?) (\d\.\d)"
    r"|creative commons (attribution(?: non ?commercial)?"
    r"(?: share ?[a]like| no ?deriv(?:ative)?s?)?)"
    r" (?:licen[sc]e )?(?:version )?(\d\.\d)"
    r"|\bcc (by(?: nc)?(?: nd| sa)?) (\d\.\d)"
)
_PARTS = {"attribution": "BY", "noncommercial": "NC", "sharealike": "SA"}


def licence(config: Licence) -> Stage:
    """Drop documents by license; a license found becomes metadata."""

    def stage(document: CorpusDocument, counts: Counter[str]) -> CorpusDocument | Removed:
        expression = find(document.text[: config.read])
        if not expression:
            counts["licence: none found"] += 1
            return Removed("none", "") if config.unknown == "remove" else document
        if is_dropped(expression, config.drop):
            return Removed("dropped", expression)
        counts[f"licence: {expression}"] += 1
        return document.with_text(document.text, licence=expression)

    return stage


def find(text: str) -> str:
    """Return an SPDX expression, empty if the text states no license.

    Without a tag, several licenses are joined by AND, or by OR if the text contains "dual".

    Example:
      >>> find("SPDX-License-Identifier: MIT OR Apache-2.0")
      'MIT OR Apache-2.0'
    """
    tags = dict.fromkeys(tag for match in _TAG.finditer(text) if (tag := _expression(match[1])))
    if len(tags) == 1:
        return next(iter(tags))
    if tags:
        return " AND ".join(f"({tag})" if " " in tag else tag for tag in tags)
    lower = text.lower()
    if not any(sign in lower for sign in SIGNS):
        return ""  # most texts; searching all patterns is slow
    plain = _BETWEEN.sub(" ", lower)
    names = {name for name, pattern in _PATTERNS.items() if pattern.search(plain)}
    names |= set(_gnu(plain)) | set(_creative(plain))
    specific = sorted(name for name in names if not names.intersection(WEAKER.get(name, ())))
    return (" OR " if "dual licen" in plain else " AND ").join(specific)


def is_dropped(expression: str, drop: tuple[str, ...]) -> bool:
    """Return whether every choice of an expression contains a listed name.

    With parentheses, return whether the expression contains one. A listed name matches all that
    begin with it and a hyphen: GPL matches GPL-3.0-only.
    """
    choices = [expression] if "(" in expression else expression.split(" OR ")
    listed = tuple(f"{name}-" for name in drop)
    return all(
        any(f"{name}-".startswith(listed) for name in _NAME.findall(choice)) for choice in choices
    )


def _expression(text: str) -> str:
    """Return the longest prefix that is an expression; a comment may end on the same line."""
    expression: list[str] = []
    wants_name = True
    for piece in re.findall(r"[()]|[A-Za-z0-9.+-]+", text):
        is_operator = piece in OPERATORS
        if piece in "()":
            expression.append(piece)
        elif wants_name == is_operator or not re.search(r"[A-Za-z]", piece):
            break
        else:
            expression.append(piece)
            wants_name = is_operator
    while expression and expression[-1] in (*OPERATORS, "("):
        expression.pop()
    joined = " ".join(expression).replace("( ", "(").replace(" )", ")")
    return joined if joined.count("(") == joined.count(")") else ""


def _gnu(plain: str) -> Iterator[str]:
    for match in _GNU.finditer(plain):
        letter = (match["short"] or match["kind"] or "")[:1].upper()
        version = _VERSION.search(match["rest"])
        stated = match["before"] or (version and (version[1] or version[2]))
        number = stated or {"A": "3.0", "L": "2.0"}.get(letter, "1.0")
        number = number if "." in number else f"{number}.0"
        is_later = not stated or _LATER.search(match[0]) or _LATER.search(match["rest"])
        yield f"{letter}GPL-{number}-{'or-later' if is_later else 'only'}"


def _creative(plain: str) -> Iterator[str]:
    for match in _CREATIVE.finditer(plain):
        short, long, version = match[1] or match[5], match[3], match[2] or match[4] or match[6]
        if long:
            words = re.sub(r"\b(non|share) ", r"\1", long).replace("no deriv", "noderiv")
            short = " ".join(_PARTS.get(word, "ND") for word in words.split())
        yield f"CC-{'-'.join(short.upper().split())}-{version}"
