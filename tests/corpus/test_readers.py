"""Files of every kind, whole and broken, are read by the command and counted.

The rest of the job finishes.
"""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import zstandard

from jaxlm.corpus.readers import streams
from jaxlm.corpus.readers.encoding import NotText, decoded
from tests import machine
from tests.corpus.recipes import RECIPE, kept, lines, prose, run, write_lines

ROOT = Path(__file__).parents[2]
PLAIN = ["--config.stages=()", "--config.dedup=()"]
PAGE = f"""<!doctype html><html><head><title>A  title</title><meta charset="utf-8">
<style>p {{}}</style></head>
<body><nav><a href="/">Home</a>
<a href="/b">Everything else that is in this menu and is longer than a word</a></nav>
<h1>A heading</h1><p>{prose(1)}<br>{prose(2)} &amp; more</p><ul><li><a href="/1">One link</a></li>
<li><a href="/2">Another link with many words that all stay
inside of the link and mean nothing here</a></li></ul>
<script>var text = "never shown in the text of any page";</script><p>{prose(3)}</p>
<pre>def f():\n    return 1</pre>
<footer>Copyright, all the rights there are, reserved by the person
who wrote it, again and again, every year</footer>"""


def read(capsys, *words):
    """The answer of a run that changes nothing, over all that is in the folder `in`."""
    return run(capsys, "--config.source=in/*", *PLAIN, *words)


@pytest.fixture
def into(here):
    """The folder that is read."""
    (here / "in").mkdir()
    return here / "in"


def packed(name: str, data: bytes) -> bytes:
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    pack[".zst"] = zstandard.ZstdCompressor().compress
    return pack[Path(name).suffix](data) if Path(name).suffix in pack else data


