"""The notebook that prepares data, run from top to bottom on a few files."""

import json

import pytest

from tests.corpus.recipes import prose
from tests.e2e.test_notebook import ROOT, TINY, execute, outputs, pictures

NOTEBOOK = ROOT / "colab/prepare_data.ipynb"


@pytest.mark.slow
def test_the_notebook_cleans_mixes_and_trains(tmp_path, monkeypatch):
    runs, texts = tmp_path / "runs", tmp_path / "texts"
    texts.mkdir()
    for number in range(60):
        text = prose(number, words=1200) if number % 10 else "too short"
        (texts / f"{number}.txt").write_text(f"{text}\nWrite to me{number}@example.org.")
    monkeypatch.setenv("JAXLM_CACHE", str(tmp_path / "cache"))
    tiny = {name: value for name, value in TINY.items() if not name.startswith("data.")}
    code, printed = execute(
        NOTEBOOK,
        tmp_path,
        monkeypatch,
        CODE=str(ROOT / "jaxlm/[cd]*/*.py"),
        PROSE=f"{texts}/*.txt",
        TOKENIZER="bytes",
        SETTINGS={**tiny, "data.sequence": 64},
    )
    assert pictures(code) == 1
    card = next(cell for cell in code if "text/markdown" in outputs(cell)[1])
    assert "# Data card" in card.outputs[0]["data"]["text/markdown"]
    assert "a sample of 20.00% of the records" in printed
    assert "length.short: 3" in printed
    report = json.loads((runs / "prose/report.json").read_text())
    assert report["notes"]["pii: email masked"] == report["kept"] == 54
    rows = (runs / "model/metrics.jsonl").read_text().splitlines()
    assert {"train", "code", "prose"} <= {json.loads(row)["split"] for row in rows}
