"""The bytes that devices send, in closed form, are those that a compiled step sends."""

import jax
import pytest

from jaxlm.core import config
from jaxlm.models.cost import comm_cost
from jaxlm.models.cost.tensors import tensors
from jaxlm.parallel import hlo, mesh
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose import collectives
from jaxlm.recipes.plan import divisibility, predict
from jaxlm.tune import cost

SETTINGS = {
    "model.vocab": "512",
    "model.depth": "3",
    "model.width": "32",
    "model.heads": "4",
    "model.kv_heads": "2",
    "model.hidden": "64",
    "data.sequence": "14",
    "train.batch": "8",
    "train.remat": "full",
    "mesh.data": "1",
}
TOKENS, MARK, VOCAB = 8 * 14, 7, 512


def sent(settings, devices):
    """Bytes that a device of a compiled step sends, by kind, axis and content.

    Matrices are counted apart from vectors.
    """
    known = SETTINGS | settings
    if known.get("model.family") == "t5":
        del known["model.kv_heads"]
    run = config.load(Run, None, list(known.items())).value
    grid = mesh.build(run.mesh, jax.devices()[:devices])
    text = collectives.compile_step(run, grid).as_text()
    total = {}
    for each in hlo.read_collectives(text):
        axes = each.axes(grid.shape)
        for shape in each.shapes:
            if sum(size > 1 for size in shape.sizes) < 2:
                continue  # norms, sums
            content = collectives.content_of(shape, TOKENS, VOCAB, MARK)
            key = (each.kind, *axes, content)
            one = each.sent * shape.bytes / each.bytes * each.times
            if (
                each.kind == "collective-permute"
            ):  # the devices that do not send in one do in another
                one *= len(each.groups) / grid.size
            total[key] = total.get(key, 0) + one
    return total, run, dict(grid.shape)


@pytest.mark.slow
def test_an_encoder_decoder_sends_what_the_closed_form_says():
    """But for what its table of biases is summed with, which is next to nothing."""
    sizes = {"model.family": "t5", "model.decoder_depth": "2", "objective.name": "span"}
    actual, run, sizes = sent(sizes | {"mesh.fsdp": "2", "mesh.tensor": "2"}, 4)
    options = work(run, sizes, gradient_bytes=0, targets=predict.decoder_tokens(run))
    assert actual["all-gather", "fsdp", "parameters"] == comm_cost.fsdp_bytes(options, sizes)
    summed = sum(size for key, size in actual.items() if key[:2] == ("all-reduce", "tensor"))
    assert summed == pytest.approx(comm_cost.tensor_bytes(options, sizes), rel=0.01)


def work(run, sizes, **options):
    rows = run.train.batch // (sizes["data"] * sizes["fsdp"])
    return comm_cost.StepWorkload(
        model=run.model.build(),
        sequence=run.data.sequence // sizes["context"],
        rows=rows,
        microbatches=run.train.microbatches,
        repeats=run.train.turns,
        **(dict(weight_bytes=4, gradient_bytes=4, activation_bytes=4) | options),
    )


def test_fsdp_and_tensor_send_what_the_closed_form_says():
    actual, run, sizes = sent({"mesh.fsdp": "2", "mesh.tensor": "2"}, 4)
    gathered = comm_cost.fsdp_bytes(work(run, sizes, gradient_bytes=0), sizes)
    assert actual["all-gather", "fsdp", "parameters"] == gathered
    # XLA for CPU writes a scatter of sums as a sum, which a ring sends twice.
    scattered = comm_cost.fsdp_bytes(work(run, sizes, weight_bytes=0), sizes)
    assert actual["all-reduce", "fsdp", "parameters"] == 2 * scattered
    assert actual["all-reduce", "tensor", "activations"] == comm_cost.tensor_bytes(
        work(run, sizes), sizes
    )


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["lora", pytest.param("qlora", marks=pytest.mark.slow)])
def test_an_adapter_gathers_what_is_stored_and_sums_its_own_gradients(arm):
    """QLoRA gathers codes of 4 bits and the scales of outputs; B of other outputs is whole."""
    tune = {"tune.name": arm, "tune.rank": "2"} | ({"tune.block": "8"} if arm == "qlora" else {})
    actual, run, sizes = sent({"mesh.fsdp": "2"} | tune, 2)
    trained, frozen = map(tuple, cost.split(run.tune, tensors(run.model.build())))
    options = {"trained": trained, "frozen": frozen}
    gathered = comm_cost.fsdp_bytes(work(run, sizes, gradient_bytes=0, **options), sizes)
    assert gathered == sum(size for key, size in actual.items() if key[0] == "all-gather")
    # XLA for CPU writes a scatter of sums as a sum, and ZeRO 1 has sums.
    options = {"trained": trained, "weight_bytes": 0, "zero": 1}
    summed = comm_cost.fsdp_bytes(work(run, sizes, **options), sizes)
    assert summed == sum(size for key, size in actual.items() if key[0] == "all-reduce")
    data = dict(sizes) | {"fsdp": 1, "data": 2}
    assert summed == comm_cost.data_bytes(work(run, data, **options), data)
    if arm == "qlora":
        whole = comm_cost.fsdp_bytes(work(run, sizes, gradient_bytes=0), sizes)
        assert gathered < 0.7 * whole


