"""Calibrated codes: layer after layer, resumed after a kill, from text that no report has."""

import dataclasses
import errno

import jax
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import DataError, NotWritable
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.mistral import Mixtral
from jaxlm.ops import int4
from jaxlm.ops.weight_codes import WeightFormat
from jaxlm.recipes.use import calibrate, calibration_text
from jaxlm.recipes.use.calibrate import Calibration
from jaxlm.recipes.use.layer_runner import ExpertRange, LayerPath, LayerRunner
from jaxlm.tune import folding, surgery
from jaxlm.tune.config import Quantized
from tests.models.parameters import draw_params

FAMILY = Llama(vocab=64, width=32, depth=2, heads=4, kv_heads=2, hidden=48)
PRECISION = Precision.float32()
BLUEPRINT = Blueprint(FAMILY.build(), PRECISION)
CODES = Quantized(base="int4", block=16)
STORED = Blueprint(FAMILY.build(), PRECISION, surgery=surgery.quantization(CODES))


def rows(count=2, length=16, seed=0, used=None):
    """Batches of random ids; slots from `used` on are padding."""
    draw = np.random.default_rng(seed)
    shape = 4, length
    made = []
    for _ in range(count):
        ids = draw.integers(0, 64, shape, dtype=np.int32)
        segments = np.broadcast_to(np.arange(length) < (used or length), shape).astype(np.int32)
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
        made.append(Tokens(ids, ids, segments.astype(np.float32), segments, positions))
    return made


@pytest.fixture(scope="module")
def params():
    return draw_params(BLUEPRINT, std=0.1)


def calibration(
    params, folder, method="gptq", batches=None, facts=None, said=None, blueprint=BLUEPRINT
):
    stored = Blueprint(blueprint.config, PRECISION, surgery=surgery.quantization(CODES))
    return Calibration(
        blueprint=blueprint,
        params=params,
        layers=surgery.quantized_weights(stored),
        method=method,
        batches=batches or rows(),
        facts={"a": 1} if facts is None else facts,
        folder=folder,
        nearest="jaxlm quantize",
        say=(said if said is not None else []).append,
    )


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_search_that_is_killed_at_every_layer_has_the_same_bytes(
    params, method, tmp_path, monkeypatch
):
    """Killed as each layer is searched and as its file is half written: each is searched twice."""
    whole = calibration(params, tmp_path / "whole", method).run().leaves
    assert whole["stack/0/mlp/down/weight_codes"].shape == (2, 24, 32)
    solved, savez, calls, files = calibrate.solved, np.savez, [], []

    def killed(*words):
        calls.append(words)
        if len(calls) in (1, 4):
            raise KeyboardInterrupt
        return solved(*words)

    def cut_off(file, **leaves):
        files.append(file.name)
        if len(files) in (1, 3):
            file.write(b"PK")
            raise KeyboardInterrupt
        savez(file, **leaves)

    monkeypatch.setattr(calibrate, "solved", killed)
    monkeypatch.setattr(np, "savez", cut_off)
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            calibration(params, tmp_path / "killed", method).run()
    resumed = calibration(params, tmp_path / "killed", method).run().leaves
    assert (len(calls), len(files)) == (6, 4)  # the layers that were finished were not searched
    assert resumed.keys() == whole.keys()
    for path, leaf in whole.items():
        np.testing.assert_array_equal(leaf, resumed[path])
    calibration(params, tmp_path / "killed", method, facts={"a": 2}).run()
    assert len(calls) == 8  # other facts: no layer is finished


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_outputs_change_less_than_by_rounding_to_nearest(params, method, tmp_path):
    batches = rows(count=4)
    leaves = calibration(params, tmp_path, method, batches).run().leaves
    layers = surgery.quantized_weights(STORED)
    flat = {"/".join(str(key.key) for key in path): leaf for path, leaf in paths(params)}

    def logits(codes):
        values = dict(flat)
        for path, layer in layers.items():
            parts = codes.get(path) or layer.quantized(flat[path])
            inputs = int(np.prod(layer.ins))
            whole = [layer.format.dequantize(part, inputs) for part in unstacked(parts)]
            values[path] = np.stack(whole).reshape(flat[path].shape)
        values |= {
            path: leaf for path, leaf in codes.items() if path in flat and path not in layers
        }
        return read(values)

    def read(values):
        tree = jax.tree.unflatten(jax.tree.structure(params), values.values())
        model = BLUEPRINT.merge(tree)
        tokens, positions = batches[0].tokens, batches[0].positions
        return np.asarray(model.logits(model.hidden(tokens, positions=positions).values))

    made = {path: leaf for path, leaf in leaves.items() if "weight_" not in path}
    for path in layers:
        stem = f"{path}_"
        made[path] = {p.removeprefix(stem): x for p, x in leaves.items() if p.startswith(stem)}
    exact = read(flat)
    plain = {path: strip(layers[path].quantized(flat[path])) for path in layers}
    errors = [np.square(logits(codes) - exact).mean() for codes in (made, plain)]
    assert errors[0] < 0.8 * errors[1]


