"""Personal data in a set of labelled sentences: hits, misses and false alarms."""

import random
import re
import string
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxlm.corpus.filters.pii import (
    IBAN_LENGTHS,
    KINDS,
    NATIONALS,
    PRESIDIO_NAMES,
    find,
    is_national,
    national_checks,
    passes_luhn,
    passes_mod97,
)
from tests import machine
from tests.corpus.recipes import kept, lines, prose, removed, run, write_lines

PLACES = ("Write to {} today.", "({})", "contact: {}", "{}", "It was {}, they wrote", "a\t{}\nb")


def luhn_completed(digits: str) -> str:
    """The digits and the one that makes them right, found by trying."""
    return next(digits + last for last in string.digits if passes_luhn(digits + last))


def iban(draw: random.Random) -> str:
    country = draw.choice(["DE", "FR", "ES", "PL", "NL", "BE", "GB"])
    inner = "".join(draw.choices(string.digits, k=IBAN_LENGTHS[country] - 4))
    if country in ("GB", "NL"):
        inner = "BANK" + inner[4:]
    code = next(
        f"{country}{n:02d}{inner}" for n in range(2, 99) if passes_mod97(f"{country}{n:02d}{inner}")
    )
    return (
        code
        if draw.random() < 0.5
        else " ".join(code[at : at + 4] for at in range(0, len(code), 4))
    )


def card(draw: random.Random) -> str:
    kind = draw.choice(["4", "51", "2221", "37", "6011"])
    digits = luhn_completed(
        kind + "".join(draw.choices(string.digits, k=(14 if kind == "37" else 15) - len(kind)))
    )
    if kind == "37":
        return draw.choice([digits, f"{digits[:4]} {digits[4:10]} {digits[10:]}"])
    mark = draw.choice(["", " ", "-"])
    return mark.join(digits[at : at + 4] for at in range(0, 16, 4))


def phone(draw: random.Random) -> str:
    area, exchange, line = draw.randint(201, 989), draw.randint(200, 554), draw.randint(0, 9999)
    return draw.choice(
        [
            f"({area}) {exchange}-{line:04d}",
            f"{area}-{exchange}-{line:04d}",
            f"1-{area}-{exchange}-{line:04d}",
            f"+1 {area} {exchange} {line:04d}",
            f"+49 30 {draw.randint(1000, 9999)} {draw.randint(100, 999)}",
            f"+44 20 7{draw.randint(100, 999)} {line:04d}",
        ]
    )


def address(draw: random.Random) -> str:
    four = (
        f"{draw.choice([8, 17, 52, 93, 151, 185])}.{draw.randint(0, 255)}."
        f"{draw.randint(0, 255)}.{draw.randint(1, 254)}"
    )
    return draw.choice(
        [four, f"2a00:1450:4001:{draw.randint(1, 65535):x}::{draw.randint(1, 65535):x}"]
    )


