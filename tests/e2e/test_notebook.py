import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "colab/quickstart.ipynb"
TINY = {
    "train.steps": 2,
    "train.batch": 8,
    "data.train": ROOT / "jaxlm/core/*.py",
    "data.validation": ROOT / "jaxlm/train/*.py",
    "data.tokenizer": "bytes",
    "data.sequence": 64,
    "model.depth": 1,
    "sample.every": 2,
    "model.width": 64,
    "sample.max_tokens": 8,
}


def outputs(cell):
    """All text and the kinds of pictures that a cell gave."""
    texts = [
        out.get("text", "") + str(out.get("data", {}).get("text/plain", "")) for out in cell.outputs
    ]
    return "".join(texts), {kind for out in cell.outputs for kind in out.get("data", {})}


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLM_NOTEBOOK_RUNS", str(tmp_path / "runs"))
    settings = " ".join(f"--config.{name}={value}" for name, value in TINY.items())
    monkeypatch.setenv("JAXLM_NOTEBOOK_SETTINGS", settings)
    monkeypatch.setenv("XLA_FLAGS", "")  # one device, as a reader has
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert sum("image/png" in outputs(cell)[1] for cell in code) == 2
    said = "".join(outputs(cell)[0] for cell in code)
    assert "bits" in said
    for run in ("first", "narrow"):
        assert (tmp_path / "runs" / run / "report.html").stat().st_size > 10_000
        assert os.listdir(tmp_path / "runs" / run / "checkpoints")


def test_the_notebook_is_stored_without_what_it_printed():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
