import gc
import json
import tempfile
import threading

import jax
import numpy as np
import pytest
import s3fs

from jaxlm.checkpoint import objects
from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.object_store import ObjectStore
from jaxlm.checkpoint.store import StoreWriter
from jaxlm.cli.main import main
from jaxlm.core import config
from jaxlm.core.errors import DataError, InUse, JaxlmError, SaveFailed
from jaxlm.recipes.config import Run
from tests import s3 as servers
from tests.checkpoint.test_store import shapes_of, tree


@pytest.fixture(scope="module")
def server():
    with servers.serving() as s3:
        s3.bucket("tests")
        yield s3


@pytest.fixture
def s3(server, monkeypatch):
    """The server, with keys and without faults; a failed request is repeated at once."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "WAIT_SECONDS", 0.001)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    yield server
    server.fault = lambda method, path: None


@pytest.fixture
def opened(s3, tmp_path):
    """Opens the checkpoints of a run at a prefix of its own."""
    url = f"s3://tests/{tmp_path.name}"

    def open_it(owner="one", *, read_only=False, **settings):
        settings = {"directory": url} | settings
        folder = tmp_path / "run/checkpoints"
        writer = StoreWriter(owner=owner)
        return ObjectStore(folder, CheckpointConfig(**settings), writer=writer, read_only=read_only)

    return open_it


def keys(s3, store):
    """The objects of a store, without the one that names its owner."""
    prefix = str(store.directory).removeprefix("s3://tests/") + "/"
    listed = s3.client().list_objects_v2(Bucket="tests", Prefix=prefix).get("Contents", [])
    return [each["Key"].removeprefix(prefix) for each in listed if "owner" not in each["Key"]]


def key_of(store, name):
    return f"{store.directory}/{name}".removeprefix("s3://tests/")


def test_a_step_comes_back_bit_for_bit_and_leaves_no_copy_on_the_disk(opened, tmp_path):
    store = opened()
    store.save(3, tree(0.1), {"cursor": 3}, loss_nats=1.0)
    store.close()
    reader = opened(read_only=True)
    assert (reader.steps(), reader.best(), reader.record(3).meta) == ([3], 3, {"cursor": 3})
    assert reader.problems(3) == []
    back = reader.restore(3, shapes_of(tree()))
    jax.tree.map(np.testing.assert_array_equal, back, tree(0.1))
    left = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [(path.name, path.stat().st_size) for path in left] == [("3", 0)]


def test_of_a_part_of_a_step_only_its_files_are_downloaded(opened, s3):
    store = opened()
    store.save(1, tree(), {})
    store.close()
    reader = opened(read_only=True)
    s3.requests.clear()
    reader.restore_part(1, "params", shapes_of(tree())["params"])
    got = {path.rpartition("/1/")[2] for method, path in s3.requests if method == "GET"}
    assert {"params.w/0.0", "params.b/0"} < got
    assert "step/0" not in got


def test_a_save_does_not_wait_for_the_upload(opened, s3):
    store, may_begin = opened(), threading.Event()
    late = ("500 Internal Server Error", "InternalError")
    s3.fault = lambda method, path: None if method != "PUT" or may_begin.wait(20) else late
    store.save(1, tree(), {})
    assert store.steps() == []
    may_begin.set()
    store.close()
    assert store.steps() == [1]


def test_the_record_is_written_last_and_removed_first(opened, s3):
    store = opened(keep_last=1, keep_best=0)
    s3.requests.clear()
    for step in (1, 2):
        store.save(step, tree(), {}, healthy=False)
    store.close()
    of_one = [(m, p.rpartition("/1/")[2]) for m, p in s3.requests if "/1/" in p]
    puts = [path for method, path in of_one if method == "PUT"]
    removals = [path for method, path in of_one if method == "DELETE"]
    assert puts[-1] == removals[0] == "digests.json"
    assert set(puts) == set(removals)
    assert {key.partition("/")[0] for key in keys(s3, store)} == {"2"}


def test_a_prefix_without_a_record_is_no_step_and_is_removed_and_counted(opened, s3):
    opened().close()
    client = s3.client()
    store = opened(read_only=True)
    client.put_object(Bucket="tests", Key=key_of(store, "7/params.w/0.0"), Body=b"x")
    assert store.steps() == []
    assert keys(s3, store) == ["7/params.w/0.0"], "a reader removes nothing"
    repeated = opened()
    assert repeated.notices == [f"removed 1 uncommitted of {repeated.directory}: 7"]
    assert keys(s3, repeated) == []
    repeated.close()


@pytest.mark.parametrize("damage", ["flip", "missing"])
def test_a_damaged_object_is_found_by_its_digest_and_quarantined(opened, s3, damage):
    store, client = opened(), s3.client()
    store.save(4, tree(), {})
    store.wait()
    place = {"Bucket": "tests", "Key": key_of(store, "4/params.w/0.0")}
    if damage == "missing":
        client.delete_object(**place)
        wrong = "params.w/0.0 is missing"
    else:
        content = bytearray(client.get_object(**place)["Body"].read())
        content[-1] ^= 1
        client.put_object(**place, Body=bytes(content))
        wrong = "params.w/0.0 has other contents than were written"
    assert store.problems(4) == [wrong]
    with pytest.raises(DataError) as caught:
        store.restore(4, shapes_of(tree()))
    assert (caught.value.code, caught.value.why) == (65, wrong)
    place = store.quarantine(4, "flipped")
    assert store.steps() == []
    assert store.quarantined() == [(str(place), "flipped")]
    moved = {key for key in keys(s3, store) if key.startswith("quarantine/4/")}
    assert "quarantine/4/digests.json" in moved
    assert ("quarantine/4/params.w/0.0" in moved) == (damage == "flip")
    store.close()


REFUSALS = {
    "denied": ("PUT", ("403 Forbidden", "AccessDenied"), 73, "refuses access"),
    "not to be listed": ("GET", ("403 Forbidden", "AccessDenied"), 73, "refuses access"),
    "quota": ("PUT", ("403 Forbidden", "QuotaExceeded"), 74, "quota"),
    "down": ("PUT", ("500 Internal Server Error", "InternalError"), 73, "did not answer"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_store_that_cannot_be_written_is_refused_when_it_is_opened(opened, s3, name):
    refused, answer, code, what = REFUSALS[name]
    s3.fault = lambda method, path: answer if method == refused else None
    with pytest.raises(JaxlmError) as caught:
        opened()
    assert caught.value.code == code
    assert what in caught.value.what


def test_a_missing_bucket_and_missing_keys_are_named(opened, monkeypatch):
    with pytest.raises(JaxlmError, match="there is no bucket s3://nowhere") as caught:
        opened(directory="s3://nowhere/run")
    assert (caught.value.code, caught.value.fix) == (73, "aws s3 mb s3://nowhere")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    objects.open_store("s3://x").clear_instance_cache()
    with pytest.raises(JaxlmError, match="there are no credentials for s3://tests") as caught:
        opened()
    assert caught.value.code == 73
    assert "AWS_ACCESS_KEY_ID" in caught.value.fix
    objects.open_store("s3://x").clear_instance_cache()


def test_a_store_that_is_away_for_a_moment_is_asked_again(opened, s3):
    store, left = opened(), [2]

    def fault(method, path):
        left[0] -= method == "PUT"
        return ("400 Bad Request", "RequestTimeout") if method == "PUT" and left[0] >= 0 else None

    s3.fault = fault
    store.save(1, tree(), {})
    store.close()
    assert left[0] < 0
    assert opened(read_only=True).problems(1) == []


def test_a_store_that_stays_away_fails_the_save_and_not_the_next_one(opened, s3):
    store = opened()
    store.save(1, tree(), {})
    store.wait()
    s3.fault = lambda method, path: ("403 Forbidden", "QuotaExceeded") if method == "PUT" else None
    store.save(2, tree(), {})
    with pytest.raises(SaveFailed, match="a checkpoint could not be written") as caught:
        store.wait()
    assert "the quota of the object store is full" in caught.value.why
    s3.fault = lambda method, path: None
    store.remove_torn()
    store.save(3, tree(), {})
    store.close()
    assert opened(read_only=True).steps() == [1, 3]


def test_a_step_may_have_the_name_of_its_prefix(opened):
    store = opened(directory="s3://tests/prefix/7")
    store.save(7, tree(), {})
    store.close()
    assert store.steps() == [7]


def test_an_older_process_commits_nothing_more(opened):
    first, second = opened("one"), opened("two")
    first.save(1, tree(), {})
    with pytest.raises(InUse, match="another process has taken over this run"):
        first.wait()
    assert second.steps() == []
    second.save(2, tree(), {})
    second.close()
    assert opened(read_only=True).steps() == [2]
    first.release()
    assert opened(read_only=True).steps() == [2], "it removes nothing either"


def test_a_place_that_is_no_prefix_of_a_store_is_refused():
    raw = json.loads(json.dumps(config.to_json(Run())))
    for wrong in ("/mnt/disk", "s3://bucket", "file:///tmp/x", "s3://key:secret@bucket/run"):
        raw["checkpoint"]["directory"] = wrong
        with pytest.raises(JaxlmError, match="checkpoint.directory"):
            config.from_json(Run, raw, "config")
    raw["checkpoint"]["directory"] = "gs://bucket/run"
    assert config.from_json(Run, raw, "config").checkpoint.directory == "gs://bucket/run"


def test_steps_at_a_url_are_listed_compared_and_verified_without_a_run_directory(
    opened, tmp_path, capsys, monkeypatch
):
    raw = config.to_json(Run())
    meta = {name: {} for name in ("data", "progress", "evaluation")}
    meta |= {"config": raw, "finished": True, "rewinds": []}
    store = opened()
    for step in (1, 2):
        store.save(step, tree(0.1 * step), meta, loss_nats=1.0)
    store.close()
    monkeypatch.chdir(tmp_path)
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    url = f"--workdir={store.directory}"
    for words, text in (
        (["list"], "newest"),
        (["inspect"], "step 2"),
        (["diff", "--step=1", "--other=2"], "are equal bit for bit"),
        (["verify"], "2 sound, 0 damaged"),
    ):
        assert main(["checkpoint", *words, url]) == 0
        assert text in capsys.readouterr().out
    gc.collect()
    assert not [*copies.iterdir()]
