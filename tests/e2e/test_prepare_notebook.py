"""The notebook that prepares data, run from top to bottom on a few files."""

import json

import nbformat
import pytest
from nbclient import NotebookClient

from tests.corpus.recipes import prose
from tests.e2e.test_notebook import ROOT, TINY, outputs

NOTEBOOK = ROOT / "colab/prepare_data.ipynb"


@pytest.mark.slow
def test_the_notebook_cleans_mixes_and_trains(tmp_path, monkeypatch):
    runs, texts = tmp_path / "runs", tmp_path / "texts"
    texts.mkdir()
    for number in range(60):
        text = prose(number, words=1200) if number % 10 else "too short"
        (texts / f"{number}.txt").write_text(f"{text}\nWrite to me{number}@example.org.")
    monkeypatch.setenv("JAXLM_NOTEBOOK_RUNS", str(runs))
    monkeypatch.setenv("JAXLM_NOTEBOOK_CODE", str(ROOT / "jaxlm/[cd]*/*.py"))
    monkeypatch.setenv("JAXLM_NOTEBOOK_PROSE", f"{texts}/*.txt")
    monkeypatch.setenv("JAXLM_NOTEBOOK_TOKENIZER", "bytes")
    tiny = {name: value for name, value in TINY.items() if not name.startswith("data.")}
    settings = " ".join(f"--config.{name}={value}" for name, value in tiny.items())
    monkeypatch.setenv("JAXLM_NOTEBOOK_SETTINGS", f"{settings} --config.data.sequence=64")
    monkeypatch.setenv("XLA_FLAGS", "")  # one device, as a reader has
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(notebook, timeout=300, resources=place).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert sum("image/png" in outputs(cell)[1] for cell in code) == 1
    card = next(cell for cell in code if "text/markdown" in outputs(cell)[1])
    assert "# Data card" in card.outputs[0]["data"]["text/markdown"]
    said = "".join(outputs(cell)[0] for cell in code)
    assert "a sample of 20.00% of the records" in said
    assert "length.short: 3" in said
    report = json.loads((runs / "prose/report.json").read_text())
    assert report["notes"]["pii: email masked"] == report["kept"] == 54
    rows = (runs / "model/metrics.jsonl").read_text().splitlines()
    assert {"train", "code", "prose"} <= {json.loads(row)["split"] for row in rows}


def test_the_notebook_is_stored_without_what_it_printed():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