def key(draw: random.Random) -> str:
    letters = string.ascii_letters + string.digits
    several = lambda size, of=letters: "".join(draw.choices(of, k=size))  # noqa: E731
    return draw.choice(
        [
            "AK" + "IA" + several(16, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"),
            "gh" + "p_" + several(36),
            "hf" + "_" + several(34),
            "ey" + "J" + several(20) + ".ey" + "J" + several(40) + "." + several(43),
            "-----BEGIN " + "PRIVATE KEY-----\n" + several(64) + "\n-----END " + "PRIVATE KEY-----",
        ]
    )


def email(draw: random.Random) -> str:
    name = draw.choice(["ann.b", "x_y+tag", "j-doe99", "Info", "a%b"])
    return (
        f"{name}@{draw.choice(['mail.', ''])}{draw.choice(['example', 'my-site'])}."
        f"{draw.choice(['org', 'co.uk', 'museum'])}"
    )


def ssn(draw: random.Random) -> str:
    return f"{draw.randint(100, 665)}-{draw.randint(1, 99):02d}-{draw.randint(1, 9999):04d}"


def shaped(draw: random.Random, shape: str) -> str:
    """A shape with a digit for each 0 and a letter for each A."""
    made = {"0": string.digits, "A": string.ascii_uppercase}
    return "".join(draw.choice(made[each]) if each in made else each for each in shape)


def national(draw: random.Random, state: str = "") -> str:
    """A number that a state could have given out: of its shape, drawn until it is right."""
    state = state or draw.choice(sorted(SHAPES))
    every = (shaped(draw, draw.choice(SHAPES[state])) for _ in range(200_000))
    form = re.compile(NATIONALS[state].form)
    return next(each for each in every if form.fullmatch(each) and is_national(each))


SHAPES = {
    "de_steuer_id": ("00 000 000 000", "00000000000"),
    "fr_nir": ("1 00 05 75 126 000 00", "200057512600000"),
    "es_dni": ("00000000A", "00000000-A"),
    "es_nie": ("X0000000A", "Y-0000000-A"),
    "it_codice_fiscale": ("AAAAAA00A15H501A",),
    "br_cpf": ("000.000.000-00",),
    "in_aadhaar": ("0000 0000 0000", "0000-0000-0000"),
    "cn_resident_id": ("110101198005150000",),
    "gb_nino": ("AB 00 00 00 C", "JK000000D"),
}
# Written by those who give them out, or who check them: python-stdnum's documentation, and for the
# British HMRC's form.
PUBLISHED = {
    "de_steuer_id": "36 574 261 809",
    "fr_nir": "2 95 10 99 126 111 93",
    "es_dni": "54362315-K",
    "es_nie": "X-2482300W",
    "it_codice_fiscale": "RCCMNL83S18D969H",
    "nl_bsn": "111222333",
    "br_cpf": "390.533.447-05",
    "in_aadhaar": "2341 2341 2346",
    "cn_resident_id": "360426199101010071",
    "gb_nino": "AB 12 34 56 C",
}
MADE = {
    "email": email,
    "phone": phone,
    "ip": address,
    "card": card,
    "iban": iban,
    "us_ssn": ssn,
    "national_id": national,
    "key": key,
}
INNOCENT = (
    "On 2024-01-02 at 12:34:56 it was 3.14159 or 1.234.567,89.",
    "ISBN 978-3-16-148410-0, order 1234-5678-9012-3456, and 4111111111111112 too.",
    "The network 192.168.0.1, 10.0.0.255, 127.0.0.1, ::1 and fe80::1 is at home, as is v1.2.3.4.",
    "@property of user@localhost, a @ b, and git@ is none; neither is x@y.",
    "DE00 1234 5678 9012 3456 78 and GB99BANK12345678901234 fail, XX12345678901234567890 is "
    "nowhere.",
    "Call 555-0100, (212) 555-0199, 000-00-0000, 666-12-3456, 912-34-5678 or 123-4567; it costs "
    "100-200-3000.",
    "c56a4180-65aa-42ec-a945-5fd21dec0538 and da39a3ee5e6b4b0d3255bfef95601890afd80709 are hashes.",
    "36 574 261 808, 54362315-L, RCCMNL83S18D969I, 390.533.447-06, 2341 2341 2345 and QQ 12 34 "
    "56 C are one off.",
    "The parts 111222333 and 1112.22.333 are in room 12345678-A; 2341 2341 2346 1234 has a group "
    "too many.",
    "See doi:10.1137/54362315K, and the table 5E0C 2341 2341 2346 in hexadecimal.",
    "AKIA is short, ghp_short too; eyJ is not a token. 12 345 678 people in 2001:2003 of "
    "1999-2000-2001.",
)
CODE = (
    "scores = q@k.transpose(-2, -1) and y = q@k.transpose",
    "x@w.mean(0) + x@w.T.dot(v) - x@w.shape[0] * L@D@L.conjugate().T @ x@p.kernel",
    "y = x@w.to(device) + x@w.at[0].set(1)",
    "git clone git@github.com:jax-ml/jax.git or ssh://git@gitlab.com/a/b",
    "abc::def, std::dec, a::bc, e::f, 1::2, x[::2], y[1::2], dead:beef::1, ff02::1",
    "node 18.17.1.2, Node.js 20.11.1.1, section 8.8.4.4, \u00a7 8.2.1.4 and version: 17.3.2.1",
    "pip install a==1.2.3.4 'b>=5.6.7.8'; python 3.13.0.1, OpenSSL 1.1.1.2, release 9.1.2.3",
    "Section 8.2.1.4 of the standard. Version 17.3.2.1 came out.",
)
# Personal data among what looks like code, each found before and after.
AMONG_CODE = (
    ("git@host.example.org is a person's here", "git@host.example.org"),
    ("mail ann.b@example.org(home)", "ann.b@example.org"),
    ("see ann@example.de[2]", "ann@example.de"),
    ("<ann@my.museum>:", "ann@my.museum"),
    ("ann@example.photography wrote", "ann@example.photography"),
    ("scp ann@example.org:a.txt .", "ann@example.org"),
    ("node 93.184.216.34 is down", "93.184.216.34"),
    ("the version at 93.184.216.34", "93.184.216.34"),
    ("server=8.8.4.4", "8.8.4.4"),
    ("from 2a00:1450::8a port 22", "2a00:1450::8a"),
    ("as ::ffff:808:404 too", "::ffff:808:404"),
)
# Text without personal data in it that looks as if it had some: what a rule of form cannot know.
MISLEADING = ("It is 8.2.1.4 in the standard.", "The one before 17.3.2.1 is old.")


def labelled() -> list[tuple[str, list[tuple[int, int, str]]]]:
    """Sentences with what is in them: 40 of each kind, and for each of these one with nothing."""
    draw = random.Random(20261122)
    sentences = []
    for kind, make in MADE.items():
        for _ in range(40):
            before, after = draw.choice(PLACES).split("{}")
            before = f"{prose(draw.randrange(1000), words=12)} {before}"
            value = make(draw)
            sentences.append(
                (before + value + after, [(len(before), len(before) + len(value), kind)])
            )
            sentences.append(
                (f"{draw.choice(INNOCENT)} {prose(draw.randrange(1000), words=12)}", [])
            )
    sentences += [(text, []) for text in MISLEADING for _ in range(3)]
    return sentences


def test_precision_and_recall_on_the_labelled_set(record_property):
    right, missed, wrong = Counter(), Counter(), Counter()
    for text, labels in labelled():
        got = {tuple(each) for each in find(text, tuple(KINDS))}
        right.update(kind for _, _, kind in got & set(labels))
        missed.update(kind for _, _, kind in set(labels) - got)
        wrong.update(kind for _, _, kind in got - set(labels))
    rows = [
        f"{kind:<8} recall {right[kind] / (right[kind] + missed[kind]):.3f}  "
        f"precision {right[kind] / max(1, right[kind] + wrong[kind]):.3f}"
        for kind in MADE
    ]
    record_property("table", "personal data, on made sentences\n" + "\n".join(rows))
    assert sum(right.values()) + sum(missed.values()) == 40 * len(MADE)
    for kind in MADE:
        assert right[kind] / (right[kind] + missed[kind]) >= 0.97, (kind, missed)
        assert right[kind] / (right[kind] + wrong[kind]) >= (0.85 if kind == "ip" else 0.97), (
            kind,
            wrong,
        )
    assert wrong["ip"] == 6, "the misleading ones are wrong, and counted"


@pytest.mark.parametrize("text", INNOCENT)
def test_numbers_that_are_nobodys_stay(text):
    assert find(text, tuple(KINDS)) == []


@pytest.mark.parametrize("text", CODE)
def test_code_and_versions_stay(text):
    assert find(text, tuple(KINDS)) == []


@pytest.mark.parametrize(("text", "value"), AMONG_CODE)
def test_personal_data_among_code_is_found(text, value):
    assert [text[each.start : each.end] for each in find(text, tuple(KINDS))] == [value]


@pytest.mark.parametrize("state", NATIONALS)
def test_the_number_of_each_state_is_found_and_one_digit_off_is_not(state, record_property):
    before = "BSN: " if state == "nl_bsn" else "number: "
    value = PUBLISHED[state]
    assert find(f"{before}{value}.", ("national_id",)) == [
        (len(before), len(before) + len(value), "national_id")
    ]
    slips = []
    for at in (at for at, each in enumerate(value) if each.isdigit()):
        for digit in set(string.digits) - {value[at]}:
            slips.append(find(f"{before}{value[:at]}{digit}{value[at + 1 :]}.", ("national_id",)))
    missed = sum(map(bool, slips)) / len(slips)
    record_property("table", f"{state}: {missed:.1%} of slips of one digit pass for a number")
    assert missed < 0.05 or state == "gb_nino", "the British one has no check digit"


def test_whatever_has_the_form_of_a_number_is_right_or_wrong():
    draw = random.Random(3)
    made = (shaped(draw, shape) for shapes in SHAPES.values() for shape in shapes * 300)
    assert {is_national(each) for each in made} == {True, False}


@pytest.mark.parametrize(
    ("value", "is_found"),
    [
        ("511801194601020971", True),
        ("441800198301130857", True),
        ("991801194601020970", False),
        ("511801194613020979", False),
        ("511801194601020972", False),
    ],
    ids=["of a city", "of a place no more", "of no province", "of month 13", "one off"],
)
def test_a_chinese_number_needs_a_province_a_date_and_its_check(value, is_found):
    assert is_national(value) == is_found


def test_without_stdnum_it_is_said_what_to_install(here, capsys, monkeypatch):
    write_lines(here / "in/a.jsonl", [{"text": prose(1)}])
    monkeypatch.setitem(sys.modules, "stdnum.de.idnr", None)
    national_checks.cache_clear()
    words = ("--config.source=in/a.jsonl", "--config.stages=pii", "--config.pii.kinds=national_id")
    assert "jaxlm[prepare]" in run(capsys, *words, code=66)["error"]["fix"]
    assert not (here / "out").exists()


def test_check_digits_find_every_slip_of_one_digit():
    draw = random.Random(1)
    for code, check in (
        (luhn_completed("411111111111111"), passes_luhn),
        (iban(draw).replace(" ", ""), passes_mod97),
    ):
        assert check(code)
        for at in range(4, len(code)):
            if code[at].isdigit():
                other = str((int(code[at]) + 1) % 10)
                assert not check(code[:at] + other + code[at + 1 :])


def test_finds_are_masked_in_place_and_counted(here, capsys):
    draw = random.Random(7)
    values = {kind: make(draw) for kind, make in MADE.items()}
    text = "\n".join(f"{kind}: {value}." for kind, value in values.items())
    write_lines(Path("in/a.jsonl"), [{"text": text}, {"text": prose(1)}])
    words = ["--config.source=in/a.jsonl", "--config.stages=pii", "--config.dedup=()"]
    answer = run(capsys, *words, f"--config.pii.kinds={','.join(KINDS)}")
    assert kept() == ["\n".join(f"{kind}: <{kind.upper()}>." for kind in values), prose(1)]
    assert answer["notes"] == {f"pii: {kind} masked": 1 for kind in values}
    out = b"".join(path.read_bytes() for path in Path("out").rglob("*") if path.is_file())
    assert values["email"].encode() not in out


@pytest.mark.parametrize("action", ["mask", "remove"])
def test_what_stands_beside_a_text_is_masked_too_but_for_addresses_of_pages(here, capsys, action):
    url = "https://a.example/user/+12123456789"
    fields = {"url": url, "author": {"mails": ["me@example.org", 7]}, "title": "Call me"}
    write_lines(Path("in/a.jsonl"), [{"text": prose(1), **fields}])
    words = ["--config.source=in/a.jsonl", "--config.stages=pii", "--config.dedup=()"]
    answer = run(capsys, *words, f"--config.pii.action={action}")
    (document,) = lines("kept/*.jsonl")
    assert document["text"] == prose(1)
    assert document["meta"] == fields | {"author": {"mails": ["<EMAIL>", 7]}}
    assert answer["notes"] == {"pii: email masked in metadata": 1}


def test_documents_with_a_find_can_be_removed_instead(here, capsys):
    write_lines(Path("in/a.jsonl"), [{"text": "me@example.org"}, {"text": "+1 212 345 6789"}])
    run(
        capsys,
        *("--config.source=in/a.jsonl", "--config.stages=pii", "--config.dedup=()"),
        *("--config.pii.action=remove", "--config.pii.kinds=email"),
    )
    assert kept() == ["+1 212 345 6789"]
    assert list(removed()) == ["pii.email"]


def test_long_text_without_finds_takes_no_time():
    begun = time.process_time()
    for text in (
        "a." * 200_000,
        "1-" * 200_000,
        "+1" * 200_000,
        "a@" * 100_000,
        "AB12 " * 80_000,
        "0:" * 200_000,
    ):
        find(text, tuple(KINDS))
    machine.require_processor(time.process_time() - begun, 10)


def test_a_document_of_many_finds_takes_time_in_proportion():
    begun = time.process_time()
    text = "".join(f"write to me{n}@example.org now\n" for n in range(20_000))
    assert len(find(text, ("email",))) == 20_000
    machine.require_processor(time.process_time() - begun, 5)


class Recogniser:
    """Stands for one of Presidio's: finds a word, as sure as it is made."""

    supported_entities = ("ANYTHING",)
    word, score = "", 1.0

    def analyze(self, text, entities, nlp_artifacts):
        assert (entities, nlp_artifacts) == (self.supported_entities, None)
        matches = ((m.start(), m.end(), self.score) for m in re.finditer(self.word, text))
        return [SimpleNamespace(start=a, end=b, score=score) for a, b, score in matches]


@pytest.fixture
def stand_in(monkeypatch):
    """A package in the place of Presidio, whose recognizers find a word each.

    The real one is 370 MB.
    """
    words = {"email": ("mailing", 1.0), "phone": ("ring", 0.4), "ip": ("ding", 0.3)}
    classes = {
        name: type(name, (Recogniser,), {"word": word, "score": score})
        for kind, name in PRESIDIO_NAMES.items()
        for word, score in [words.get(kind, ("#", 1.0))]
    }
    inner = SimpleNamespace(**classes)
    monkeypatch.setitem(
        sys.modules, "presidio_analyzer", SimpleNamespace(predefined_recognizers=inner)
    )
    asked = []

    def extract(**options):
        asked.append(options)
        return lambda text: SimpleNamespace(fqdn=text)

    monkeypatch.setitem(sys.modules, "tldextract", SimpleNamespace(TLDExtract=extract))
    return asked


PRESIDIO = ("--config.source=in/a.jsonl", "--config.stages=pii", "--config.pii.finder=presidio")


def test_what_presidio_finds_is_masked_with_our_own_keys(here, capsys, stand_in):
    secret = "gh" + "p_" + "a1" * 18
    text = f"mailing and ringing, wedding {secret} " + prose(1)
    write_lines(here / "in/a.jsonl", [{"text": text}])
    answer = run(capsys, *PRESIDIO)
    assert kept()[0].startswith("<EMAIL> and <PHONE>ing, wedding <KEY> ")
    assert answer["notes"] == {f"pii: {kind} masked": 1 for kind in ("email", "key", "phone")}
    assert stand_in, "the list of suffixes was not asked for"
    assert all(options == {"suffix_list_urls": (), "cache_dir": None} for options in stand_in)
    words = ("--config.pii.score=0.2", "--config.pii.kinds=ip", "--out=other")
    assert run(capsys, *PRESIDIO, *words)["notes"] == {"pii: ip masked": 1}


def test_without_presidio_it_is_said_what_to_install(here, capsys, monkeypatch):
    write_lines(here / "in/a.jsonl", [{"text": prose(1)}])
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    assert "jaxlm[presidio]" in run(capsys, *PRESIDIO, code=66)["error"]["fix"]
