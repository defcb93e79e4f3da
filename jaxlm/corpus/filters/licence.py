"""Under which licence a text says that it stands: by SPDX's tag, else by the words that licences ask to be put on top of files.

Names are those of SPDX's list. What has no name there gets one with `LicenseRef-` in front, as SPDX has it.
Source: SPDX specification 2.3, annex D (expressions) and annex E (short identifiers in source files).
"""

import re
from collections import Counter
from collections.abc import Iterator

from jaxlm.corpus.document import Document, Removed, Stage
from jaxlm.corpus.filters.config import Licence

_TAG = re.compile(r"SPDX-License-Identifier:[ \t]*([A-Za-z0-9.+() \t-]{2,200})")
_NAME = re.compile(r"[A-Za-z0-9.+-]+")
_BETWEEN = re.compile(r"[^a-z0-9.+]+")
OPERATORS = ("AND", "OR", "WITH")

# Looked for in lower case, with one space for all that is no letter, digit, point or plus.
WORDS = {
    "Apache-2.0": r"licensed under the (?:terms of the )?apache licen[sc]e v(?:ersion|\.)? ?2|licen[sc]e apache(?: licen[sc]e)?(?: version)? ?2",
    "MIT": r"permission is hereby granted free of charge to any person obtaining a copy"
    r"|(?:licen[sc]ed|released|distributed|available) under (?:the )?(?:terms of the )?mit licen[sc]e|licen[sc]e mit\b",
    "BSD-4-Clause": r"redistribution and use in source and binary forms.{0,900}?all advertising materials mentioning",
    "BSD-3-Clause": r"redistribution and use in source and binary forms.{0,1500}?(?:neither the names? of|names? of (?:its|the)"
    r"(?: copyright)? (?:holders?|contributors|authors?).{0,40} may)"
    r"|(?:3 clause|new|modified|revised) bsd licen[sc]e",
    "BSD-2-Clause": r"redistribution and use in source and binary forms|(?:2 clause|simplified) bsd licen[sc]e",
    "LicenseRef-BSD-style": r"governed by a bsd style licen[sc]e|under (?:the|a) bsd(?: style)? licen[sc]e|and the bsd licen[sc]e|licen[sc]e bsd\b",
    "MPL-2.0": r"terms of the mozilla public licen[sc]e v(?:ersion|\.)? ?2",
    "MPL-1.1": r"mozilla public licen[sc]e (?:v|version )?1\.1",
    "ISC": r"permission to use copy modify and ?(?:or )?distribute this software for any purpose with or without fee is hereby "
    r"granted provided",
    "0BSD": r"permission to use copy modify and ?(?:or )?distribute this software for any purpose with or without fee is hereby "
    r"granted\. ",
    "Unlicense": r"this is free and unencumbered software released into the public domain",
    "CC0-1.0": r"cc0 1\.0 universal|creativecommons\.org publicdomain zero 1\.0",
    "BSL-1.0": r"boost software licen[sc]e version 1\.0",
    "EPL-2.0": r"(?:terms of|under) the eclipse public licen[sc]e (?:v|version )?(?:v\. )?2",
    "EPL-1.0": r"(?:terms of|under) the eclipse public licen[sc]e (?:v|version )?(?:v\. )?1",
    "PSF-2.0": r"licen[sc]ed to (?:psf|the python software foundation) under a contributor agreement|under the psf licen[sc]e",
    "Zlib": r"provided as is without any express or implied warranty\. in no event will the authors? be held liable",
    "WTFPL": r"do what the fuck you want to public licen[sc]e",
    "LicenseRef-public-domain": r"(?:placed in|released (?:in)?to|is in|dedicated to) the public domain",
    "LicenseRef-proprietary": r"proprietary and confidential|confidential and proprietary|unauthorized copying of this file",
}
# Every pattern holds one of these.
SIGNS = (
    *(
        "licen",
        "gpl",
        "permission",
        "redistribution",
        "warranty",
        "unencumbered",
        "domain",
        "creative",
    ),
    *("cc by", "cc-by", "cc0", "proprietary", "unauthorized"),
)
# A name that says less than another that is found too.
WEAKER = {
    "BSD-2-Clause": ("BSD-3-Clause", "BSD-4-Clause"),
    "BSD-3-Clause": ("BSD-4-Clause",),
    "LicenseRef-BSD-style": ("BSD-2-Clause", "BSD-3-Clause", "BSD-4-Clause"),
    "LicenseRef-public-domain": ("Unlicense", "CC0-1.0"),
}
_PATTERNS = {name: re.compile(words) for name, words in WORDS.items()}
_GNU = re.compile(
    r"(?:terms of|licen[sc]ed under|released under|distributed under|subject to) (?:either )?(?:the )?"
    r"(?:(?:version|v) ?(?P<before>\d(?:\.\d)?) (?:or any later version )?of the )?"
    r"(?:gnu (?P<kind>lesser |library |affero )?general public licen[sc]e|(?:gnu )?(?P<short>[al]?)gpl)(?P<rest>.{0,220})"
)
_VERSION = re.compile(r"^.{0,60}?\bv(?:ersion)?\.? ?(\d(?:\.\d)?)|^ ?v?(\d(?:\.\d)?)")
_LATER = re.compile(r"any later version|or later|or newer|^ ?v?\d(?:\.\d)?\+")
_CREATIVE = re.compile(
    r"creativecommons\.org licen[sc]es (by(?: nc)?(?: nd| sa)?) (\d\.\d)"
    r"|creative commons (attribution(?: non ?commercial)?(?: share ?alike| no ?deriv(?:ative)?s?)?) (?:licen[sc]e )?(?:version )?(\d\.\d)"
    r"|\bcc (by(?: nc)?(?: nd| sa)?) (\d\.\d)"
)
_PARTS = {"attribution": "BY", "noncommercial": "NC", "sharealike": "SA"}