@pytest.mark.slow
def test_a_tied_table_is_gathered_once_for_both_its_uses_forward():
    actual, run, sizes = sent({"mesh.fsdp": "2", "mesh.tensor": "2", "model.tied": "True"}, 4)
    gathered = comm_cost.fsdp_bytes(work(run, sizes, gradient_bytes=0), sizes)
    assert actual["all-gather", "fsdp", "parameters"] == gathered


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_weights_that_are_whole_are_sent_once_and_gradients_as_the_closed_form_says(
    zero, microbatches
):
    """XLA for CPU writes a scatter of sums, ZeRO 2, as the sum that ZeRO 1 has."""
    settings = {"mesh.fsdp": "2", "mesh.zero": str(zero), "train.microbatches": str(microbatches)}
    actual, run, sizes = sent(settings, 2)
    norms = 2 * 3 * 32 * 4 / 2  # of three layers, stacked
    gathered = comm_cost.fsdp_bytes(work(run, sizes, zero=zero, gradient_bytes=0), sizes)
    assert actual["all-gather", "fsdp", "parameters"] == gathered + norms
    summed = comm_cost.fsdp_bytes(work(run, sizes, zero=zero, weight_bytes=0), sizes)
    assert actual["all-reduce", "fsdp", "parameters"] == zero * summed


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_each_part_of_the_loss_sums_the_gradient_of_the_output_matrix(axis):
    """Four parts of 14 of the 56 tokens of a device. ZeRO 1, as it has sums on every platform."""
    settings = {f"mesh.{axis}": "2", "mesh.zero": "1", "loss.chunk": "14"}
    actual, run, sizes = sent(settings, 2)
    options = work(run, sizes, zero=1, weight_bytes=0, loss_parts=4)
    assert actual["all-reduce", axis, "parameters"] == comm_cost.BYTES[axis](options, sizes)


