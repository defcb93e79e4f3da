"""Every family through transformers: logits and gradients, both ways.

JAXLM_WRITE_GOLDENS=1 writes what the fast tests compare with:

JAXLM_WRITE_GOLDENS=1 .venv-parity/bin/python -m pytest -m parity tests/parity
"""

import copy
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxlm.checkpoint import hub_architecture
from jaxlm.checkpoint.hub_folder import Folder, write_tensors
from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.config import EncoderConfig
from jaxlm.models.families.t5 import T5
from jaxlm.recipes.exchange import import_model
from jaxlm.recipes.exchange.export_formats import DTYPES
from jaxlm.recipes.use import inspection
from tests.parity import weights

pytestmark = pytest.mark.parity
GOLDENS = Path(__file__).parents[1] / "golden/transformers"
# Two rows that are not of one length: tokens of each, and of what the encoder of an encoder-decoder
# reads.
LENGTHS, SOURCES = np.array((11, 6)), np.array((9, 5))


def read_by_transformers(folder, dtype="float64"):
    """The model of a folder, and what of it transformers did not find or did not know."""
    import torch
    import transformers

    name = json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )


def apart(gradients):
    """Gradients by the names in files: matrices, gate and up of each expert."""
    actual = {}
    for name, gradient in gradients.items():
        stem, _, fused = name.rpartition(".experts.")
        if not stem:
            actual[name] = gradient
            continue
        for number, matrix in enumerate(gradient):
            parts = {"down_proj": matrix}
            if fused == "gate_up_proj":
                gate, up = np.split(matrix, 2)
                parts = {"gate_proj": gate, "up_proj": up}
            for part, value in parts.items():
                actual[f"{stem}.experts.{number}.{part}.weight"] = value
    return actual


OLDER = {
    "gpt_neox": {"lm_head.": "embed_out."},
    "mixtral": {
        ".mlp.": ".block_sparse_moe.",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    },
}


def by_files(family, gradients):
    """The same under the older names that files have."""
    actual = {}
    for name, gradient in gradients.items():
        for new, old in OLDER.get(family.HUB.model_type, {}).items():
            name = name.replace(new, old)
        actual[name] = gradient
    return actual


def scored(model, family, ids, source):
    """Logits of rows by transformers."""
    import torch

    ids, source = (torch.from_numpy(rows).long() for rows in (ids, source))
    if isinstance(family, T5):
        return model(source, decoder_input_ids=ids).logits
    return model(ids).logits


@pytest.fixture(scope="module", params=weights.FAMILIES)
def both(request, tmp_path_factory):
    import torch

    family = weights.FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("ours")
    weights.write(folder, family)
    model, problems = read_by_transformers(folder)
    assert not any(problems.values()), problems
    model = model.eval()
    logits = scored(model, family, weights.tokens(), weights.source())
    targets = torch.from_numpy(weights.tokens()[:, 1:]).long()
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, weights.VOCAB), targets.reshape(-1)
    )
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    gradients = by_files(family, apart(gradients))
    return request.param, model, logits.detach().numpy(), loss.item(), gradients


@pytest.fixture(scope="module")
def saved(both, tmp_path_factory):
    """Return the folders that transformers saves, by dtype: float32, and that as bfloat16."""
    _, model, *_ = both
    folders = {dtype: tmp_path_factory.mktemp(dtype) for dtype in ("float32", "bfloat16")}
    copy.deepcopy(model).float().save_pretrained(folders["float32"])
    rounded, _ = read_by_transformers(folders["float32"], "bfloat16")
    rounded.save_pretrained(folders["bfloat16"])
    return folders


def blueprint_of(name):
    return Blueprint(weights.FAMILIES[name].build(), Precision.float32())


def our_loss(blueprint, family, params):
    ids = weights.tokens()
    logits = weights.forward(blueprint.merge(params), family)
    log_p = jax.nn.log_softmax(logits[:, :-1])
    picked = jax.numpy.take_along_axis(log_p, ids[:, 1:, None], axis=-1)
    return -picked.mean(), logits


