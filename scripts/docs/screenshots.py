"""Pictures of the terminal and the report of a short run, for the manual.

    python scripts/docs/screenshots.py

The run is the quickstart with statistics of its layers; nothing else should run meanwhile. Chromium
draws the report in both themes, and the rows that `jaxlm train` prints, in the colors of its codes.
The pictures are in scripts/docs/.
"""

import argparse
import html
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH = 1000  # pixels
COLUMNS, ROWS = 100, 60  # of the terminal
SETTINGS = ["log.every=20", "log.layers=norms,activations", "log.layers_every=20"]
COLORS = {"1": "font-weight:bold", "2": "color:#9198a1", "31": "color:#ff7b72"}
COLORS |= {"32": "color:#3fb950", "33": "color:#d29922", "36": "color:#39c5cf"}
CODE = re.compile(r"\x1b\[([\d;]*)([A-Za-z])")


def main() -> int:
    """Train, and write the pictures."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        text = trained(folder)
        page = folder / "terminal.html"
        page.write_text(terminal_page(text))
        height = 20 * (page.read_text().count("\n") + 1) + 24
        picture(page, FOLDER / "terminal.png", height=height)
        for theme in ("light", "dark"):
            picture(folder / "run/report.html", FOLDER / f"report_{theme}.png", theme=theme)
    return 0


def trained(folder: Path) -> str:
    """Train the run in a terminal; return what it prints."""
    settings = [f"--config.{each}" for each in SETTINGS]
    words = [sys.executable, "-m", "jaxlm", "train", "--config=quickstart", *settings]
    environment = os.environ | {
        "COLUMNS": str(COLUMNS),
        "LINES": str(ROWS),
        "PYTHONPATH": str(ROOT),
    }
    environment |= {"TERM": "xterm-256color"}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*words, "--workdir=run"], cwd=folder, env=environment, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    data = b""
    while True:
        try:
            part = os.read(ours, 2**16)
        except OSError:  # the process has closed its side
            break
        data += part
    os.close(ours)
    if process.wait():
        raise SystemExit(data.decode())
    return data.decode()


def terminal_page(text: str) -> str:
    """Return a page with the lines of a terminal as they are at the end."""
    lines = [line for line in screen(text) if CODE.sub("", line).strip()]
    shown = "\n".join(map(_spans, lines))
    return (
        "<!doctype html><meta charset=utf-8><style>body { margin: 0; background: #0d1117; }"
        "pre { margin: 12px; font: 14px/20px monospace; color: #e6edf3; }</style>"
        f"<pre>{shown}</pre>"
    )


def screen(text: str) -> list[str]:
    """Return the lines of a terminal, colors included, after it has written a text.

    Of the codes that move the cursor, those of a progress bar are known: up, and clear a line.
    """
    lines, row = [""], 0
    for part in re.split(r"(\r?\n|\r|\x1b\[[\d;?]*[A-Za-z])", text):
        if part.endswith("\n"):
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r" or part.endswith("K"):
            lines[row] = ""
        elif part.startswith("\x1b") and part.endswith("A"):
            row = max(row - int(part[2:-1] or 1), 0)
        elif not part.startswith("\x1b") or part.endswith("m"):
            lines[row] += part
    return lines


def _spans(line: str) -> str:
    parts, style = [], ""
    for index, piece in enumerate(CODE.split(line)):
        kind = index % 3
        if kind == 0 and piece:
            text = html.escape(piece)
            parts.append(f'<span style="{style}">{text}</span>' if style else text)
        elif kind == 1:
            style = ";".join(COLORS[code] for code in piece.split(";") if code in COLORS)
    return "".join(parts)


def picture(page: Path, target: Path, *, height: int = 1400, theme: str = "light") -> None:
    """Draw the upper part of a page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"this needs one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as profile:
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += [f"--user-data-dir={profile}", f"--window-size={WIDTH},{height}"]
        words += ["--virtual-time-budget=5000", f"--screenshot={target}"]
        if theme == "dark":
            words.append("--blink-settings=preferredColorScheme=0")
        done = subprocess.run([browser, *words, f"file://{page}"], capture_output=True, text=True)
    if done.returncode or not target.is_file():
        raise SystemExit(done.stderr)
    with Image.open(target) as image:
        colors = image.convert("RGB").quantize(64, Image.Quantize.MAXCOVERAGE)  # rare ones stay
        colors.save(target, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