@pytest.mark.parametrize("ending", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_lines_rows_text_and_pages_are_read_packed_or_not(into, capsys, ending):
    rows = io.StringIO()
    csv.writer(rows).writerows([("id", "text"), (1, f'{prose(1)}\nread "she"'), (2, prose(2))])
    files = {
        "a.jsonl": json.dumps({"text": prose(3), "id": 7}).encode() + b"\n",
        "b.csv": rows.getvalue().encode(),
        "c.tsv": f"text\tid\n{prose(4).replace(chr(10), ' ')}\t5\n".encode(),
        "d.md": f"# {prose(5)}".encode(),
        "e.html": PAGE.encode(),
        "f.py": b"# coding: latin-1\nname = '\xe9'\n",
    }
    for name, data in files.items():
        (into / f"{name}{ending}").write_bytes(packed(f"{name}{ending}", data))
    answer = read(capsys)
    assert answer["kept"] == answer["read"] == 7
    documents = {
        (row["file"].removesuffix(ending), row["record"]): row for row in lines("kept/*.jsonl")
    }
    assert documents["in/a.jsonl", 1]["meta"] == {"id": 7}
    assert documents["in/b.csv", 1]["text"].endswith('read "she"')
    assert documents["in/b.csv", 2]["meta"] == {"id": "2"}
    assert documents["in/c.tsv", 1]["meta"] == {"id": "5"}
    assert documents["in/f.py", 1]["text"].endswith("name = '\u00e9'\n")


def test_parquet_rows_are_documents_with_their_other_columns(into, capsys):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": [prose(1), None, prose(2)], "score": [0.5, 1.0, float("nan")]})
    pyarrow.parquet.write_table(table, into / "a.parquet")
    answer = read(capsys)
    assert answer["broken"] == {"with a text of another type": 1}
    assert [row["meta"] for row in lines("kept/*.jsonl")] == [{"score": 0.5}, {"score": None}]
    assert [row["record"] for row in lines("kept/*.jsonl")] == [1, 3]


def test_the_main_text_of_a_page_is_its_prose_its_headings_and_its_code(into, capsys):
    (into / "a.html").write_text(PAGE)
    read(capsys)
    (page,) = lines("kept/*.jsonl")
    one, two, three = (prose(n).replace("\n", " ") for n in (1, 2, 3))
    assert (
        page["text"] == f"A heading\n\n{one}\n\n{two} & more\n\n{three}\n\ndef f():\n    return 1"
    )
    assert page["meta"]["title"] == "A title"


def test_short_blocks_between_prose_are_text_unless_they_are_a_list_of_links(into, capsys):
    names = ["one", "two words", "some more", "x", "y"]
    table = "".join(f"<tr><th>{name}<td>{number}" for number, name in enumerate(names))
    menu = "".join(f"<li><a href=/{n}>{name}</a><li>new" for n, name in enumerate(names))
    first, *others = (f"<p>{prose(number)}</p>" for number in range(3))
    foot = "<p>All rights<p>reserved"
    (into / "a.html").write_text(f"{first}<table>{table}</table>{others[0]}{foot}")
    (into / "b.html").write_text(f"{first}<ul>{menu}</ul>{others[0]}")
    (into / "c.html").write_text(f"{first}<h2>Links</h2><ul>{menu}</ul><h2>More</h2>{others[1]}")
    read(capsys)
    prose_of = [prose(number).replace("\n", " ") for number in range(3)]
    cells = [each for number, name in enumerate(names) for each in (name, str(number))]
    assert kept() == [
        "\n\n".join((prose_of[0], *cells, prose_of[1])),
        "\n\n".join((prose_of[0], prose_of[1])),
        "\n\n".join((prose_of[0], "More", prose_of[2])),
    ]


def test_a_page_that_is_longer_than_is_read_says_so(into, capsys):
    (into / "a.html").write_text(f"<p>{prose(1)}</p>{' ' * 2**23}<p>{prose(2)}</p>")
    answer = read(capsys)
    assert answer["notes"] == {"HTML: pages cut after 8,388,608 characters": 1}
    assert kept() == [prose(1).replace("\n", " ")]


def test_a_page_whose_tags_are_not_closed_loses_nothing(into, capsys):
    page = f"<title>T<body><form><h1>Head<p>{prose(1)}<p>{prose(2)} <a>b</a><div>{prose(3)}"
    (into / "a.html").write_text(page)
    read(capsys)
    (text,) = kept()
    assert text.startswith("Head\n\n")
    assert all(prose(n).replace("\n", " ") in text for n in (1, 2, 3))


@pytest.mark.parametrize(
    ("data", "text", "encoding"),
    [
        ("na\u00efve caf\u00e9".encode("cp1252"), "na\u00efve caf\u00e9", "cp1252"),
        (b"\xff\xfe" + "\u0430\u0431\u0432".encode("utf-16-le"), "\u0430\u0431\u0432", "utf-16-le"),
        (b"\xef\xbb\xbfplain", "plain", None),
        ("\u65e5\u672c\u8a9e".encode(), "\u65e5\u672c\u8a9e", None),
    ],
)
def test_encodings_are_found(into, capsys, data, text, encoding):
    (into / "a.txt").write_bytes(data)
    read(capsys)
    (row,) = lines("kept/*.jsonl")
    assert row["text"] == text
    assert row["meta"].get("encoding") == encoding


RUSSIAN = (
    "Весной, когда на реке тает лёд, старый паромщик каждое утро выходит на берег и смотрит, не "
    "поднялась ли вода. "
    "Он знает каждую отмель и каждый поворот, и дети любят слушать его рассказы о далёких "
    "городах.\n"
)
UKRAINIAN = (
    "Навесні, коли на річці тане лід, старий поромник щоранку виходить на берег і дивиться, чи "
    "не піднялася вода. "
    "Він знає кожну мілину, і діти із села люблять слухати його оповідання про далекі міста.\n"
)
JAPANESE = (
    "春になると、川の氷がとけて、渡し守の老人は毎朝岸に出て水の高さを見る。村の子どもたちは、遠い町の話を聞くのが好きだった。\n"
    "冬のあいだ、彼は網を直し、妹から届いた手紙を読む。とても静かな暮らしである。\n"
)
CHINESE = (
    "春天来了,河上的冰开始融化,老船夫每天早晨都到岸边去看水涨了没有。他认识每一处浅滩和每一个弯道,孩子们喜欢听他讲故事。\n"
    "冬天的时候,他修补渔网,读妹妹寄来的信。\n"
)
TAIWANESE = "春天來了,河上的冰開始融化,老船夫每天早晨都到岸邊去看水漲了沒有。他認識每一處淺灘,村裡的孩子們喜歡聽他講遠方城市的故事。\n"
KOREAN = (
    "봄이 되어 강의 얼음이 녹으면 늙은 뱃사공은 매일 아침 강가에 나가 물이 불었는지 살펴본다. "
    "마을 아이들은 먼 도시에 대한 그의 이야기를 듣는 것을 좋아한다. 겨울에는 그물을 고치고 누이가 보낸 편지를 읽는다.\n"
)
POLISH = (
    "Wiosną, gdy na rzece topnieje lód, stary przewoźnik każdego ranka wychodzi na brzeg i "
    "patrzy, czy woda się nie podniosła. "
    "Zna każdą mieliznę i każdy zakręt, a dzieci ze wsi lubią słuchać jego opowieści o dalekich "
    "miastach.\n"
)
CZECH = (
    "Na jaře, když na řece taje led, vychází starý převozník každé ráno na břeh a dívá se, "
    "jestli voda nestoupla. "
    "Zná každou mělčinu a každou zátočinu a děti z vesnice rády poslouchají jeho vyprávění o "
    "dalekých městech.\n"
)
GREEK = (
    "Την άνοιξη, όταν λιώνει ο πάγος στο ποτάμι, ο γέρος βαρκάρης βγαίνει κάθε πρωί στην "
    "όχθη και κοιτάζει αν ανέβηκε το νερό.\n"
)
FRENCH = (
    "Au printemps, quand la glace fond sur la rivière, le vieux passeur sort chaque matin sur la "
    "berge et regarde si l'eau a "
    "monté. Les enfants du village aiment écouter ses récits, où il est question de villes "
    "éloignées et d'étés très chauds.\n"
)
GERMAN = (
    "Im Frühling, wenn das Eis auf dem Fluss schmilzt, geht der alte Fährmann jeden Morgen ans "
    "Ufer und schaut, ob das Wasser "
    "gestiegen ist. Die Kinder hören gern seine Geschichten über ferne Städte und große Brücken.\n"
)
ENGLISH = (
    f"{prose(1)}\nIt was \u201cna\u00efve\u201d \u2013 but the caf\u00e9\u2019s owner stayed.\n"
)
TURKISH = (
    "İlkbaharda nehirdeki buz eriyince yaşlı kayıkçı her sabah kıyıya çıkar ve suyun yükselip "
    "yükselmediğine bakar. "
    "Köyün çocukları onun uzak şehirler hakkındaki öykülerini dinlemeyi çok sever, kışın ise "
    "ağlarını onarır.\n"
)
PORTUGUESE = (
    "Na primavera, quando o gelo derrete no rio, o velho barqueiro sai todas as manhãs para a "
    "margem e vê se a água subiu. As "
    "crianças da aldeia não se cansam de ouvir as suas histórias sobre cidades distantes, "
    "estações e verões muito quentes.\n"
)
SHORT = {  # texts of a few words
    "cp1252": (
        "Le gâteau était très bon, à la crème brûlée.",
        "Perché non è già più così? La città è bella, però il caffè è finito.",
        "El niño comió piñas mañana. ¿Cómo está usted?",
        "Það er fallegt veður í dag og við förum í göngutúr.",
        "Æblerne er røde på træet. Jeg går gerne en tur på øen.",
    ),
    "cp1250": (
        "Astăzi este o zi frumoasă şi mergem în parc. Băiatul citeşte o carte.",
        "Ma szép idő van, ezért sétálni megyünk az erdőbe. Köszönöm, jó éjszakát!",
        "Chlapec číta knihu o ďalekých krajinách. Ďakujem, ľudia.",
        "Dječak čita knjigu o dalekim zemljama. Žao mi je, šećer.",
    ),
    "cp1257": (
        "Šiandien gražus oras, todėl einame pasivaikščioti į parką.",
        "Šodien ir skaists laiks, tāpēc mēs ejam pastaigāties. Paldies, ļoti labi.",
        "Täna on ilus ilm. Öö on vaikne, üks mees ütles šokeeritult midagi.",
    ),
    "cp1254": ("Çocuk uzak ülkeler hakkında bir kitap okuyor. Şimdi öğretmen geldi.",),
}
WRITTEN = [  # text, as it was written, as what it is read
    *((RUSSIAN, name, name) for name in ("koi8_r", "cp1251", "iso8859_5", "cp866")),
    *((UKRAINIAN, name, name) for name in ("koi8_u", "cp1251")),
    (JAPANESE, "shift_jis", "cp932"),  # Microsoft's, which holds it
    (JAPANESE, "euc_jp", "euc_jp"),
    *((CHINESE, name, "gb18030") for name in ("gb18030", "gb2312")),
    (TAIWANESE, "big5", "big5"),
    (KOREAN, "euc_kr", "cp949"),
    *((POLISH, name, name) for name in ("iso8859_2", "cp1250")),
    *((CZECH, name, name) for name in ("iso8859_2", "cp1250")),
    (TURKISH, "cp1254", "cp1254"),
    (GREEK, "iso8859_7", "cp1253"),  # the same bytes
    *((each, "cp1252", "cp1252") for each in (FRENCH, GERMAN, PORTUGUESE, ENGLISH)),
    *(
        (each, name, name)
        for each in (RUSSIAN, JAPANESE, CHINESE, POLISH, GREEK, KOREAN, ENGLISH)
        for name in ("utf-16-le", "utf-16-be")
    ),
]


@pytest.mark.parametrize(
    ("encoding", "text"), [(name, text) for name, texts in SHORT.items() for text in texts]
)
@pytest.mark.parametrize("times", [1, 40])
def test_the_letters_of_a_language_identify_its_encoding(encoding, text, times):
    content = f"{text}\n" * times
    assert decoded(content.encode(encoding)) == (content, encoding)


@pytest.mark.parametrize(
    "piece",
    [b"abc\0def\n", b"abc\0de\n", b"abcde  \0", b"\0abc", b"name\0caf\xc3\xa9\0", b"one two\0"],
)
@pytest.mark.parametrize("before", [b"", b" "])
def test_text_with_nul_is_not_utf_16(piece, before):
    """The letters between the NUL bytes were read as Chinese characters."""
    with pytest.raises(NotText, match="control characters"):
        decoded(before + piece * 500)


def test_legacy_encodings_and_unmarked_utf_16_are_told_by_their_letters_and_counted(into, capsys):
    begin = "# " + "=" * 70 + "\n"
    for number, (text, name, _) in enumerate(WRITTEN):
        (into / f"{number:02d}.txt").write_bytes(text.encode(name))
        # A long one: ASCII first, and what is looked at ends in the middle.
        (into / f"{number:02d}-long.txt").write_bytes((begin * 1000 + text * 400).encode(name))
    marked = [(RUSSIAN, "utf-16"), (JAPANESE, "utf-16"), (POLISH, "utf-8-sig"), (GREEK, "utf-32")]
    for number, (text, name) in enumerate(marked):
        (into / f"marked{number}.txt").write_bytes(text.encode(name))
    answer = read(capsys)
    rows = {row["file"].removeprefix("in/"): row for row in lines("kept/*.jsonl")}
    for number, (text, name, encoding) in enumerate(WRITTEN):
        for file, expected in (
            (f"{number:02d}.txt", text),
            (f"{number:02d}-long.txt", begin * 1000 + text * 400),
        ):
            assert rows[file]["meta"] == {"encoding": encoding}, (file, name)
            assert rows[file]["text"] == expected, (file, name)
    for number, (text, _) in enumerate(marked):
        assert rows[f"marked{number}.txt"]["text"] == text
    counted = Counter(f"read as {encoding}" for _, _, encoding in WRITTEN for _ in range(2))
    counted.update(f"read as {name}" for name in ("utf-16-le", "utf-16-le", "utf-32-le"))
    assert answer["notes"] == counted


def test_a_declared_encoding_goes_before_what_the_letters_say(into, capsys):
    page = f"<meta charset=koi8-r><title>t</title><p>{RUSSIAN}{RUSSIAN}"
    (into / "a.html").write_bytes(page.encode("koi8_r"))
    (into / "b.html").write_bytes(page.replace("koi8-r", "utf-8").encode("cp1251"))  # a lie
    response_fields = "Content-Type: text/plain; charset=windows-1251"
    (into / "c.warc").write_bytes(
        warc("response", response(RUSSIAN.encode("cp1251"), response_fields))
        + warc("conversion", RUSSIAN.encode("koi8_r"))
    )
    read(capsys)
    rows = lines("kept/*.jsonl")
    assert [RUSSIAN.strip() in row["text"] for row in rows] == [True] * 4
    names = ["koi8-r", "cp1251", "windows-1251"]
    assert [row["meta"]["encoding"] for row in rows if "encoding" in row["meta"]] == names


def test_binary_files_that_are_named_as_text_are_counted(into, capsys):
    (into / "picture.txt").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    (into / "program.md").write_bytes(b"\x7fELF" + bytes(1000))
    (into / "noise.txt").write_bytes(bytes(range(256)) * 20)
    (into / "paper.txt").write_bytes(b"%PDF-1.7\n")
    (into / "stateful.txt").write_bytes(
        RUSSIAN.encode("iso2022_kr", "ignore") + b"\x0e9Y\x0f\x0e:;\x0f" * 9
    )
    (into / "fine.txt").write_text(prose(1))
    answer = read(capsys)
    assert answer["broken"] == {"not text": 5}
    assert kept() == [prose(1)]


def response(body: bytes, *fields: str, status: str = "200 OK") -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", *fields])
    return head.encode() + b"\r\n\r\n" + body


def warc(
    kind: str, block: bytes, url: str = "http://a.example/", length: int | None = None
) -> bytes:
    size = len(block) if length is None else length
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\n"
        "WARC-Date: 2026-01-02T03:04:05Z\r\n"
        f"Content-Length: {size}\r\n\r\n"
    )
    return head.encode() + block + b"\r\n\r\n"


