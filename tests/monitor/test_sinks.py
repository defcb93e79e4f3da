import errno
import io
import json
import math
import os
import struct

import numpy as np
import pytest

from jaxlm.core.errors import DataError, NotWritable, SaveFailed
from jaxlm.monitor import sinks
from jaxlm.monitor.sinks import Jsonl, read
from jaxlm.monitor.tensorboard import TensorBoard


def record(step, loss=1.0, split="train"):
    return {"step": step, "time_unix": 1e9 + step, "split": split, "loss_nats": loss}


def written(path, steps):
    sink = Jsonl(path)
    for step in steps:
        sink.write(record(step))
    sink.close()
    return path


def test_losses_come_back_bit_for_bit(tmp_path):
    losses = [
        float(np.float32(x))
        for x in (1 / 3, 1e-38, 9.80665, np.nextafter(np.float32(2), np.float32(3)))
    ]
    sink = Jsonl(tmp_path / "m.jsonl")
    for step, loss in enumerate(losses):
        sink.write(record(step, np.float32(loss)))
    sink.close()
    back = [r["loss_nats"] for r in read(tmp_path / "m.jsonl")]
    assert [struct.pack("<d", x) for x in back] == [struct.pack("<d", x) for x in losses]


def test_a_number_that_is_not_finite_is_null_and_named(tmp_path):
    sink = Jsonl(tmp_path / "m.jsonl")
    sink.write(record(1, math.nan) | {"grad_norm": np.float32(math.inf)})
    sink.close()
    text = (tmp_path / "m.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text)["loss_nats"] is None
    assert json.loads(text)["not_finite"] == {"loss_nats": "nan", "grad_norm": "inf"}


def test_a_torn_last_line_is_cut_at_the_next_start_and_is_no_record(tmp_path):
    path = written(tmp_path / "m.jsonl", [1, 2])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 3, "lo')
    assert [r["step"] for r in read(path)] == [1, 2]
    sink = Jsonl(path)
    assert len(sink.dropped) == 1
    sink.close()
    assert path.read_bytes() == whole


def test_a_run_that_goes_on_from_step_k_drops_the_later_lines_and_no_others(tmp_path):
    path = written(tmp_path / "m.jsonl", [1, 2, 3, 4, 5])
    sink = Jsonl(path, keep_through=3)
    assert [json.loads(text)["step"] for text in sink.dropped] == [4, 5]
    sink.write(record(4, loss=7.0))
    sink.close()
    assert [(r["step"], r["loss_nats"]) for r in read(path)] == [(1, 1), (2, 1), (3, 1), (4, 7)]


def test_a_run_that_starts_again_from_nothing_keeps_no_line(tmp_path):
    path = written(tmp_path / "m.jsonl", [1, 2])
    sink = Jsonl(path, keep_through=0)
    sink.close()
    assert (len(sink.dropped), read(path)) == (2, [])


def test_a_line_is_readable_before_any_flush(tmp_path):
    sink = Jsonl(tmp_path / "m.jsonl")
    sink.write(record(1))
    assert [r["step"] for r in read(tmp_path / "m.jsonl")] == [1]
    sink.close()
    sink.close()


def test_damage_in_the_middle_is_named_by_its_line(tmp_path):
    path = written(tmp_path / "m.jsonl", [1, 2, 3])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "not json", lines[2]]) + "\n")
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.where == f"{path}:2"


def test_a_missing_file_has_no_records(tmp_path):
    assert read(tmp_path / "none.jsonl") == []


def test_a_place_that_cannot_be_written_is_said_in_four_parts(tmp_path):
    (tmp_path / "m.jsonl").mkdir()
    with pytest.raises(NotWritable) as caught:
        Jsonl(tmp_path / "m.jsonl")
    assert caught.value.code == 73
    assert str(tmp_path) in caught.value.where


def test_a_full_disk_passes_and_has_a_code_of_its_own():
    asked = []
    sink = Jsonl("/dev/full", make_room=lambda: asked.append(1))
    with pytest.raises(SaveFailed, match="full cannot be written") as caught:
        sink.write(record(1))
    assert (caught.value.code, len(asked)) == (74, 1)
    with pytest.raises(NotWritable):  # it is no file that could be synced
        sink.close()


class Small(io.FileIO):
    """A file on a disk that has space for a given number of bytes."""

    space = 5

    def write(self, content):
        if not (fits := min(len(content), self.space - self.tell())):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content[:fits])


def test_what_room_was_made_for_follows_the_part_that_was_written(tmp_path, monkeypatch):
    def opened(path, mode, **_):
        return Small(path, mode) if "a" in mode else open(path, mode)

    monkeypatch.setattr(sinks, "open", opened, raising=False)
    path = tmp_path / "m.jsonl"
    sink = Jsonl(path, make_room=lambda: monkeypatch.setattr(Small, "space", 1000))
    sink.write(record(1))
    sink.write(record(2))
    sink.close()
    assert [r["step"] for r in read(path)] == [1, 2]


def test_tensorboard_gets_figures_in_groups_samples_as_text_and_settings(tmp_path):
    sink = TensorBoard(tmp_path / "events")
    sink.write(record(1, np.float32(2.5)) | {"mfu": None, "elapsed_seconds": 3.0})
    sink.write({"step": 1, "time_unix": 1.0, "split": "train", "peak_bytes": 2**29, "a/b": 2})
    sink.write({"step": 1, "time_unix": 1.0, "split": "train", "c": math.nan})  # a gap
    sink.write(record(1, 2.25, split="val") | {"perplexity": 9.5})
    sink.sample(1, "a *b*\nc", " d")
    sink.describe({"optim.lr": 0.5, "data.train": ("x",)}, ["val"])
    sink.flush()
    sink.close()
    written = scalars(tmp_path / "events")
    assert written[:5] == [
        (1, "loss/train", 2.5),
        (1, "memory/peak_GiB", 0.5),
        (1, "a/b", 2),
        (1, "loss/val", 2.25),
        (1, "perplexity/val", 9.5),
    ]
    tags = [tag for _, tag, _ in written[5:]]
    assert tags[0] == "samples/a *b* c/text_summary"
    assert tags[1:] == [
        f"_hparams_/{name}" for name in ("experiment", "session_start_info", "session_end_info")
    ]
    assert b"optim.lr" in b"".join(path.read_bytes() for path in (tmp_path / "events").iterdir())


def scalars(folder):
    """Scalars in TFRecord files, by the layout: length, its checksum, data, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    out = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            out += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return out
