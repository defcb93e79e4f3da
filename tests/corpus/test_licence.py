"""Licences at the top of files: precision and recall on a made set, tags, and what is dropped."""

import random
import textwrap

import pytest

from jaxlm.corpus.filters.licence import SIGNS, WORDS, find, is_dropped
from tests.corpus.recipes import kept, lines, prose, removed, run, write_lines

# The beginnings of texts that their stewards ask for on top of a file, by what they mean.
MIT = (
    "Permission is hereby granted, free of charge, to any person obtaining a copy of this "
    "software and associated files"
)
BSD = (
    "Copyright 2020 Example. All rights reserved. Redistribution and use in source and binary "
    "forms, with or without "
    "modification, are permitted provided that the following conditions are met: 1. "
    "Redistributions of source code must "
    "retain the above copyright notice. 2. Redistributions in binary form must reproduce it."
)
GNU = (
    "under the terms of the GNU {}General Public License as published by the Free Software "
    "Foundation"
)
ISC = (
    "Permission to use, copy, modify, and/or distribute this software for any purpose with or "
    "without fee is hereby granted"
)
HEADS = {
    "Apache-2.0": [
        'Licensed under the Apache License, Version 2.0 (the "License"); you may not use this '
        "file except"
    ],
    "MIT": [MIT, "This is released under the MIT license.", ":license: MIT, see LICENSE"],
    "BSD-2-Clause": [BSD, "Use is under the Simplified BSD License"],
    "BSD-3-Clause": [f"{BSD} 3. Neither the name of the copyright holder may be used"],
    "BSD-4-Clause": [
        f"{BSD} 3. All advertising materials mentioning features must name us. Neither the name "
        "of us may"
    ],
    "GPL-3.0-or-later": [
        f"you can redistribute it and/or modify it {GNU.format('')}, either version 3 of the "
        "License, or (at your option) any later version.",
        "This file is licensed under the GPLv3+",
    ],
    "GPL-2.0-only": [
        f"you can redistribute it {GNU.format('')}; version 2 of the License.",
        "subject to version 2 of the GNU General Public License. See COPYING",
    ],
    "LGPL-2.1-or-later": [
        f"modify it {GNU.format('Lesser ')}; either version 2.1 of the License, or (at your "
        "option) any later version."
    ],
    "AGPL-3.0-or-later": [
        f"it {GNU.format('Affero ')}, either version 3 of the License, or (at your option) any "
        "later version."
    ],
    "MPL-2.0": [
        "This Source Code Form is subject to the terms of the Mozilla Public License, v. 2.0. If "
        "a copy of it"
    ],
    "ISC": [
        f"{ISC}, provided that the above copyright notice and this permission notice appear in "
        "all copies."
    ],
    "0BSD": [f"{ISC}. THE SOFTWARE IS PROVIDED AS IS"],
    "Unlicense": [
        "This is free and unencumbered software released into the public domain. Anyone is free "
        "to copy it"
    ],
    "CC0-1.0": [
        "To the extent possible under law: https://creativecommons.org/publicdomain/zero/1.0/"
    ],
    "CC-BY-SA-4.0": [
        "licensed under a Creative Commons Attribution-ShareAlike 4.0 International License",
        "See https://creativecommons.org/licenses/by-sa/4.0/ for more.",
        "Text under CC BY-SA 4.0, pictures excepted",
    ],
    "CC-BY-NC-ND-3.0": ["Creative Commons Attribution-NonCommercial-NoDerivs 3.0 Unported"],
    "BSL-1.0": [
        "Distributed under the Boost Software License, Version 1.0. (See accompanying file)"
    ],
    "EPL-2.0": [
        "made available under the terms of the Eclipse Public License v2.0 which accompanies it"
    ],
    "Zlib": [
        "This software is provided 'as-is', without any express or implied warranty. In no event "
        "will the authors be "
        "held liable for any damages"
    ],
    "WTFPL": ["as in the DO WHAT THE FUCK YOU WANT TO PUBLIC LICENSE, Version 2"],
    "PSF-2.0": ["Licensed to PSF under a Contributor Agreement."],
    "MPL-1.1": ["The contents of this file are subject to the Mozilla Public License Version 1.1"],
    "EPL-1.0": ["under the Eclipse Public License 1.0"],
    "LicenseRef-BSD-style": [
        "Use of this source code is governed by a BSD-style license that can be found there."
    ],
    "LicenseRef-public-domain": ["This file has been placed in the public domain."],
    "LicenseRef-proprietary": [
        "Proprietary and confidential. Unauthorized copying of this file is prohibited."
    ],
    "": [
        "The driver needs a license to drive; the licensing office gives out new plates.",
        "The GNU General Public License is the subject of this essay on sharing and its critics.",
        "def license_of(package): return package.metadata['License'] or 'MIT'",
        "She asked for permission to use the car, free of charge, and it was granted.",
        "A warranty as is: domain names are redistributed by the public office.",
        "Copyright (c) 2020 Example. All rights reserved. See the file LICENSE.",
        "Apache is a web server; the Mozilla foundation makes a browser, and MIT is a university.",
    ],
}
STYLES = (
    ("", "", ""),
    ("# ", "", ""),
    ("// ", "", ""),
    (" * ", "/*\n", "\n */"),
    ("    ", "<!--\n", "\n-->"),
    (";; ", "", ""),
)


