import json

import matplotlib.image
import pytest

from jaxlm.core.errors import DataError
from jaxlm.monitor import plots


@pytest.fixture
def run(tmp_path):
    records = [
        {
            "step": s,
            "time_unix": 1e9,
            "split": "train",
            "loss_nats": 5 / s,
            "learning_rate": 1e-3,
            "grad_norm": 1 / s,
            "tokens_per_second": 1e4,
        }
        for s in range(1, 20)
    ]
    records.append({"step": 19, "time_unix": 1e9, "split": "val", "loss_nats": 0.5})
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    return tmp_path


def test_every_plot_of_the_contract_is_a_picture(run):
    drawn = plots.draw(run)
    assert [path.name for path in drawn] == [
        "loss.png",
        "learning_rate.png",
        "grad_norm.png",
        "throughput.png",
    ]
    for path in drawn:
        pixels = matplotlib.image.imread(path)
        assert pixels.shape[:2] == (432, 840)
        assert pixels[..., :3].std() > 0.01, "an empty picture"


def test_the_same_numbers_give_the_same_bytes(run):
    first = [path.read_bytes() for path in plots.draw(run)]
    assert [path.read_bytes() for path in plots.draw(run)] == first
    assert sorted(path.name for path in (run / "plots").iterdir()) == sorted(
        f"{p.name}.png" for p in plots.PLOTS
    )


def test_validation_changes_the_loss_plot_alone(run):
    with_validation = [path.read_bytes() for path in plots.draw(run)]
    kept = [
        line for line in (run / "metrics.jsonl").read_text().splitlines() if '"val"' not in line
    ]
    (run / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    without = [path.read_bytes() for path in plots.draw(run)]
    assert [a == b for a, b in zip(with_validation, without, strict=True)] == [
        False,
        True,
        True,
        True,
    ]


def test_a_run_without_metrics_draws_nothing(tmp_path):
    assert plots.draw(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_single_step_and_a_gradient_of_zero_can_be_drawn(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "split": "train", "loss_nats": 1.0, "grad_norm": 0.0}\n'
    )
    assert [path.name for path in plots.draw(tmp_path)] == ["loss.png", "grad_norm.png"]


def test_damaged_metrics_are_named(run):
    (run / "metrics.jsonl").write_text("{}\nbroken\n{}\n")
    with pytest.raises(DataError, match="metrics.jsonl is damaged"):
        plots.draw(run)
