import pytest


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The working directory is empty, and gone afterwards."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