def loaded(name, folder):
    """Our parameters in float32, of a folder."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), blueprint_of(name).shapes
    )
    with Folder(folder).opened() as fetch:
        return import_model.load(weights.tensors(weights.FAMILIES[name]), fetch, placed)


def round_trip(name, folder, dtype, out):
    """Tensors that transformers saved, and those that an import and an export make of them."""
    family = weights.FAMILIES[name]
    read = weights.theirs(family, loaded(name, folder))
    out.mkdir()
    dtype = DTYPES[dtype]
    write_tensors(out, weights.tensors(family), lambda each: read[each.name], dtype)
    return tuple(load_file(place / "model.safetensors") for place in (folder, out))


def unequal():
    """Tokens and sources of two rows, the second shorter: see `within`."""
    return weights.tokens()[:, : LENGTHS.max()], weights.source()[:, : SOURCES.max()]


def within(lengths):
    """Return the mask of slots that are no padding."""
    return np.arange(lengths.max()) < lengths[:, None]


def places():
    """The positions of tokens that are `unequal`."""
    return np.broadcast_to(np.arange(LENGTHS.max(), dtype=np.int32), (2, LENGTHS.max()))


def check(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)


def test_logits_loss_gradients_and_the_way_back_are_those_of_transformers(
    both, saved, tmp_path, record_property
):
    name, _, logits, loss, gradients = both
    family, blueprint = weights.FAMILIES[name], blueprint_of(name)
    params = weights.params(family, blueprint.shapes)
    step = jax.jit(jax.value_and_grad(lambda p: our_loss(blueprint, family, p), has_aux=True))
    (ours, our_logits), gradient = step(params)
    assert np.abs(logits).max() > 0.5
    check(our_logits, logits)
    np.testing.assert_allclose(ours, loss, rtol=1e-6)
    mine = weights.gradients(family, gradient)
    assert mine.keys() == gradients.keys()
    worst, largest = 0.0, max(np.abs(gradient).max() for gradient in gradients.values())
    for key, gradient in gradients.items():
        size = np.abs(gradient).max()
        assert size > 0, key
        if weights.is_nothing(size, largest):
            assert key.endswith("key.bias")
            assert np.abs(mine[key]).max() < 1e-7 * largest
            continue
        np.testing.assert_allclose(mine[key], gradient, rtol=1e-3, atol=2e-5 * size, err_msg=key)
        worst = max(worst, float(np.abs(mine[key] - gradient).max() / size))
    far = np.abs(our_logits - logits).max() / np.abs(logits).max()
    assert max(worst, far) < 1e-4
    for dtype, folder in saved.items():
        original, restored = round_trip(name, folder, dtype, tmp_path / dtype)
        assert original.keys() == restored.keys()
        for key, array in original.items():
            assert restored[key].dtype == array.dtype, (key, dtype)
            assert restored[key].tobytes() == array.tobytes(), (key, dtype)
    record_property(
        "table",
        f"{name:50} logits {far:.1e}  gradients {worst:.1e}  round trip bit-identical, "
        f"{len(original)} tensors",
    )


def test_padded_and_packed_rows_are_those_of_transformers(both):
    import torch

    name, model, *_ = both
    family, blueprint = weights.FAMILIES[name], blueprint_of(name)
    params, ids, source = weights.params(family, blueprint.shapes), *unequal()
    with torch.no_grad():  # one by one: with padding, windows would make NaN
        alone = [
            scored(model, family, ids[row : row + 1, :length], source[row : row + 1, :read])[0]
            for row, (length, read) in enumerate(zip(LENGTHS, SOURCES, strict=True))
        ]
    expected = torch.cat(alone).numpy()

    @jax.jit
    def run(params, tokens, **rest):
        model = blueprint.merge(params)
        return model(tokens, **rest)

    inside, read = within(LENGTHS), within(SOURCES)
    number = np.array([[1], [2]], np.int32)
    padded = {"positions": places() * inside, "segments": inside * number}
    if isinstance(family, T5):
        padded |= {"source": source, "source_segments": read * number}
    packed = {
        word: rows[read if "source" in word else inside][None] for word, rows in padded.items()
    }
    check(run(params, ids, **padded)[inside], expected)
    check(run(params, ids[inside][None], **packed)[0], expected)


def test_tokens_after_a_cache_are_those_of_transformers(both):
    import torch

    name, model, *_ = both
    family, blueprint = weights.FAMILIES[name], blueprint_of(name)
    if isinstance(blueprint.config, EncoderConfig):
        pytest.skip("it reads a text at once")
    params, ids, source = weights.params(family, blueprint.shapes), *unequal()
    inside = within(SOURCES)

    @jax.jit
    def begun(params):
        model = blueprint.merge(params)
        if isinstance(family, T5):
            return model.init_cache(source, inside.astype(np.int32), LENGTHS.max())
        return model.empty_cache(2, LENGTHS.max())

    @jax.jit
    def run(params, tokens, positions, cache):
        model = blueprint.merge(params)
        hidden = model.hidden(tokens, positions=positions, cache=cache)
        return model.logits(hidden.values), hidden.cache

    word, inputs, known = "input_ids", {}, None
    if isinstance(family, T5):
        mask, rows = (torch.from_numpy(each).long() for each in (inside, source))
        inputs = {
            "encoder_outputs": model.encoder(rows, attention_mask=mask),
            "attention_mask": mask,
        }
        word = "decoder_input_ids"
    cache = begun(params)
    for start, stop in ((0, 8), (8, 9), (9, 10), (10, 11)):
        part = {word: torch.from_numpy(ids[:, start:stop]).long()}
        with torch.no_grad():
            out = model(**part, **inputs, past_key_values=known, use_cache=True)
        known = out.past_key_values
        actual, cache = run(params, ids[:, start:stop], places()[:, start:stop], cache)
        cache = cache._replace(length=cache.length + stop - start)
        check(actual, out.logits.numpy())


def test_what_transformers_writes_is_read_as_it_was(both, saved):
    name, *_ = both
    family, folder = weights.FAMILIES[name], Folder(saved["float32"])
    read, _ = hub_architecture.read_family(folder, lambda _: None)
    assert read.build() == family.build()
    ignored = hub_architecture.compare(
        weights.tensors(read), folder, read.HUB, is_tied=family.build().tied
    )
    assert not [each for each in ignored if "head" in each]
    expected = weights.params(family, blueprint_of(name).shapes)
    jax.tree.map(np.testing.assert_array_equal, loaded(name, folder.path), expected)


def test_the_goldens_are_what_transformers_says_today(both):
    name, _, logits, loss, gradients = both
    actual = {
        "made by": "tests/parity/test_transformers.py, transformers in float64",
        "loss": loss,
        "logits": logits[:, ::8].tolist(),
        "gradient_norms": {key: float(np.linalg.norm(g)) for key, g in gradients.items()},
    }
    path = GOLDENS / f"{name}.json"
    if os.environ.get("JAXLM_WRITE_GOLDENS"):
        path.write_text(json.dumps(actual, indent=1) + "\n")
    golden = json.loads(path.read_text())
    # transformers computes cosines in float32 for every dtype, and processors round them
    # differently.
    np.testing.assert_allclose(actual["loss"], golden["loss"], rtol=1e-7)
    np.testing.assert_allclose(actual["logits"], golden["logits"], rtol=1e-6, atol=2e-6)


def test_streams_and_attention_weights_of_every_layer_are_those_of_transformers(both):
    import torch

    name, model, *_ = both
    family, blueprint = weights.FAMILIES[name], blueprint_of(name)
    if isinstance(blueprint.config, EncoderConfig) or isinstance(family, T5):
        pytest.skip("only decoders are inspected")
    params = weights.params(family, blueprint.shapes)
    streams, attention = inspection.trace(blueprint.merge, params, weights.tokens())
    ids = torch.from_numpy(weights.tokens()).long()
    with torch.no_grad():
        theirs = model(ids, output_hidden_states=True, output_attentions=True)
    assert len(streams) == len(theirs.hidden_states) == blueprint.config.depth + 1
    # The last of transformers has passed the final norm.
    for ours, stream in zip(streams[:-1], theirs.hidden_states[:-1], strict=True):
        check(ours, stream.numpy())
    assert len(attention) == blueprint.config.depth
    for ours, stream in zip(attention, theirs.attentions, strict=True):
        check(ours, stream.numpy())
