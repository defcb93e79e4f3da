import json

import matplotlib.image
import pytest

from jaxlm.core.errors import DataError
from jaxlm.monitor import layer_maps, plots, report


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
        f"{p.name}.png" for p in plots.PLOTS if p.name != "noise_scale"
    )


def test_validation_changes_the_loss_plot_alone(run):
    with_validation = [path.read_bytes() for path in plots.draw(run)]
    rest = [
        line for line in (run / "metrics.jsonl").read_text().splitlines() if '"val"' not in line
    ]
    (run / "metrics.jsonl").write_text("\n".join(rest) + "\n")
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


def watched(steps, layers):
    """Records of a run whose layers are watched, one number in each that is none."""
    for step in steps:
        record = {
            "step": step,
            "split": "train",
            "loss_nats": 1.0,
            "noise_scale_tokens": 1e3 * step,
        }
        for layer in range(layers):
            record |= {
                f"layers/{layer}/grad_norm": 10.0 ** (layer - step),
                f"layers/{layer}/update_norm": 0.01,
                f"layers/{layer}/param_norm": 2.0,
                f"layers/{layer}/mlp/up/weight/grad_norm": 5.0,
                f"layers/{layer}/dead_units": 0.1 * layer,
                f"layers/{layer}/stream_rms": None,
            }
        yield record | {"layers/embedding/table/grad_norm": 1.0}


def test_layers_are_maps_of_what_was_watched(tmp_path):
    first = layer_maps.every(list(watched((2, 4), 3)))[0]
    assert (first.steps, first.layers) == ([2, 4], [0, 1, 2])
    assert first.grid.tolist() == [[-2.0, -4.0], [-1.0, -3.0], [0.0, -2.0]]
    lines = [json.dumps(record) + "\n" for record in watched((2, 4, 6), 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    names = {path.stem for path in plots.draw(tmp_path)}
    assert names == {
        "loss", "noise_scale", "layers_grad_norm", "layers_update_ratio", "layers_dead_units",
    }  # fmt: skip
    page = report.render(tmp_path)
    assert (page.count("<img"), page.count('<figure class="map"')) == (0, 3)
    assert "<title>step 4, layer 1: 0.001</title>" in page
    assert '<rect x="1" y="1" width="1" height="1" fill-opacity="0.57">' in page
    pixels = matplotlib.image.imread(tmp_path / "plots/layers_grad_norm.png")
    assert len({tuple(pixel) for pixel in pixels.reshape(-1, 4).tolist()}) > 5


def test_a_map_of_many_layers_and_steps_stays_small():
    (first, *_) = layer_maps.every(list(watched(range(1, 201), 40)))
    drawing = layer_maps.render(first)
    assert drawing.count("<rect") == layer_maps.COLUMNS * layer_maps.ROWS
    assert len(drawing) < 100_000
    assert "layer 39:" in drawing
    assert "step 200," in drawing
