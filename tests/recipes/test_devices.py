import pytest
from jax._src.lru_cache import LRUCache

from jaxlm.recipes import setup


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [-1, 1 << 20], ids=["endless", "limited"])
def test_a_compiled_program_comes_back_from_the_cache(tmp_path, size):
    setup.start()
    store = LRUCache(str(tmp_path), max_size=size)
    store.put("a", b"program")
    assert store.get("a") == b"program"
    assert store.get("b") is None


def test_a_write_that_is_cut_leaves_no_program(tmp_path, monkeypatch):
    setup.start()
    store = LRUCache(str(tmp_path), max_size=-1)
    with monkeypatch.context() as patch:
        patch.setattr(type(store.path), "replace", None)  # as far as a process comes that is killed
        with pytest.raises(TypeError):
            store.put("a", b"program")
    assert store.get("a") is None
    store.put("a", b"program")
    assert store.get("a") == b"program"