def samples() -> list[tuple[str, str]]:
    """Each head in every style of comment, wrapped and surrounded by other text; and its name."""
    draw = random.Random(3)
    samples = []
    for name, heads in HEADS.items():
        for head in heads:
            for begin, opening, closing in STYLES:
                wrapped = textwrap.wrap(
                    head, draw.randrange(40, 110), break_on_hyphens=False, break_long_words=False
                )
                body = "\n".join(begin + line for line in wrapped)
                samples.append((f"{prose(1, 24)}\n{opening}{body}{closing}\n\n{prose(2)}", name))
    return samples


def test_precision_and_recall_on_the_made_set(record_property):
    right = detected = licensed = 0
    wrong = []
    for text, name in samples():
        got = find(text)
        detected, licensed, right = (
            detected + bool(got),
            licensed + bool(name),
            right + bool(name and got == name),
        )
        wrong += [(name, got, text)] if got != name else []
    record_property(
        "table",
        f"licences on {len(samples())} made heads: precision {right / detected:.3f}, recall "
        f"{right / licensed:.3f}",
    )
    assert wrong == []
    assert {name for name in WORDS if name not in HEADS} == set()


def test_every_pattern_holds_a_sign_that_is_looked_for_first():
    for name, heads in HEADS.items():
        assert not name or all(any(sign in head.lower() for sign in SIGNS) for head in heads)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */",
            "GPL-2.0-only WITH Linux-syscall-note",
        ),
        ("// SPDX-License-Identifier: (MIT OR Apache-2.0) -->\nx", "(MIT OR Apache-2.0)"),
        ("# SPDX-License-Identifier: MIT and more words", "MIT"),
        ("# SPDX-License-Identifier: MIT OR\n", "MIT"),
        ("SPDX-License-Identifier: MIT\n" + MIT, "MIT"),
        (
            "SPDX-License-Identifier: MIT\nSPDX-License-Identifier: MIT OR ISC",
            "MIT AND (MIT OR ISC)",
        ),
        ("SPDX-License-Identifier: --\n" + MIT, "MIT"),
        ("SPDX-License-Identifier: (MIT", ""),
        (
            "dual licensed under the terms of the Apache License, Version 2.0, and the BSD License",
            "Apache-2.0 OR LicenseRef-BSD-style",
        ),
        (HEADS["Apache-2.0"][0] + ". Parts: " + MIT, "Apache-2.0 AND MIT"),
        ("licensed under the GNU LGPL version 3 only", "LGPL-3.0-only"),
        (f"{GNU.format('')}.", "GPL-1.0-or-later"),
    ],
)
def test_tags_come_before_words_and_several_are_joined(text, expected):
    assert find(text) == expected


@pytest.mark.parametrize(
    ("expression", "drop", "gone"),
    [
        ("GPL-3.0-only", ("GPL",), True),
        ("GPL-3.0-only", ("GPL-3.0",), True),
        ("LGPL-3.0-only", ("GPL",), False),
        ("MIT OR GPL-2.0-only", ("GPL",), False),
        ("MIT AND GPL-2.0-only", ("GPL",), True),
        ("(MIT OR GPL-2.0-only) AND ISC", ("GPL",), True),
        ("MIT OR GPL-2.0-only", ("GPL", "MIT"), True),
        ("CC-BY-NC-4.0", ("CC-BY-NC",), True),
        ("MIT", (), False),
    ],
)
def test_what_leaves_no_free_choice_is_dropped(expression, drop, gone):
    assert is_dropped(expression, drop) is gone


def test_the_stage_keeps_the_licence_and_drops_by_list(here, capsys):
    texts = [f"{HEADS['MIT'][0]}\n{prose(1)}", f"{HEADS['GPL-2.0-only'][0]}\n{prose(2)}", prose(3)]
    texts.append(prose(4, 1200) + MIT)  # behind what is looked at
    write_lines(here / "in/a.jsonl", [{"text": text} for text in texts])
    words = ("--config.source=in/a.jsonl", "--config.stages=licence", "--config.dedup=()")
    words += ("--config.licence.drop=GPL,AGPL",)
    answer = run(capsys, *words)
    assert [row["meta"] for row in lines("kept/*.jsonl")] == [{"licence": "MIT"}, {}, {}]
    assert removed()["licence.dropped"][0]["detail"] == "GPL-2.0-only"
    assert answer["notes"] == {"licence: MIT": 1, "licence: none found": 2}
    answer = run(capsys, *words, "--config.licence.unknown=remove", "--out=other")
    assert answer["removed"] == {"licence.dropped": 1, "licence.none": 2}
    assert len(kept()) == 3
