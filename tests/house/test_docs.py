"""The manual: links, tables of settings, worked examples and the site agree with the code."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm.cli.docs import FOLDER, page, topics

ROOT = Path(__file__).parents[2]
MKDOCS = ROOT / "scripts/docs/mkdocs.yml"
README_LINES = 150
LINK = re.compile(r"\]\(([^)\s]+)\)")
EXAMPLE = re.compile(
    r"<!-- example (\w+) -->\n\n```diff\n(.*?)```\n\n```python\n(.*?)```", re.DOTALL
)
EXAMPLES = {
    name: (diff, check)
    for name, diff, check in EXAMPLE.findall(page("extending").read_text(encoding="utf-8"))
}
CODE = re.compile(r"```.*?```", re.DOTALL)

SPEC = importlib.util.spec_from_file_location("settings", ROOT / "scripts/docs/settings.py")
settings = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(settings)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


@pytest.mark.parametrize("path", [ROOT / "README.md", *map(page, topics())], ids=lambda p: p.stem)
def test_every_link_leads_to_a_file(path):
    links = LINK.findall(CODE.sub("", path.read_text(encoding="utf-8")))
    assert links or path.parent == FOLDER
    assert [link for link in links if not (path.parent / link).is_file()] == []
    # Pages are shipped without the rest of the repository.
    outside = [link for link in links if not (path.parent / link).is_relative_to(FOLDER)]
    assert path.parent != FOLDER or [*outside, *(link for link in links if "/" in link)] == []


def test_every_page_is_in_the_index_in_the_readme_and_on_the_site():
    assert {path.stem for path in FOLDER.glob("*.md")} == set(topics())
    navigation = MKDOCS.read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert re.findall(r"- (\w+)\.md", navigation) == topics()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\(jaxlm/docs/(\w+)\.md\)", readme) == topics()[1:]


@pytest.mark.parametrize("topic", topics())
def test_the_tables_of_settings_are_those_of_the_classes(topic):
    text = page(topic).read_text(encoding="utf-8")
    assert text == settings.filled(text), "run python scripts/docs/settings.py"


def test_the_pages_have_tables_of_settings_with_names_types_defaults_and_meanings():
    text = "".join(page(topic).read_text(encoding="utf-8") for topic in topics())
    assert len(settings.PLACE.findall(text)) >= 15
    assert "| `optim.b1` | float >= 0 and < 1 | `0.9` |" in settings.table("optim:adamw")
    assert "optim.clip_norm" in settings.table("optim")
    assert "optim.clip_norm" not in settings.table("optim:adamw")
    assert "| `mesh.zero` | int >= 1 and <= 3 | `3` |" in settings.table("mesh")


def git(folder: Path, *words: str, diff: str = "") -> None:
    done = subprocess.run(
        ["git", *words], cwd=folder, input=diff, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_there_is_an_example_of_each_kind():
    assert set(EXAMPLES) == {"family", "optimizer", "objective", "reader"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_applies_to_the_code_and_its_check_passes(name, tmp_path):
    diff, check = EXAMPLES[name]
    for folder in ("jaxlm", "tests/optim", "tests/parity"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    if name == "family":  # is part of the code
        git(tmp_path, "apply", "--reverse", "--check", diff=diff)
    else:
        git(tmp_path, "apply", diff=diff)
    # The check runs in the copy.
    done = subprocess.run(
        [sys.executable, "-c", check],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_site_is_built_and_all_its_links_are_checked(tmp_path):
    words = ["build", "--strict", "--config-file", str(MKDOCS), "--site-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "objectives/index.html").read_text(encoding="utf-8")
    assert "<h1" in html
    assert "<table>" in html
    assert not re.search(r'(src|href)="https?://[^"]*\.(js|css)', html)