HTML = "Content-Type: text/html; charset=ISO-8859-1"


def test_web_archives_give_pages_with_their_url_and_count_the_rest(into, capsys):
    page = PAGE.replace("A heading", "Caf\u00e9").encode("latin-1")
    chunked = (
        b"5\r\n"
        + page[:5]
        + b"\r\n"
        + f"{len(page) - 5:x}\r\n".encode()
        + page[5:]
        + b"\r\n0\r\n\r\n"
    )
    records = [
        warc("warcinfo", b"software: none\r\n"),
        warc("request", b"GET / HTTP/1.1\r\n\r\n"),
        warc("response", response(page, HTML), "http://a.example/1"),
        warc("response", response(gzip.compress(page), HTML, "Content-Encoding: gzip")),
        warc("response", response(chunked, HTML, "Transfer-Encoding: chunked")),
        warc("response", response(b"\x89PNG", "Content-Type: image/png")),
        warc("response", response(b"gone", HTML, status="404 Not Found")),
        warc("conversion", prose(9).encode(), "http://b.example/"),
    ]
    (into / "a.warc.gz").write_bytes(b"".join(map(gzip.compress, records)))
    answer = read(capsys)
    rows = lines("kept/*.jsonl")
    assert [row["record"] for row in rows] == [3, 4, 5, 8]
    assert all(row["text"].startswith("Caf\u00e9\n\n") for row in rows[:3])
    assert len({row["text"] for row in rows[:3]}) == 1
    assert rows[0]["meta"]["url"] == "http://a.example/1"
    assert answer["broken"] == {}
    assert answer["notes"] == {
        "passed over: WARC request": 1,
        "passed over: WARC warcinfo": 1,
        "passed over: answer image/png": 1,
        "passed over: answer status 404": 1,
    }


