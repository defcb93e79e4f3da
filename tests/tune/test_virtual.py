"""Virtual tokens: exact laws against the plain model that reads the same tokens as ids."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import config as configs
from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.load import load
from jaxlm.core.precision import Precision
from jaxlm.generate import beam, decode, sampling
from jaxlm.models.build import Blueprint
from jaxlm.models.families.deepseek import DeepSeekV2
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.mistral import Mistral
from jaxlm.ops.kernels import Target
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import attention_kernels
from jaxlm.tune import config, surgery
from tests.models.parameters import draw_params

FULL = Precision.float32()
AHEAD = [5, 9, 2]  # ids that the virtual tokens stand for
FAMILIES = {
    "llama": Llama(vocab=32, width=16, depth=3, heads=4, kv_heads=2, hidden=24),
    "gpt2": GPT2(vocab=32, width=16, depth=2, heads=4, max_positions=16),
    "mistral": Mistral(vocab=32, width=16, depth=2, heads=4, kv_heads=2, hidden=24, window=64),
    "deepseek_v2": DeepSeekV2(
        vocab=32, width=16, depth=2, heads=2, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4,
        dense_depth=1, dense_hidden=24, experts=4, top_k=2, groups=2, top_groups=1, hidden=8,
    ),
}  # fmt: skip
CASES = [
    *itertools.product(("prompt", "prefix"), ("llama", "gpt2")),
    ("prompt", "deepseek_v2"),
]
IDS = np.random.default_rng(0).integers(0, 32, (2, 9)).astype(np.int32)


@functools.cache
def plain_model(family, **changes):
    plain = Blueprint(dataclasses.replace(FAMILIES[family], **changes).build(), FULL)
    return plain, draw_params(plain, 1, std=0.3)  # so large that each key counts


@functools.cache
def standing_for(arm, family, **changes):
    """Return the model whose virtual tokens stand for the ids of AHEAD, and its parameters."""
    plain, base = plain_model(family, **changes)
    settings = (
        config.PromptTuning(length=3, text="x")
        if arm == "prompt"
        else config.PrefixTuning(length=3)
    )
    change = surgery.build(settings, lambda _: AHEAD)
    blueprint = Blueprint(plain.config, FULL, surgery=change)
    params = surgery.adapted_params(plain, change, base, jax.random.key(2))
    if arm == "prefix":
        hidden = decode.prefill(
            plain.merge(base), jnp.asarray([AHEAD]), jnp.asarray([3]), more=0,
            both_ways=False, is_int8=False,
        )  # fmt: skip
        leaves = tree.leaves(params)
        for name, layers in hidden.cache.layers.items():
            for leaf, part in (("keys", "keys"), ("values", "values")):
                each = [getattr(layer, part)[0].swapaxes(0, 1) for layer in layers]
                leaves[f"{name}/attention/leading/{leaf}"] = jnp.stack(each)
        params = tree.map_with_path(lambda path, _: leaves[path], params)
    return blueprint, params


def logits(blueprint, params, ids, **fields):
    def computed(params):
        model = blueprint.merge(params)
        return model(jnp.asarray(ids), **fields)

    return np.asarray(jax.jit(computed)(params))


def places(ids, first=0):
    return jnp.broadcast_to(jnp.arange(first, first + ids.shape[1]), ids.shape)


@pytest.mark.few(1)
@pytest.mark.parametrize(("arm", "family"), CASES)
def test_virtual_tokens_that_stand_for_ids_compute_what_the_ids_do(arm, family):
    whole = np.concatenate((np.broadcast_to(AHEAD, (2, 3)), IDS), axis=1)
    expected = logits(*plain_model(family), whole, positions=places(whole))[:, 3:]
    got = logits(*standing_for(arm, family), IDS, positions=places(IDS))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    without = logits(*plain_model(family), IDS, positions=places(IDS))
    assert np.abs(without - expected).max() > 1e-2


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("arm", ["prompt", "prefix"])
@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_each_segment_of_a_packed_row_sees_them_as_if_it_were_alone(arm, kernel):
    blueprint, params = standing_for(arm, "llama")
    alone = [
        logits(blueprint, params, part, positions=places(part)) for part in (IDS[:, :5], IDS[:, 5:])
    ]
    of_kernel = blueprint.config.map_blocks(
        lambda block: dataclasses.replace(
            block, attention=dataclasses.replace(block.attention, kernel=kernel)
        )
    )
    settings = config.PromptTuning(length=3) if arm == "prompt" else config.PrefixTuning(length=3)
    unpacked = Blueprint(of_kernel, FULL, surgery=surgery.build(settings))
    segments = jnp.asarray([[1] * 5 + [2] * 4 + [0] * 2] * 2)
    positions = jnp.asarray([[*range(5), *range(4), 0, 0]] * 2)
    row = np.pad(IDS, ((0, 0), (0, 2)))
    packed = logits(unpacked, params, row, positions=positions, segments=segments)
    np.testing.assert_allclose(packed[:, :9], np.concatenate(alone, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("arm", "family", "is_relaid"),
    [*((*case, False) for case in CASES), ("prompt", "llama", True), ("prefix", "llama", True)],
)
def test_decoding_gives_the_logits_of_the_forward_pass(arm, family, is_relaid):
    blueprint, params = standing_for(arm, family)
    expected = logits(blueprint, params, IDS, positions=places(IDS))
    lengths = jnp.asarray([5, 3])

    @jax.jit
    def run(params):
        model = blueprint.merge(params)
        model = model.relayout_for_decode() if is_relaid else model
        hidden = decode.prefill(
            model, jnp.asarray(IDS[:, :5]), lengths, more=4, both_ways=False, is_int8=False
        )
        parts, cache = [model.logits(hidden.values)], hidden.cache
        for step in range(3):
            tokens = jnp.take_along_axis(jnp.asarray(IDS), (lengths + step)[:, None], axis=1)
            values, cache = decode.decode_tokens(model, tokens, cache)
            parts.append(model.logits(values))
        return jnp.concatenate(parts, 1)

    got = np.asarray(run(params))
    for row, length in enumerate((5, 3)):
        np.testing.assert_allclose(
            got[row], expected[row, length - 1 : length + 3], rtol=1e-4, atol=2e-5
        )


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("arm", ["prompt", "prefix"])
def test_a_window_does_not_hide_them_in_training_or_decoding(arm):
    blueprint, params = standing_for(arm, "mistral", window=4)
    noise = {
        path: leaf
        for path, leaf in tree.leaves(params).items()
        if "leading" in path or "virtual" in path
    }
    assert noise
    moved = tree.map_with_path(lambda path, leaf: leaf + (path in noise), params)
    before, after = (
        logits(blueprint, each, IDS, positions=places(IDS)) for each in (params, moved)
    )
    assert (np.abs(after - before).max(-1) > 1e-4).all()
    model = blueprint.merge(params)
    hidden = decode.prefill(
        model, jnp.asarray(IDS[:, :8]), jnp.asarray([8, 8]), more=1, both_ways=False, is_int8=False
    )
    values, _ = decode.decode_tokens(model, jnp.asarray(IDS[:, 8:]), hidden.cache)
    np.testing.assert_allclose(model.logits(values)[:, 0], before[:, 8], rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["prompt", "prefix"])
def test_text_is_continued_as_after_the_ids_that_they_stand_for(arm):
    """Greedily, and by beam search; in a cache of int8 it runs."""
    options = {"max_tokens": 4, "ends": (31,), "pad": 0}
    greedy = functools.partial(sampling.draw, temperature=0.0, top_k=None, top_p=None, min_p=None)
    keys = jax.random.split(jax.random.key(0), 2)
    whole = jnp.asarray(np.concatenate((np.broadcast_to(AHEAD, (2, 3)), IDS), axis=1))
    ids, lengths = jnp.asarray(IDS), jnp.asarray([9, 6])
    (plain, base), (blueprint, params) = plain_model("gpt2"), standing_for(arm, "gpt2")
    for build in (
        functools.partial(decode.build, draw=greedy, **options),
        functools.partial(beam.build, beams=2, length_penalty=1.0, **options),
    ):
        expected = jax.jit(build(plain.merge))(base, whole, lengths + 3, keys)
        got = jax.jit(build(blueprint.merge))(params, ids, lengths, keys)
        np.testing.assert_array_equal(got.ids, expected.ids)
    rounded = decode.build(blueprint.merge, greedy, is_int8=True, **options)
    assert jax.jit(rounded)(params, ids, lengths, keys).ids.shape == (2, 4)


def test_a_prompt_begins_as_the_embeddings_of_its_text_and_a_prefix_near_zero():
    plain, base = plain_model("llama")
    table = base["embedding"]["table"]
    for ids, length, expected in ((AHEAD, 2, AHEAD[:2]), (AHEAD, 5, [*AHEAD, *AHEAD[:2]])):
        change = surgery.build(config.PromptTuning(length=length, text="x"), lambda _, ids=ids: ids)
        rows = surgery.adapted_params(plain, change, base, jax.random.key(2))["virtual"]["rows"]
        np.testing.assert_array_equal(rows, table[np.asarray(expected)])
    rows = surgery.adapted_params(
        plain, surgery.build(config.PromptTuning(length=4)), base, jax.random.key(2)
    )["virtual"]["rows"]
    assert (np.asarray(rows)[:, None] == np.asarray(table)[None]).all(-1).any(-1).all()
    params = surgery.adapted_params(
        plain, surgery.build(config.PrefixTuning()), base, jax.random.key(2)
    )
    leading = params["stack"]["0"]["attention"]["leading"]
    assert leading["keys"].shape == (3, 16, 2, 4)
    for leaf in leading.values():
        assert float(jnp.std(leaf)) == pytest.approx(0.02, rel=0.2)


SMALL = [
    ("model.vocab", "64"), ("model.width", "16"), ("model.depth", "1"), ("model.heads", "4"),
    ("tune.name", "prefix"),
]  # fmt: skip
LLAMA = [*SMALL, ("model.kv_heads", "4")]


@pytest.mark.parametrize(
    ("settings", "where", "fix"),
    [
        (
            {"model.family": "gpt2", "model.max_positions": "64", "data.sequence": "60"},
            "tune.length",
            "--config.data.sequence=48",
        ),
        (
            {"model.family": "gpt2", "model.max_positions": "16", "data.sequence": "16"},
            "tune.length",
            "--config.tune.length=2\n--config.data.sequence=14",
        ),
        (
            {"model.kv_heads": "4", "data.sequence": "2040"},
            "tune.length",
            "--config.data.sequence=2032",
        ),
        (
            {"model.family": "bert", "objective.name": "masked"},
            "tune.name",
            "--config.tune.name=lora",
        ),
    ],
)
def test_rows_for_which_there_are_no_positions_are_an_error(settings, where, fix):
    with pytest.raises(ConfigError) as caught:
        load(Run, None, [*SMALL, *settings.items()])
    assert where in caught.value.where + caught.value.what
    assert caught.value.fix == fix


def test_rows_that_devices_split_are_refused_and_kernels_of_platforms_are_not_chosen():
    run = load(Run, None, [*LLAMA, ("data.sequence", "1024")]).value
    decoder = run.decoder(64)
    with pytest.raises(ConfigError, match="split over devices") as caught:
        attention_kernels.check(run, decoder, {"context": 2}, Target("cpu"))
    assert caught.value.fix == "--config.mesh.context=1"
    for target in (Target("tpu"), Target("gpu", 9.0)):
        for tune, kernel in ((run.tune, "blockwise"), (config.Full(), target)):
            each = dataclasses.replace(run, tune=tune)
            chosen = attention_kernels.with_kernels(each, decoder, {}, target)
            (selected,) = {layer.attention.kernel for layer in chosen.layers}
            assert (selected == kernel) == (kernel == "blockwise")
    assert configs.to_json(run)["tune"] == {"name": "prefix", "length": 16, "also": []}