@pytest.mark.slow
def test_stages_send_what_the_closed_form_says():
    """Two layers a stage: weights of one layer would be gathered once, ahead of the ticks."""
    settings = {"model.depth": "4", "mesh.pipe": "2", "train.microbatches": "4"}
    actual, run, sizes = sent(settings | {"mesh.fsdp": "2"}, 4)
    gathered = comm_cost.fsdp_bytes(work(run, sizes, gradient_bytes=0), sizes)
    assert actual["all-gather", "fsdp", "parameters"] == gathered
    scattered = comm_cost.fsdp_bytes(work(run, sizes, weight_bytes=0), sizes)
    assert actual["all-reduce", "fsdp", "parameters"] == 2 * scattered
    handed_on = actual["collective-permute", "pipe", "activations"]
    summed = actual["all-reduce", "pipe", "activations"]
    assert handed_on + summed == comm_cost.pipe_bytes(work(run, sizes), sizes)
    actual, run, sizes = sent(settings | {"mesh.data": "2"}, 4)
    assert actual["all-reduce", "data", "parameters"] == comm_cost.data_bytes(
        work(run, sizes), sizes
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "other", "repeats", "kinds"),
    [
        (2, "fsdp", 2, {"all-to-all"}),
        (2, "data", 2, {"all-to-all"}),
        (4, "data", 2, {"all-to-all", "collective-permute"}),
    ],
)
def test_stages_of_several_groups_send_what_the_closed_form_says(stages, other, repeats, kinds):
    """Two layers a group; the norms of blocks go with their matrices."""
    settings = {
        "model.depth": str(2 * stages * repeats),
        "mesh.pipe": str(stages),
        "train.microbatches": "4",
        "train.pipeline": "circular",
        "train.pipeline_repeats": str(repeats),
    }
    actual, run, sizes = sent(settings | {f"mesh.{other}": "2"}, 2 * stages)
    options = work(run, sizes)
    if other == "fsdp":
        gathered = comm_cost.fsdp_bytes(work(run, sizes, gradient_bytes=0), sizes)
        assert actual["all-gather", "fsdp", "parameters"] == gathered
    else:
        assert actual["all-reduce", "data", "parameters"] == comm_cost.data_bytes(options, sizes)
    regrouped = comm_cost.regroup_bytes(options, sizes)
    handed_on = actual["collective-permute", "pipe", "activations"]
    summed = actual["all-reduce", "pipe", "activations"]
    assert handed_on + summed == comm_cost.pipe_bytes(options, sizes) - regrouped
    sent_blocks = {
        key[0]: size for key, size in actual.items() if key[1:] == ("pipe", "parameters")
    }
    assert set(sent_blocks) == kinds
    blocks, _, _ = comm_cost.matrices(options.model, 1)
    norms = 2 * run.model.width * run.model.depth
    assert sum(sent_blocks.values()) == regrouped * (1 + norms / blocks)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_split_row_sends_what_the_closed_form_says(microbatches):
    settings = {"mesh.context": "2", "mesh.fsdp": "2", "train.microbatches": str(microbatches)}
    actual, run, sizes = sent(settings, 4)
    keys = comm_cost.context_bytes(work(run, sizes, gradient_bytes=0), sizes)
    gathered = actual["all-gather", "context", "activations"]
    assert gathered + actual["all-reduce", "context", "activations"] / 2 == keys
    summed = comm_cost.context_bytes(work(run, sizes, activation_bytes=0), sizes)
    assert actual["all-reduce", "context", "parameters"] == summed


@pytest.mark.slow
def test_heads_of_a_latent_send_what_the_closed_form_says(monkeypatch):
    """Compared with heads of the stream: experts send more over tensor than counted, in both."""
    experts = {
        "model.experts": "4",
        "model.top_k": "2",
        "model.hidden": "32",
        "model.shared": "32",
        "model.dense_depth": "2",
        "model.dense_hidden": "64",
    }
    plain = SETTINGS | experts | {"model.family": "mixtral", "model.kv_heads": "4"}
    latent = {
        "model.family": "deepseek_v2",
        "model.query_rank": "24",
        "model.kv_rank": "16",
        "model.nope_dim": "8",
        "model.rope_dim": "4",
        "model.value_dim": "8",
    }
    latent = {key: value for key, value in (plain | latent).items() if key != "model.kv_heads"}
    sums = []
    for settings in (plain, latent):
        monkeypatch.setitem(globals(), "SETTINGS", settings)
        actual, run, sizes = sent({"mesh.tensor": "2", "mesh.fsdp": "2"}, 4)
        output = comm_cost.tensor_bytes(work(run, sizes), sizes)
        sums.append((actual["all-reduce", "tensor", "activations"], output))
    (plain_found, plain_said), (actual, output) = sums
    assert actual - plain_found == output - plain_said != 0
    actual, run, sizes = sent({"mesh.context": "2", "mesh.fsdp": "2"}, 4)
    keys = comm_cost.context_bytes(work(run, sizes, gradient_bytes=0), sizes)
    gathered = actual["all-gather", "context", "activations"]
    assert gathered + actual["all-reduce", "context", "activations"] / 2 == keys


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_data_sends_what_the_closed_form_says(dropout):
    settings = {"regularization.residual_dropout": str(dropout)}
    actual, run, sizes = sent({"mesh.data": "4", "train.microbatches": "2"} | settings, 4)
    is_once = divisibility.sums_locally(run, run.model.build(), sizes)
    assert is_once == (dropout == 0)
    options = work(run, sizes, sums_locally=is_once)
    # Once, scales of norms are summed as stacks of layers, which `sent` takes for matrices.
    closed = pytest.approx(comm_cost.data_bytes(options, sizes), rel=0.004 if is_once else 0)
    assert actual["all-reduce", "data", "parameters"] == closed
    assert not any("activations" in key for key in actual)
