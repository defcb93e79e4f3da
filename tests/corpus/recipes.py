"""Parts of the tests of recipes: a config file, a run of the command, and its output."""

import json
from pathlib import Path
from typing import Any

from jaxlm.cli.main import main

RECIPE = """
from jaxlm.core import config
from jaxlm.corpus.config import Recipe

def get_config():
    return config.new(Recipe)
"""
# The same words in another order in each document, so that no two are similar.
WORDS = (
    "the river of stones and that have with water moves under bridges while people carry letters "
    "to towns "
    "beyond hills where gardens grow slowly because winter leaves early and birds return before "
    "morning light"
).split()


def prose(seed: int, words: int = 120) -> str:
    """Sentences that pass every filter of English prose; others for another seed."""
    state, sentences = seed * 7919 + 1, []
    for _ in range(words // 12):
        chosen = []
        for _ in range(12):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            chosen.append(WORDS[(state >> 33) % len(WORDS)])
        sentences.append(" ".join(chosen).capitalize() + ".")
    return "\n".join(sentences)


def write_lines(path: Path, rows: list[Any]) -> Path:
    """A file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(capsys: Any, *words: str, code: int = 0) -> dict[str, Any]:
    """The answer of `jaxlm data run` in the current folder with --out=out."""
    Path("recipe.py").write_text(RECIPE)
    command = ["data", "run", "--config=recipe.py", "--out=out", "--json", *words]
    assert main(command) == code
    return json.loads(capsys.readouterr().out)


def lines(pattern: str) -> list[dict[str, Any]]:
    """Every object in the files below `out` that match, in order."""
    return [
        json.loads(line)
        for path in sorted(Path("out").glob(pattern))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def kept() -> list[str]:
    """The texts that stay."""
    return [row["text"] for row in lines("kept/*.jsonl")]


def removed() -> dict[str, list[dict[str, Any]]]:
    """The documents that were removed, by reason."""
    return {
        path.name: lines(f"removed/{path.name}/*.jsonl") for path in Path("out/removed").glob("*")
    }


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but its lock and the times of its inputs."""
    others = ".lock", ".times.json"
    files = (x for x in sorted(folder.rglob("*")) if x.is_file() and x.name not in others)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