def unstacked(leaves):
    return [{name: leaf[layer] for name, leaf in leaves.items()} for layer in range(2)]


def strip(leaves):
    return {name.removeprefix("weight_"): leaf for name, leaf in leaves.items()}


def paths(params):
    return jax.tree.flatten_with_path(params)[0]


def test_sums_are_those_of_a_float64_model_behind_rounded_layers(params, tmp_path, monkeypatch):
    """Each token is a document, so that attention returns its values; some slots are padding."""
    flat = {name: np.asarray(leaf, np.float64) for name, leaf in tree.leaves(params).items()}
    segments = np.arange(1, 17, dtype=np.int32)
    segments[12] = 0
    alone = {"segments": np.tile(segments, (4, 1)), "positions": np.zeros((4, 16), np.int32)}
    batches = [each._replace(**alone) for each in rows()]
    seen, solved = [], calibrate.solved

    def watched(block, formats, sums, method):
        seen.append({name: each for names, each in sums.items() for name in names.split(",")})
        return solved(block, formats, sums, method)

    monkeypatch.setattr(calibrate, "solved", watched)
    made, _ = calibration(params, tmp_path, batches=batches).run()
    x = flat["embedding/table"][np.concatenate([b.tokens[b.segments > 0] for b in batches])]
    for number, sums in enumerate(seen):
        floats = {name: flat[f"stack/0/{name}/weight"][number] for name in sums}
        norms = [flat[f"stack/0/{name}/scale"][number] for name in READERS]
        expected, _ = layer_of_one_token(x, floats, norms)
        for name, (gram, magnitudes) in sums.items():
            each = expected[name]
            np.testing.assert_allclose(
                gram, each.T @ each, atol=1e-5 * np.square(each).sum(0).max()
            )
            np.testing.assert_allclose(magnitudes, np.abs(each).sum(0), rtol=1e-4)
        rounded = {}
        for name, weight in floats.items():
            inputs = len(expected[name].T)
            path = f"stack/0/{name}/weight"
            codes, scales = (made[f"{path}_{leaf}"][number] for leaf in ("codes", "scales"))
            leaves = {
                "codes": codes.reshape(inputs // 2, -1),
                "scales": scales.reshape(-1, weight.size // inputs),
            }
            rounded[name] = np.asarray(
                WeightFormat("int4", 16).dequantize(leaves, inputs), np.float64
            )
        _, x = layer_of_one_token(x, rounded, norms)
    assert len(seen) == 2


def layer_of_one_token(x, weights, norms):
    """Return the inputs of each weight of a layer of Llama, and its outputs."""

    def normed(x, scale):
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * scale

    h = normed(x, norms[0])
    values = h @ weights["attention/value"].reshape(len(h.T), -1)
    heads = values.reshape(len(x), 2, 1, -1)
    attended = np.broadcast_to(heads, (len(x), 2, 2, heads.shape[-1])).reshape(len(x), -1)
    x = x + attended @ weights["attention/out"].reshape(attended.shape[1], -1)
    g = normed(x, norms[1])
    gate = g @ weights["mlp/gate"]
    inside = gate / (1 + np.exp(-gate)) * (g @ weights["mlp/up"])
    inputs = dict.fromkeys(("attention/query", "attention/key", "attention/value"), h)
    inputs |= dict.fromkeys(("mlp/gate", "mlp/up"), g)
    inputs |= {"attention/out": attended, "mlp/down": inside}
    return inputs, x + inside @ weights["mlp/down"]


def test_factors_are_searched_for_all_readers_and_their_codes_for_scaled_inputs(params):
    block = LayerRunner(BLUEPRINT, params).block(LayerPath("stack/0", 0))
    form, draw, readers = WeightFormat("int4", 16), np.random.default_rng(0), {}
    layers = folding.linear_layers(block)
    before = {name: calibrate._matrix(layer) for name, layer in layers.items()}
    norms = {
        name: np.asarray(getattr(block, name).scale) for name in ("attention_norm", "mlp_norm")
    }
    sums = {}
    for names in (*READERS.values(), "attention/out", "mlp/down"):
        x = draw.normal(size=(200, len(before[names.split(",")[0]]))).astype(np.float32)
        x *= np.exp(draw.normal(size=x.shape[1])).astype(np.float32)
        sums[names] = x.T @ x, np.abs(x).sum(0)
        readers |= dict.fromkeys(names.split(","), names)
    made = calibrate.solved(block, dict.fromkeys(layers, form), sums, "awq")
    factors = {
        names: norms[norm] / np.asarray(getattr(block, norm).scale)
        for norm, names in READERS.items()
    }
    for name in ("attention/out", "mlp/down"):
        after = calibrate._matrix(layers[name])
        factors[name] = np.median(after / before[name], 1)
    out = factors["attention/out"].reshape(2, 2, 8)  # query heads share a head of values
    np.testing.assert_allclose(out[:, 0], out[:, 1], rtol=1e-5)
    divided = {"attention/value": out[:, 0].reshape(-1), "mlp/up": factors["mlp/down"]}
    for name, layer in layers.items():
        each, after = factors[readers[name]], calibrate._matrix(layer)
        expected = before[name] * each[:, None] / divided.get(name, 1)
        np.testing.assert_allclose(after, expected, rtol=1e-5)
        gram = sums[readers[name]][0] / np.outer(each, each)
        codes = int4.nearest(after, int4.searched(after, gram, form), form).leaves(form)["codes"]
        assert (made[f"{name}/weight_codes"].reshape(codes.shape) == codes).mean() > 0.99, name
    for names, each in factors.items():
        gram, sizes = sums[names]
        if names == "attention/out":
            sizes = np.broadcast_to(sizes.reshape(2, 2, 8).mean(1, keepdims=True), (2, 2, 8))
        scaled = [before[name] / divided.get(name, 1) for name in names.split(",")]
        expected = int4.awq_scales(scaled, gram, sizes.reshape(-1), form)
        np.testing.assert_allclose(each, expected, rtol=1e-5)
        assert each.std() > 0.1


# By a norm: the layers that read its results.
READERS = {
    "attention_norm": "attention/query,attention/key,attention/value",
    "mlp_norm": "mlp/gate,mlp/up",
}


@pytest.mark.slow
def test_padding_of_a_text_shorter_than_a_row_is_not_read(params, tmp_path):
    one, other = (rows(count=1, used=5, seed=seed) for seed in (0, 1))
    is_used = one[0].segments > 0
    mixed = one[0]._replace(tokens=np.where(is_used, one[0].tokens, other[0].tokens))
    made = [
        calibration(params, tmp_path / str(number), batches=[batch]).run().leaves
        for number, batch in enumerate((one[0], mixed))
    ]
    for path, leaf in made[0].items():
        np.testing.assert_array_equal(leaf, made[1][path])


@pytest.mark.slow
def test_inputs_that_are_not_finite_and_a_full_disk_are_named(params, tmp_path, monkeypatch):
    wrong = jax.tree.map(lambda leaf: leaf, params)
    wrong["embedding"]["table"] = wrong["embedding"]["table"] * np.inf
    with pytest.raises(DataError, match="not finite"):
        calibration(wrong, tmp_path / "a").run()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(NotWritable, match="quantized layer") as error:
        calibration(params, tmp_path / "b").run()
    assert error.value.fix == "--out=another/place"


def test_the_share_of_a_text_in_another_is_that_of_its_runs_of_ids():
    text, other = rows(count=3, length=256), rows(count=3, length=256, seed=1)
    half = [*text[:1], *other[:1]]
    shifted = [each._replace(tokens=np.roll(each.tokens, 7, 1)) for each in text]
    short = rows(count=1, used=9)
    assert calibration_text.shared(text, text) == pytest.approx(1, abs=0.2)
    assert calibration_text.shared(shifted, text) == pytest.approx(1, abs=0.2)
    assert calibration_text.shared(half, text) == pytest.approx(0.5, abs=0.1)
    assert calibration_text.shared(text, other) == calibration_text.shared([], text) == 0
    assert calibration_text.shared(short, short) == 1


EXPERTS = Mixtral(vocab=64, width=16, depth=2, heads=2, kv_heads=2, experts=4, top_k=2, hidden=16)


@pytest.mark.slow
def test_gram_matrices_of_experts_are_in_memory_for_a_part_of_them(tmp_path, monkeypatch):
    """Sixteen experts, whose matrices would take five times the bytes of their weights."""
    family = dataclasses.replace(EXPERTS, experts=16, hidden=256, depth=1)
    blueprint = Blueprint(family.build(), PRECISION)
    params = blueprint.init(jax.random.key(0))
    words = {"blueprint": blueprint, "batches": rows(count=2)}
    layer = 4 * 3 * 16 * 16 * 256
    read, before, peaks = LayerRunner.inputs, [], []

    def watched(*words):
        if isinstance(words[3], ExpertRange):
            live = sum(each.nbytes for each in jax.live_arrays())
            before.append(live)
            sums = read(*words)
            peaks.append(sum(each.nbytes for each in jax.live_arrays()) - before[0])
            return sums
        return read(*words)

    monkeypatch.setattr(LayerRunner, "inputs", watched)
    some = calibration(params, tmp_path / "some", **words).run()
    assert len(peaks) == 16 * 2
    assert max(peaks) < layer
    monkeypatch.setattr(calibrate, "experts_at_once", lambda experts: 16)
    peaks.clear()
    whole = calibration(params, tmp_path / "whole", **words).run()
    assert max(peaks) > 5 * layer
    assert some.unread == whole.unread
    for path, leaf in whole.leaves.items():
        np.testing.assert_array_equal(leaf, some.leaves[path])


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_experts_are_searched_and_those_that_no_token_chose_are_rounded_to_nearest(
    method, tmp_path
):
    """The router prefers three experts by far, and the pads alone would choose the fourth."""
    blueprint = Blueprint(EXPERTS.build(), PRECISION)
    params = draw_params(blueprint, std=0.1)
    draw = np.random.default_rng(0)
    table = np.array(params["embedding"]["table"])
    table[:, 0] = 30.0  # of all tokens but that of the padding
    table[63, 0] = -30.0
    router = np.zeros((2, 16, 4))
    router[:, 0, 3] = -10.0  # all tokens avoid the last expert, and pads choose it
    router[:, 1:] = 0.1 * draw.normal(size=(2, 15, 4))
    params["embedding"]["table"] = table
    params["stack"]["0"]["mlp"]["router"]["weight"] = router
    (batch,) = rows(count=1, used=12)
    tokens = np.where(batch.segments > 0, batch.tokens % 63, 63)
    batch = batch._replace(tokens=tokens.astype(np.int32))
    words = {"method": method, "batches": [batch], "blueprint": blueprint}
    made, unread = calibration(params, tmp_path, **words).run()
    assert unread == 2  # one of each layer
    assert calibration(params, tmp_path, **words).run().unread == 2  # from the folder
    for name in ("gate", "up", "down"):
        path = f"stack/0/mlp/{name}/weight"
        weight = params["stack"]["0"]["mlp"][name]["weight"]
        assert made[f"{path}_codes"].shape == (2, 4, 8, 16)
        for layer in range(2):
            for expert in range(4):
                plain = WeightFormat("int4", 16).quantize(weight[layer, expert])
                same = np.array_equal(made[f"{path}_codes"][layer, expert], plain["codes"])
                assert same == (expert == 3), (name, layer, expert)