def licence(config: Licence) -> Stage:
    """Documents whose licence is not in the list of those to drop; it goes to the meta, and nothing where none is found."""

    def stage(document: Document, counts: Counter[str]) -> Document | Removed:
        found = find(document.text[: config.read])
        if not found:
            counts["licence: none found"] += 1
            return Removed("none", "") if config.unknown == "remove" else document
        if is_dropped(found, config.drop):
            return Removed("dropped", found)
        counts[f"licence: {found}"] += 1
        return document.with_text(document.text, licence=found)

    return stage


def find(text: str) -> str:
    """An expression of SPDX; nothing where a text says nothing. Without a tag, several licences hold at once unless it says `dual`."""
    if tags := [tag for match in _TAG.finditer(text) if (tag := _expression(match[1]))]:
        each = list(dict.fromkeys(tags))
        return (
            each[0]
            if len(each) == 1
            else " AND ".join(f"({tag})" if " " in tag else tag for tag in each)
        )
    lower = text.lower()
    if not any(sign in lower for sign in SIGNS):
        return ""  # as most texts: to look for all of them takes time
    plain = _BETWEEN.sub(" ", lower)
    found = {name for name, pattern in _PATTERNS.items() if pattern.search(plain)}
    found |= set(_gnu(plain)) | set(_creative(plain))
    names = sorted(name for name in found if not found.intersection(WEAKER.get(name, ())))
    return (" OR " if "dual licen" in plain else " AND ").join(names)


def is_dropped(expression: str, drop: tuple[str, ...]) -> bool:
    """Whether no choice that an expression leaves is free of the names in a list; with brackets, whether it holds one.

    A name in the list stands for all that begin with it and a hyphen, as GPL for GPL-3.0-only.
    """
    choices = [expression] if "(" in expression else expression.split(" OR ")
    return all(
        any(
            name == each or name.startswith(f"{each}-")
            for name in _NAME.findall(choice)
            for each in drop
        )
        for choice in choices
    )


def _expression(text: str) -> str:
    """The longest start of a text that is an expression: what follows on the line may close a comment."""
    pieces = re.findall(r"[()]|[A-Za-z0-9.+-]+", text)
    taken: list[str] = []
    wants_name = True
    for piece in pieces:
        is_operator = piece in OPERATORS
        if piece in "()":
            taken.append(piece)
        elif wants_name == is_operator or not re.search(r"[A-Za-z]", piece):
            break
        else:
            taken.append(piece)
            wants_name = is_operator
    while taken and (taken[-1] in (*OPERATORS, "(")):
        taken.pop()
    joined = " ".join(taken).replace("( ", "(").replace(" )", ")")
    return joined if joined.count("(") == joined.count(")") else ""


def _gnu(plain: str) -> Iterator[str]:
    for match in _GNU.finditer(plain):
        kind = (match["kind"] or "").strip()
        letter = (
            match["short"].upper()
            if match["short"]
            else {"lesser": "L", "library": "L", "affero": "A"}.get(kind, "")
        )
        version = _VERSION.search(match["rest"])
        number = (
            match["before"]
            or (version and (version[1] or version[2]))
            or {"A": "3.0", "L": "2.0"}.get(letter, "1.0")
        )
        number = number if "." in number else f"{number}.0"
        is_later = (
            not (match["before"] or version)
            or _LATER.search(match[0])
            or _LATER.search(match["rest"])
        )
        yield f"{letter}GPL-{number}-{'or-later' if is_later else 'only'}"


def _creative(plain: str) -> Iterator[str]:
    for match in _CREATIVE.finditer(plain):
        short, long, version = match[1] or match[5], match[3], match[2] or match[4] or match[6]
        if long:
            words = long.replace("non commercial", "noncommercial").replace(
                "share alike", "sharealike"
            )
            short = " ".join(
                _PARTS.get(word, "ND") for word in words.replace("no deriv", "noderiv").split()
            )
        yield f"CC-{'-'.join(short.upper().split())}-{version}"
