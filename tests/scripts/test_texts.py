"""Raw text gathered from installed packages, and the bench of the stages on it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.corpus.recipes import prose

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name: str, *words: str) -> str:
    """Output of a script."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *words],
        env=os.environ | {"PYTHONPATH": str(SCRIPTS.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_text_is_gathered_once_and_every_stage_is_timed_on_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "packages/one"
    package.mkdir(parents=True)
    for number in range(4):
        (package / f"{number}.py").write_text(f'"""{prose(number)}"""\n')
    (package / "README.md").write_text(prose(9))
    (package / "module.so").write_bytes(b"\x7fELF")
    (tmp_path / "packages/again.py").symlink_to(package / "0.py")
    os.link(package / "1.py", tmp_path / "packages/same.py")
    output = script("gather_texts.py", "packages", "--out=texts")
    assert len(list(tmp_path.glob("texts/py/*/*.py"))) == 4
    assert len(list(tmp_path.glob("texts/*/*/*"))) == 5
    assert output.splitlines()[-1].split()[:3] == ["all", "5", "files"]
    output = script("bench_prepare.py", "--source=texts/*/*/*", "--megabytes=1")
    assert "5 documents" in output
    for name in ("read .py", "read .md", "gopher", "pii", "sign near"):
        assert f"\n{name} " in output
    assert "by what its functions take themselves" in output
