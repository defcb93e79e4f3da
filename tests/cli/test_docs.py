"""`jaxlm docs` lists the pages of the manual and prints them."""

import json
import subprocess
import sys

import pytest

from jaxlm.cli import docs
from jaxlm.cli.main import main


def test_the_list_has_every_page_with_its_contents(capsys):
    assert main(["docs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {path.stem for path in docs.FOLDER.glob("*.md")} == set(docs.topics())
    assert [line.split()[0] for line in lines[: len(docs.topics())]] == docs.topics()
    assert f"objectives     {docs.contents()['objectives']}" in lines


def test_a_page_is_printed_as_it_is_written(capsys):
    assert main(["docs", "objectives"]) == 0
    text = (docs.FOLDER / "objectives.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == text


def test_json_has_the_list_or_the_page(capsys):
    assert main(["docs", "--json"]) == 0
    pages = json.loads(capsys.readouterr().out)["pages"]
    assert {page["topic"]: page["contents"] for page in pages} == docs.contents()
    assert main(["docs", "runs", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["topic"] == "runs"
    assert answer["text"].startswith("# Runs\n")


@pytest.mark.parametrize(
    ("topic", "fix"), [("optimizer", "jaxlm docs optimizers"), ("../core/errors", "jaxlm docs")]
)
def test_an_unknown_page_is_refused_with_the_nearest(capsys, topic, fix):
    assert main(["docs", topic]) == 2
    message = capsys.readouterr().err
    assert f"the manual has no page '{topic}'" in message
    assert message.rstrip().endswith(fix)


def test_it_imports_no_jax():
    program = (
        "import sys; from jaxlm.cli.main import main; code = main(['docs', 'index', '--json']);"
        "sys.exit('jax' in sys.modules or code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
