"""PDF files, whole, damaged, locked, huge and slow: read or counted; the job finishes."""

import io
import sys
import zipfile
import zlib

import pypdf
import pytest

from tests.corpus.recipes import kept, lines, prose, run, write_lines

SET = ("--config.source=in/*", "--config.stages=()", "--config.dedup=()")


def made(pages: list[bytes], title: str = "", packed: bool = False) -> bytes:
    """A PDF of pages with these instructions, by hand."""
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(pages)))
    parts = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for number, page in enumerate(pages):
        data = zlib.compress(page) if packed else page
        how = " /Filter /FlateDecode" if packed else ""
        parts += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * number} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>".encode(),
            f"<< /Length {len(data)}{how} >>\nstream\n".encode() + data + b"\nendstream",
        ]
    parts.append(f"<< /Title ({title}) >>".encode())
    out, places = b"%PDF-1.4\n", []
    for number, part in enumerate(parts, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n".encode() + part + b"\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    trailer = f"<< /Size {len(parts) + 1} /Root 1 0 R /Info {len(parts)} 0 R >>"
    end = f"xref\n0 {len(parts) + 1}\n0000000000 65535 f \n{table}trailer\n{trailer}\n"
    return out + f"{end}startxref\n{len(out)}\n%%EOF\n".encode()


def page(text: str) -> bytes:
    """Instructions that write lines."""
    shown = "".join(f"({line}) Tj T*\n" for line in text.split("\n"))
    return f"BT /F1 12 Tf 14 TL 72 720 Td\n{shown}ET".encode("cp1252")


def locked(password: str) -> bytes:
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(made([page("behind a lock")])))
    writer.encrypt(password, "owner", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


@pytest.fixture
def into(here):
    (here / "in").mkdir()
    return here / "in"


def test_the_text_of_all_pages_is_read_with_its_title(into, capsys):
    whole = made([page(prose(1)), page(""), page("Caf\xe9: na\xefve.")], "A title", packed=True)
    (into / "a.pdf").write_bytes(whole)
    (into / "b.pdf").write_bytes(locked(""))  # only the owner needs a password
    with zipfile.ZipFile(into / "c.zip", "w") as archive:
        archive.writestr("inner.pdf", whole)
    answer = run(capsys, *SET)
    text = f"{prose(1)}\n\nCaf\xe9: na\xefve."
    assert kept() == [text, "behind a lock", text]
    meta = [row["meta"] for row in lines("kept/*.jsonl")]
    assert meta == [
        {"title": "A title", "pages": 3},
        {"pages": 1},
        {"title": "A title", "pages": 3},
    ]
    assert answer["broken"] == {}


def test_what_cannot_be_read_is_counted_by_class_and_the_rest_goes_on(into, capsys):
    whole = made([page(prose(n)) for n in range(3)])
    files = {
        "cut.pdf": whole[: len(whole) // 3],
        "none.pdf": b"",
        "other.pdf": b"GIF89a" + bytes(100),
        "locked.pdf": locked("secret"),
        "loop.pdf": whole.replace(b"/Kids [4 0 R", b"/Kids [2 0 R"),
        "pages.pdf": made([page("x")] * 30),
        "bomb.pdf": made([b"BT " + bytes(80_000_000)], packed=True),
        "scan.pdf": made([b""]),
    }
    for name, data in files.items():
        (into / name).write_bytes(data)
    write_lines(into / "z.jsonl", [{"text": prose(9)}])
    answer = run(capsys, *SET, "--config.reading.pdf_pages=20")
    broken = {row["file"].removeprefix("in/"): row for row in lines("broken/*.jsonl")}
    assert {name: row["kind"] for name, row in broken.items()} == {
        "cut.pdf": "damaged",
        "none.pdf": "damaged",
        "other.pdf": "damaged",
        "locked.pdf": "encrypted",
        "loop.pdf": "damaged",
        "pages.pdf": "too large",
        "bomb.pdf": "too large",
    }
    assert broken["pages.pdf"]["detail"] == "30 pages"
    assert answer["removed"] == {"read.blank": 1}
    assert prose(9) in kept()
    assert answer["read"] == len(files) + 1


def test_one_that_takes_too_long_or_has_too_much_text_is_given_up(into, capsys):
    slow = b"BT /F1 12 Tf " + b"(a) Tj 1 0 0 1 0 0 Tm " * 200_000 + b"ET"
    (into / "slow.pdf").write_bytes(made([slow], packed=True))
    (into / "text.pdf").write_bytes(made([page("word " * 20_000)], packed=True))
    write_lines(into / "z.jsonl", [{"text": prose(9)}])
    words = ("--config.reading.pdf_seconds=1", "--config.reading.document_bytes=60_000")
    assert run(capsys, *SET, *words)["broken"] == {"too large": 1, "too slow": 1}
    assert kept() == [prose(9)]


def test_without_pypdf_it_is_said_what_to_install(into, capsys, monkeypatch):
    (into / "a.pdf").write_bytes(made([page("x")]))
    monkeypatch.setitem(sys.modules, "pypdf", None)
    error = run(capsys, *SET, code=66)["error"]
    assert error["fix"] == f"{sys.executable} -m pip install 'jaxlm[prepare]'"
