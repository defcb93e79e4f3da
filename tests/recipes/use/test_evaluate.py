"""Text that `jaxlm eval` reads."""

from types import SimpleNamespace

import pytest

from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.use import evaluate


@pytest.mark.parametrize("is_imported", [True, False])
def test_an_imported_model_that_names_no_data_is_evaluated_on_named_text(
    tmp_path, monkeypatch, is_imported
):
    lines = []
    sets = {"val": object()}
    digest = SimpleNamespace(digest="a")
    data = SimpleNamespace(tokenizer=digest, validation=sets)
    monkeypatch.setattr(setup, "open_data", lambda *_, **__: data)
    if is_imported:
        (tmp_path / "imported.json").write_text("{}")
    opened = SimpleNamespace(run=Run(), workdir=tmp_path, tokenizer=digest)
    assert evaluate.open_loaders(opened, (), 8, lines.append) == sets
    assert [line.startswith("the text is Python's own library") for line in lines] == (
        [True] if is_imported else []
    )
