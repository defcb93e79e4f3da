import json

import pytest

from jaxlm.core.errors import InputMissing
from jaxlm.recipes import setup


@pytest.mark.parametrize(
    ("contents", "is_named"),
    [
        (lambda started, here: {"folder": str(started)}, True),
        (lambda started, here: {"folder": str(here)}, False),
        (lambda started, here: {"folder": str(started / "gone")}, False),
        (lambda started, here: {}, False),
        (lambda started, here: ["damaged"], False),
    ],
    ids=["elsewhere", "here", "gone", "unknown", "damaged"],
)
def test_an_error_of_missing_files_names_the_folder_of_the_start(
    tmp_path, monkeypatch, contents, is_named
):
    started, here, run = (tmp_path / name for name in ("a b", "here", "run"))
    for folder in (started, here, run):
        folder.mkdir()
    (run / "environment.json").write_text(json.dumps(contents(started, here)))
    monkeypatch.chdir(here)
    with pytest.raises(InputMissing) as caught, setup.name_start_folder(run):
        raise InputMissing("no file matches x", where="data.train", why="it is gone", fix="ls .")
    line = f"cd '{started}'    # the run was started there; then --workdir=../run\n"
    line = line if is_named else ""
    assert caught.value.fix == f"{line}ls ."
