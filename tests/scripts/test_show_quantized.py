"""The table and the plot of scripts/show_quantized.py, from the files of quantized runs."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("show_quantized", ROOT / "scripts/show_quantized.py")
show = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(show)


def quantized(folder, size, growth, codes=("int8", "rtn", "all"), loss=2.0, flips=None):
    """A directory with the files of `jaxlm quantize` that the table has figures of.

    Args:
      folder: the new directory.
      size: bytes of the weights.
      growth: of the loss, as a share.
      codes: scheme, method and block.
      loss: of the run before, nats.
      flips: share of changed items of the first of two tasks.
    """
    folder.mkdir()
    scheme, method, block = codes
    figures = {
        "scheme": scheme,
        "method": method,
        "loss_growth": growth,
        "kl_mean": 1e-4,
        "kl_999": 2e-3,
        "top1_agreement": 0.991,
        "tasks": {"a": {"flips": flips}, "b": {"flips": 0.25 if flips else None}},
        "before": {"bytes": 4000, "loss_nats": loss},
        "after": {"bytes": size, "loss_nats": loss * (1 + growth)},
    }
    (folder / "imported.json").write_text(json.dumps(figures))
    (folder / "base.json").write_text(json.dumps({"run": "runs/a", "step": 5}))
    (folder / "config.json").write_text(json.dumps({"tune": {"base": scheme, "block": block}}))
    return folder


def call(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["show_quantized.py", *map(str, words)])
    show.main()


def test_runs_are_shown_by_their_bytes(tmp_path, monkeypatch, capsys):
    wide = quantized(tmp_path / "a", 2000, 0.001)
    small = quantized(tmp_path / "b", 1200, 0.02, ("int4", "gptq", 128), flips=0.03)
    speeds = {"runs/a": 0, str(wide): 0.5, str(small): 2.0}
    monkeypatch.setattr(show, "measure", lambda runs, rounds: [speeds[run] for run in runs[1:]])
    plot = tmp_path / "plot.svg"
    call(monkeypatch, wide, small, f"--plot={plot}", "--rounds=1")
    *_, before, first, second, path = capsys.readouterr().out.splitlines()
    assert before == "| none | 4,000 | 2.0000 | | | | | |"
    assert first == (
        "| int4, 128, gptq | 1,200 | 2.0400 (+2.000%) | 0.0001 | 0.002 | 99.10% | 25.0% | 2.00 |"
    )
    assert second == "| int8 | 2,000 | 2.0020 (+0.100%) | 0.0001 | 0.002 | 99.10% |  | 0.50 |"
    assert path == str(plot)
    drawn = plot.read_text()
    assert all(text in drawn for text in ("int4, 128, gptq", "int8", "growth of the loss, %"))


def test_runs_that_cannot_be_compared_are_refused(tmp_path, monkeypatch):
    one, other = (quantized(tmp_path / str(loss), 2000, 0.001, loss=loss) for loss in (2.0, 2.1))
    with pytest.raises(SystemExit, match="different texts"):
        call(monkeypatch, one, other)