def test_a_record_of_a_web_archive_that_is_too_large_is_read_past(into, capsys):
    good = warc("conversion", prose(1).encode())
    (into / "a.warc").write_bytes(good + warc("conversion", b"x" * 5000) + good)
    with open(into / "b.warc", "wb") as file:  # a stated length beyond the memory
        file.write(good + warc("conversion", b"x", length=10**18))
    answer = read(capsys, "--config.reading.document_bytes=4000")
    assert answer["broken"] == {"too large": 2}
    assert kept() == [prose(1)] * 3


def test_broken_records_of_a_web_archive_are_counted_and_the_next_are_found(into, capsys):
    good = warc("conversion", prose(1).encode())
    parts = [
        good,
        warc("conversion", b"short and then much more than it has", length=5),
        good,
        b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: many\r\n\r\nbody\r\n\r\n",
        good,
        b"WARC/1.0\r\nno colon here\r\n\r\n",
        good,
        warc("response", b"no http at all"),
        warc("response", response(b"not gzip", HTML, "Content-Encoding: gzip")),
        good,
        warc("conversion", b"cut", length=5000),
    ]
    (into / "a.wet").write_bytes(b"".join(parts))
    answer = read(capsys)
    assert sum(text == prose(1) for text in kept()) == 5
    assert answer["broken"] == {
        "a WARC record that is cut": 1,
        "no HTTP response": 2,
        "no WARC record": 3,
    }


