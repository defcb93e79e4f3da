import json
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.cli.test_exchange import write

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "colab/quickstart.ipynb"
CONTINUED = ROOT / "colab/import_and_continue.ipynb"
FINETUNED = ROOT / "colab/finetune.ipynb"
INSIDE = ROOT / "colab/inside_the_model.ipynb"
PREPARED = ROOT / "colab/prepare_data.ipynb"
NOTEBOOKS = [NOTEBOOK, CONTINUED, FINETUNED, INSIDE, PREPARED]
TINY = {
    "train.steps": 2,
    "train.batch": 8,
    "data.train": ROOT / "jaxlm/core/*.py",
    "data.validation": ROOT / "jaxlm/training/*.py",
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


@pytest.mark.slow
def test_a_model_is_imported_trained_further_and_exported(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLM_NOTEBOOK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("JAXLM_NOTEBOOK_MODEL", str(write(tmp_path / "model")))
    tiny = {"train.steps": 3, "train.batch": 8, "data.sequence": 64}
    settings = " ".join(f"--config.{name}={value}" for name, value in tiny.items())
    monkeypatch.setenv("JAXLM_NOTEBOOK_SETTINGS", settings)
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(CONTINUED, as_version=4)
    resources = {"metadata": {"path": str(CONTINUED.parent)}}
    NotebookClient(notebook, timeout=300, resources=resources).execute()
    said = "".join(outputs(cell)[0] for cell in notebook.cells if cell.cell_type == "code")
    for name in ("new", "old"):
        assert re.search(rf"{name}: \d\.\d+ nats before, \d\.\d+ after, [+-]\d\.\d+", said)
    assert "nats before" in (tmp_path / "runs/continued/report.html").read_text()
    assert "<|note|>" in (tmp_path / "runs/exported/tokenizer.json").read_text()


@pytest.mark.slow
def test_a_model_is_tuned_on_conversations_asked_and_exported(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLM_NOTEBOOK_RUNS", str(tmp_path / "runs"))
    flags = [f"--config.{name}={value}" for name, value in TINY.items()]
    monkeypatch.setenv("JAXLM_NOTEBOOK_BASE", " ".join(flags))
    monkeypatch.setenv("JAXLM_NOTEBOOK_CHAT", "--config.train.steps=3 --config.train.batch=4")
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(FINETUNED, as_version=4)
    resources = {"metadata": {"path": str(FINETUNED.parent)}}
    NotebookClient(notebook, timeout=300, resources=resources).execute()
    printed = "".join(outputs(cell)[0] for cell in notebook.cells if cell.cell_type == "code")
    assert "\u00abImport os: os." in printed
    assert "exact match" in printed
    assert (tmp_path / "runs/adapter/adapter_model.safetensors").stat().st_size > 1000
    assert os.listdir(tmp_path / "runs/merged/checkpoints")


@pytest.mark.slow
def test_a_model_is_looked_into(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLM_NOTEBOOK_RUNS", str(tmp_path / "runs"))
    globs = {name: [str(TINY[name])] for name in ("data.train", "data.validation")}
    monkeypatch.setenv("JAXLM_NOTEBOOK_SETTINGS", json.dumps(TINY | globs))
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(INSIDE, as_version=4)
    resources = {"metadata": {"path": str(INSIDE.parent)}}
    NotebookClient(notebook, timeout=300, resources=resources).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printed = "".join(outputs(cell)[0] for cell in code)
    assert re.search(r"\d+\.\d\d nats, \d+\.\d\d bits per byte", printed)
    assert re.search(r"layer \d, head \d: \d+% of its attention", printed)
    assert "layer 1" in printed
    assert sum("image/png" in outputs(cell)[1] for cell in code) == 3


def test_every_notebook_begins_by_installing_what_its_runtime_needs():
    firsts = []
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        code = next(cell.source for cell in cells if cell.cell_type == "code")
        assert all(f'"{extra}"' in code for extra in ("cuda12", "tpu"))
        firsts.append(re.sub(r"needed = .*|None, \(device, .*", "", code))
    assert len(set(firsts)) == 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_is_stored_without_what_it_printed(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