@pytest.mark.parametrize(
    "name",
    ["a.jsonl.gz", "a.jsonl.zst", "a.jsonl.bz2", "a.jsonl.xz", "a.tar.gz", "a.zip", "a.warc.gz"],
)
def test_a_cut_file_gives_what_was_before_the_cut_and_is_counted(into, capsys, name):
    count = 2000 if name.endswith(".bz2") else 400  # its blocks are large
    rows = b"".join(
        json.dumps({"text": os.urandom(500).hex()}).encode() + b"\n" for _ in range(count)
    )
    if name == "a.zip":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.jsonl", rows)
        data = buffer.getvalue()
    elif name == "a.tar.gz":
        data = gzip.compress(tar_of({f"{n}.jsonl": rows for n in range(3)}))
    elif name == "a.warc.gz":
        data = b"".join(gzip.compress(warc("conversion", row)) for row in rows.splitlines())
    else:
        data = packed(name, rows)
    (into / name).write_bytes(data[: len(data) * 2 // 3])
    (into / "b.txt").write_text(prose(1))
    answer = read(capsys)
    # Of an archive, the member that is cut and the others that would have come.
    assert answer["broken"] == {"damaged": 2 if name == "a.tar.gz" else 1}
    assert prose(1) in kept()
    if name != "a.zip":  # its table of contents stands at its end
        assert answer["kept"] > 1


def damaged(data: bytes, at: int, how: str) -> bytes:
    """The bytes with damage at a place."""
    return {
        "zeroed": data[:at] + bytes(40) + data[at + 40 :],
        "flipped": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
        "lost": data[:at] + data[at + 50 :],
        "added": data[:at] + b"\x1f\x8b\x08 and more" + data[at:],
    }[how]


@pytest.mark.parametrize("how", ["zeroed", "flipped", "lost", "added"])
def test_a_damaged_member_of_a_web_archive_costs_no_other(into, capsys, how):
    """Damage in the head, the body and the check of members, two adjacent ones, and in the last."""
    texts = [prose(number, words=240) for number in range(300)]
    parts = [gzip.compress(warc("conversion", text.encode())) for text in texts]
    begins = list(itertools.accumulate(map(len, parts), initial=0))
    data, lost = b"".join(parts), set()
    hit = {20: 0, 50: 300, 51: 300, 90: len(parts[90]) - 5, 120: len(parts[120]) // 2, 299: 200}
    for member, place in sorted(hit.items(), reverse=True):
        data = damaged(data, begins[member] + place, how)
        lost.add(member)
        if place + 50 > len(parts[member]) and how in ("zeroed", "lost"):
            lost.add(member + 1)
    (into / "a.warc.gz").write_bytes(data)
    (into / "b.txt").write_text(prose(1000))
    answer = read(capsys)
    if how == "added":  # in front of a member's first byte, it costs none
        lost.remove(20)
    assert kept() == [text for at, text in enumerate(texts) if at not in lost] + [prose(1000)]
    rows = lines("broken/*.jsonl")
    assert {row["kind"] for row in rows} == {"damaged"}
    assert all(row["detail"].startswith("a gzip member: ") for row in rows)
    assert len(lost) - 2 <= answer["broken"]["damaged"] <= len(lost) + 1  # a gap is one loss


def test_what_only_begins_as_members_do_is_passed_over_once():
    """300,000 such places before the next member: seconds, as each is examined in place."""
    good = gzip.compress(warc("conversion", prose(1).encode()))
    stream = streams.members(
        io.BytesIO(damaged(good, 12, "zeroed") + b"\x1f\x8b\x08" * 300_000 + good)
    )
    begun = time.process_time()
    with pytest.raises(streams.DamagedMember):
        stream.read()
    assert stream.read() == gzip.decompress(good)
    machine.require_processor(time.process_time() - begun, 5)


def test_a_long_line_of_a_table_is_one_broken_row_and_the_next_are_read(into, capsys):
    long = "x" * 5000
    (into / "a.csv").write_text(
        f'text,id\none,1\n{long},2\n"{long}",3\nfour,4\n"five\n{long}\nmore",5\nsix,6\n'
        f'"{long}\nseven",7\neight,8\n"nine\n{long}",9\nten,10\n'
    )
    (into / "b.tsv").write_text(f"text\tid\n{long}\t1\ntwo\t2\n{long}")
    answer = read(capsys, "--config.reading.document_bytes=1000")
    assert kept() == ["one", "four", "six", "eight", "ten", "two"]
    places = [(row["file"], row["record"]) for row in lines("broken/*.jsonl")]
    assert places == [*(("in/a.csv", n) for n in (2, 3, 5, 7, 9)), ("in/b.tsv", 1), ("in/b.tsv", 3)]
    assert answer["broken"] == {"too large": 7}


@pytest.mark.parametrize("rows", [1, 2000], ids=["to the end", "beyond a document"])
def test_a_quote_that_is_not_closed_costs_its_line(into, capsys, rows):
    """The limit is the thousand bytes of a document; else the quote would swallow the file."""
    (into / "a.csv").write_text(
        'text,id\none,1\n"two\nlines",2\n"three,3\nfour,4\nfive,5\n' + "six,6\n" * rows
    )
    (into / "b.csv").write_text('text\n"sev""en"\n"eight\nnine\n')
    (into / "c.csv").write_text('text\nte\rn\neleven\n"twelve')
    (into / "d.csv").write_text('text,"id\none,1\n')
    answer = read(capsys, "--config.reading.document_bytes=1000")
    assert kept() == [
        "one",
        "two\nlines",
        "four",
        "five",
        *["six"] * rows,
        'sev"en',
        "nine",
        "eleven",
    ]
    places = [(row["file"], row["record"]) for row in lines("broken/*.jsonl")]
    assert places == [
        ("in/a.csv", 3),
        ("in/b.csv", 2),
        ("in/c.csv", 1),
        ("in/c.csv", 3),
        ("in/d.csv", 0),
    ]
    assert answer["broken"] == {"with a quote that is not closed": 5}


@pytest.mark.parametrize(
    ("ending", "size"),
    [
        ("csv", 4e7),
        *(
            pytest.param(each, 1e9, marks=pytest.mark.slow)
            for each in ("csv", "tsv", "jsonl", "txt")
        ),
    ],
)
def test_s4_a_line_of_a_gigabyte_takes_no_memory(into, here, capsys, ending, size, record_property):
    """Peak memory of the command, less that for a file without the line."""
    short = '{"text": "behind"}\n' if ending == "jsonl" else "text\nbehind\n"
    piece = b"y" * 10**6
    with gzip.open(into / f"a.{ending}.gz", "wb", compresslevel=1) as file:
        file.write(b"text\n" if ending in ("csv", "tsv") else b"")
        for _ in range(int(size / len(piece))):
            file.write(piece)
        file.write(b"\n" + short.encode())
    (here / "small").mkdir()
    (here / f"small/a.{ending}").write_text(short)
    (here / "recipe.py").write_text(RECIPE)
    peaks = []
    for folder in ("small", "in"):
        words = ["data", "run", "--config=recipe.py", f"--out={folder}-out", "--quiet", *PLAIN]
        words += [f"--config.source={folder}/*", "--config.reading.document_bytes=1e6"]
        code = (
            f"from jaxlm.cli.main import main\nassert main({words}) == 0\n"
            "print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"
        )
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.splitlines()[-1]) / 1024)
    report = json.loads(Path("in-out/report.json").read_text())
    assert report["broken"] == {"too large": 1}
    assert report["kept"] == {"csv": 2, "tsv": 2, "jsonl": 1, "txt": 0}[ending]
    record_property("table", f".{ending}, a line of {size:.0e} bytes: {peaks} MiB")
    assert peaks[1] - peaks[0] < 20


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def test_archives_give_their_members_each_by_its_kind(into, capsys):
    row = json.dumps({"text": prose(1)}).encode()
    with zipfile.ZipFile(into / "a.zip", "w") as archive:
        archive.writestr("texts/one.jsonl", row)
        archive.writestr("texts/two.txt", prose(2))
        archive.writestr("inner.zip", b"PK")
    (into / "b.tgz").write_bytes(
        gzip.compress(
            tar_of({"x/three.md": prose(3).encode(), "four.jsonl.zst": packed("a.zst", row)})
        )
    )
    answer = read(capsys)
    assert [row["file"] for row in lines("kept/*.jsonl")] == [
        "in/a.zip!texts/one.jsonl",
        "in/a.zip!texts/two.txt",
        "in/b.tgz!x/three.md",
        "in/b.tgz!four.jsonl.zst",
    ]
    assert answer["broken"] == {"an archive in another": 1}


def test_s4_names_that_lead_out_links_and_devices_are_refused_and_nothing_is_unpacked(
    into, here, capsys
):
    outside = here / "outside.txt"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("../outside.txt", str(outside), "a/../../outside.txt"):
            entry = tarfile.TarInfo(name)
            entry.size = 4
            archive.addfile(entry, io.BytesIO(b"evil"))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            entry = tarfile.TarInfo(f"special{kind!r}")
            entry.type, entry.linkname = kind, "/etc/passwd"
            archive.addfile(entry)
        entry = tarfile.TarInfo("good.txt")
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b"good"))
    (into / "a.tar").write_bytes(buffer.getvalue())
    with zipfile.ZipFile(into / "b.zip", "w") as archive:
        archive.writestr("..\\outside.txt", "evil")
        link = zipfile.ZipInfo("link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    answer = read(capsys)
    assert answer["broken"] == {
        "a name that leads out of its archive": 4,
        "no plain file of an archive": 5,
    }
    assert kept() == ["good"]
    assert not outside.exists()


def test_s4_bombs_end_at_the_caps_and_the_rest_of_the_job_finishes(into, capsys):
    zeros = bytes(30_000_000)
    (into / "a.txt.gz").write_bytes(gzip.compress(zeros))
    (into / "b.jsonl.gz").write_bytes(
        gzip.compress(b'{"text": "' + zeros + b'"}\n{"text": "behind"}\n')
    )
    with zipfile.ZipFile(into / "c.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(9):
            archive.writestr(f"{number}.txt", b"a" * 900_000)
    with zipfile.ZipFile(into / "d.zip", "w") as archive:
        for number in range(60):
            archive.writestr(f"{number}.txt", "b")
    with zipfile.ZipFile(into / "f.zip", "w") as archive:
        for number in range(600):
            archive.writestr(f"{number:0100d}.txt", "b")
    (into / "e.txt").write_text(prose(1))
    answer = read(
        capsys,
        *("--config.reading.document_bytes=1e6", "--config.reading.archive_bytes=2e6"),
        "--config.reading.archive_members=50",
    )
    rows = [(row["file"], row["kind"], row["detail"]) for row in lines("broken/*.jsonl")]
    assert ("in/a.txt.gz", "too large", "more than 1,000,000 bytes") in rows
    assert ("in/b.jsonl.gz", "too large", "a line of more than 1,000,000 bytes") in rows
    assert ("in/d.zip", "too large", "more than 50 members") in rows  # known before any is read
    size = "more than 50 members, by the size of its directory"
    assert ("in/f.zip", "too large", size) in rows
    # Two members fit, and the budget is spent for all that follow.
    assert [file for file, _, _ in rows if file.startswith("in/c.zip!")] == [
        f"in/c.zip!{number}.txt" for number in range(2, 9)
    ]
    assert {kind for _, kind, _ in rows} == {"too large"}
    assert prose(1) in kept()
    assert "behind" in kept()
    assert answer["kept"] == 1 + 1 + 2


def test_rows_that_do_not_fit_are_counted(into, capsys):
    (into / "a.csv").write_bytes(
        b"text,id\nfine,1\nno id\n\nthree,2,3\nna\xefve,4\nna\xc3\xafve,5\nlast,6\n"
    )
    write_lines(into / "b.jsonl", [{"text": "fine"}, [1], {"text": 3}, {"other": "x"}, "text"])
    with open(into / "b.jsonl", "ab") as file:
        file.write(b"{" * 100_000 + b'\n\n{"text": "half \\ud800 a pair"}\n')
    answer = read(capsys)
    assert kept() == ["fine", "na\u00efve", "last", "fine", "half \ufffd a pair"]
    assert answer["broken"] == {
        "not JSON": 1,
        "not UTF-8": 1,
        "with a text of another type": 1,
        "with more or fewer fields than the table": 2,
        "without the text key": 3,
    }
    assert answer["notes"] == {"with a lone surrogate, replaced": 1}


@pytest.mark.parametrize(
    ("name", "encoding", "called"),
    [
        ("a.csv", "cp1252", "cp1252"),
        ("a.csv.gz", "koi8-r", "koi8_r"),
        ("a.csv", "utf-16", "utf-16-le"),
        ("a.tsv.gz", "utf-16-be", "utf-16-be"),
        ("a.jsonl.zst", "utf-16", "utf-16-le"),
    ],
)
def test_tables_are_read_in_the_encoding_that_their_begin_tells(
    into, capsys, name, encoding, called
):
    """Tables have 150 to 290 kB: most rows come after the examined part, which ends in a row."""
    spoken = FRENCH if encoding == "cp1252" else RUSSIAN
    texts = [f"{spoken.strip()} {n}" for n in range(700)]
    rows = [f"{n}\t{text}" if ".tsv" in name else f'{n},"{text}"' for n, text in enumerate(texts)]
    if ".jsonl" in name:
        table = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    else:
        table = "\n".join([("id\ttext" if ".tsv" in name else "id,text"), *rows])
    (into / name).write_bytes(packed(name, table.encode(encoding)))
    answer = read(capsys)
    assert kept() == texts
    assert answer["notes"] == {f"read as {called}": 1}


@pytest.mark.parametrize("ending", ["gz", "xz"])
def test_rows_before_a_cut_near_the_begin_are_read(into, capsys, ending):
    rows = [
        {"text": os.urandom(50).hex()} for _ in range(800)
    ]  # 91 kB, and 64 of them are examined
    data = packed(f"a.{ending}", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    (into / f"a.jsonl.{ending}").write_bytes(data[: len(data) // 2])
    answer = read(capsys)
    assert answer["broken"] == {"damaged": 1}
    assert kept() == [row["text"] for row in rows[: answer["kept"]]]
    assert 200 < answer["kept"] < 500


def test_a_packed_file_of_no_bytes_is_damaged(into, capsys):
    names = ["a.jsonl.gz", "a.txt.zst", "a.txt.bz2", "a.csv.xz", "a.warc.gz", "a.tgz"]
    for name in names:
        (into / name).touch()
    with zipfile.ZipFile(into / "a.zip", "w") as archive:
        archive.writestr("a.jsonl.gz", b"")
    assert read(capsys)["broken"] == {"damaged": 7}
    assert {row["file"] for row in lines("broken/*.jsonl")} == {
        *(f"in/{name}" for name in names),
        "in/a.zip!a.jsonl.gz",
    }


def zip_of_nothing(members: int) -> bytes:
    """A zip file of empty members: its directory, and the two ends that locate it."""
    entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0)
    directory = members * (entry + b"a.txt")
    size, start = len(directory), 0
    wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, members, members, size, start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, size, 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, size, start, 0)
    return directory + wide + locator + end


@pytest.mark.few(1)
@pytest.mark.parametrize(("members", "cap"), [(20_000, 2_000), (1_000_000, None)])
def test_s4_an_archive_of_more_members_than_the_cap_ends_there(into, capsys, members, cap):
    """In seconds of the processor; the slow set has the cap that is the default."""
    part = 10_000
    entry = tar_of({"a.txt": b""})[:512]
    (into / "a.tar.gz").write_bytes(gzip.compress(entry * part) * (members // part))
    (into / "b.zip").write_bytes(zip_of_nothing(members))
    (into / "e.txt").write_text(prose(1))
    begun = time.process_time()
    answer = read(capsys, *([f"--config.reading.archive_members={cap}"] if cap else []))
    machine.require_processor(time.process_time() - begun, 30)
    rows = [(row["file"], row["kind"], row["detail"]) for row in lines("broken/*.jsonl")]
    detail = f"more than {cap or 100_000:,} members"
    assert ("in/a.tar.gz", "too large", detail) in rows
    assert ("in/b.zip", "too large", detail) in rows
    assert prose(1) in kept()
    assert answer["broken"]["too large"] == 2
