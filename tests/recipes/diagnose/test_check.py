"""`jaxlm check`: a sound config passes, and bugs that were put in are found with their line."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.core import config
from jaxlm.models import decoder
from jaxlm.nn import attention, embedding, mlp
from jaxlm.parallel import expert, logical, rules
from jaxlm.parallel.config import AXES, MeshConfig
from jaxlm.parallel.hlo import Collective, Shape, read_groups
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose import check as checks
from jaxlm.recipes.diagnose import collectives
from jaxlm.recipes.diagnose.check import mesh_sizes, reduced_run

CONFIG = """
from jaxlm.core import config
from jaxlm.recipes.config import Run


def get_config(arg=""):
    c = config.new(Run)
    c.model.vocab, c.model.depth, c.model.heads, c.model.kv_heads = 32000, 12, 8, 4
    c.mesh.data, c.mesh.fsdp, c.mesh.tensor = 1, 2, 2
    c.train.batch = 16
    c.optim.name = "lion"
    return c
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    jax.devices()  # all eight: a check that comes first would start JAX with those that it needs
    path = tmp_path_factory.mktemp("check") / "c.py"
    path.write_text(CONFIG)
    return path


def check(capsys, file, *flags, code):
    capsys.readouterr()
    words = ["check", f"--config={file}", "--devices=4", "--json", *flags]
    assert main(words) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def sharded_only(monkeypatch):
    """Without the steps on one device: what is sent does not depend on them."""
    real = checks._try

    def tried(run, grid):
        if grid.size > 1:
            return dataclasses.replace(real(run, grid), gradient={"x": np.zeros(1)})
        nothing = [0.0] * run.train.steps
        return checks.TrialResult(nothing, nothing, {"x": np.zeros(1)}, {}, "")

    monkeypatch.setattr(checks, "_try", tried)


def test_rows_of_noise_are_read_both_ways_where_the_objective_does(file):
    for name in ("causal", "prefix"):
        run = config.load(Run, str(file), [("objective.name", name)]).value
        (batch,) = checks._batches(reduced_run(run, 1, 4).run, 300)
        assert (batch.visible_until is None) == (name == "causal")
    slots = np.arange(batch.visible_until.shape[1])
    assert (batch.visible_until >= slots).all()
    assert (batch.visible_until > slots).any()
    assert (np.take_along_axis(batch.segments, batch.visible_until, 1) == batch.segments).all()


def test_a_sound_config_passes_and_shows_what_it_sends(file, capsys):
    report = check(capsys, file, "--steps=2", code=0)
    # Else no program that this process compiles later would be found in the cache.
    assert not jax.config.jax_compilation_cache_include_metadata_in_key
    assert report["ok"]
    assert report["deviation"] < 1e-5
    assert len(report["gradients"]) > 8
    assert max(report["gradients"].values()) == report["gradients"][report["worst_gradient"]] < 1e-4
    assert report["replicated"] == report["unexpected"] == report["whole_logits"] == []
    assert report["mesh"] == dict.fromkeys(AXES, 1) | {"fsdp": 2, "tensor": 2}
    assert report["changes"]["model.depth"] == [12, 2]
    sent = {}
    for each in report["collectives"]:
        key = (each["kind"], *each["axes"], each["content"])
        sent.setdefault(key, []).append(each)
    assert any("jaxlm/nn/" in c["source"] for c in sent["all-gather", "fsdp", "parameters"])
    assert sum(c["count"] for c in sent["all-reduce", "tensor", "activations"]) >= 2 * 4
    assert ("all-reduce", "fsdp", "parameters") in sent
    assert not any(kind == "all-gather" and c == "activations" for kind, *_, c in sent)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 2, "tensor": 2}, {"fsdp": 2, "tensor": 1, "context": 2}]
)
def test_a_stored_teacher_passes_without_its_folder(file, capsys, sizes):
    """A scatter of the stored ids once gathered them, with their places, over fsdp."""
    flags = [f"--config.mesh.{axis}={size}" for axis, size in sizes.items()]
    flags += ["--config.objective.name=distill", "--config.objective.stored=nowhere"]
    report = check(capsys, file, "--steps=2", *flags, code=0)
    assert report["ok"]
    assert report["unexpected"] == report["whole_logits"] == report["replicated"] == []
    assert max(report["gradients"].values()) < 1e-4


@pytest.mark.slow
def test_samples_of_a_mixture_of_prompts_stay_on_their_devices(file, capsys, sharded_only):
    """A scatter of their scores once gathered those of all rows. The files are not read."""
    settings = {
        "data.kind": "prompts",
        "data.train": "a=a.jsonl,b=b.jsonl",
        "data.mixture.name": "weights",
        "data.mixture.weights": "a=0.25,b=0.75",
        "data.sequence": 16,
        "objective.name": "policy",
        "rl.max_tokens": 6,
        "reward.functions": "ended",
        "mesh.fsdp": 1,
        "mesh.data": 4,
        "mesh.tensor": 1,
    }
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    assert main(["plan", f"--config={file}", "--on=v5e-4", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["rollout"]["samples"] == 16
    assert check(capsys, file, "--steps=1", *flags, code=1)["unexpected"] == []  # no deviation


def test_one_leaf_whose_gradient_has_another_sign_is_named_though_losses_and_norms_agree(
    file, capsys, monkeypatch
):
    def tried(run, grid):
        same = [1.0] * run.train.steps
        leaf = np.array([0.5, -0.25], np.float32)
        gradient = {"good": leaf, "keys/bias": leaf * 1e-9 * grid.size, "turned": leaf}
        if grid.size > 1:
            gradient["turned"] = -leaf
        return checks.TrialResult(same, same, gradient, {}, "ENTRY %main () -> f32[] {\n}\n")

    monkeypatch.setattr(checks, "_try", tried)
    report = check(capsys, file, code=1)
    assert (report["deviation"], report["is_equal"]) == (0, False)
    assert report["worst_gradient"] == "turned"
    assert report["gradients"]["turned"] == pytest.approx(2)
    assert report["gradients"]["good"] == 0 < report["gradients"]["keys/bias"] < 1e-5
    assert main(["check", f"--config={file}", "--devices=4"]) == 1
    assert "2.0e+00 of 1e-04 at most, in turned" in capsys.readouterr().out


@pytest.mark.slow
def test_hidden_units_that_are_gathered_and_a_rule_that_replicates_are_found(
    file, capsys, monkeypatch, sharded_only
):
    def wrong(x, *axes):
        return rules.constrain(x, *(None if axis == "mlp" else axis for axis in axes))

    monkeypatch.setattr(mlp, "constrain", wrong)
    monkeypatch.setitem(logical.RULES, "vocab", None)
    report = check(capsys, file, "--steps=1", code=1)
    gathers = [c for c in report["unexpected"] if c["kind"] == "all-gather"]
    assert any(c["axes"] == ["tensor"] and "jaxlm/nn/" in c["source"] for c in gathers)
    assert {each["path"]: each["axes"] for each in report["replicated"]} == {
        "embedding/table": ["tensor"],
        "unembedding/weight": ["tensor"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["logits", "stream", "heads", "embed"])
def test_each_bug_that_was_put_in_is_found(file, capsys, monkeypatch, sharded_only, bug):
    real = rules.constrain

    def logits(x, *axes):
        return real(x, *(None if axis == "vocab" else axis for axis in axes))

    def stream(x, *axes):
        return (
            real(x, None, "length", None) if axes == ("batch", "length", None) else real(x, *axes)
        )

    if bug == "logits":
        monkeypatch.setattr(decoder, "constrain", logits)
    elif bug == "stream":
        monkeypatch.setattr(decoder, "constrain", stream)
    else:
        monkeypatch.setitem(logical.RULES, bug, None)
    report = check(capsys, file, "--steps=1", code=1)
    if bug == "logits":
        assert {c["content"] for c in report["unexpected"]} >= {"logits"}
        assert report["whole_logits"]
    elif bug == "embed":
        assert all(each["axes"] == ["fsdp"] for each in report["replicated"])
        assert len(report["replicated"]) >= 6
    else:
        assert report["unexpected"]


SPLIT = ("mesh.context=2", "mesh.fsdp=1", "mesh.tensor=1")
OWN_KEYS = ("model.family=bert", "objective.name=masked")  # each head has keys of its own
PLACED = ("model.family=mixtral", "model.capacity=1.25", "mesh.expert=2", "mesh.tensor=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "settings", "kind", "over"),
    [
        ("queries", SPLIT, "all-gather", "context"),
        ("queries", (*SPLIT, *OWN_KEYS), "all-gather", "context"),
        ("places", PLACED, "all-gather", "expert"),
        ("table", (), "all-to-all", "fsdp"),
    ],
)
def test_what_is_sent_beside_what_may_be_is_found(
    file, capsys, monkeypatch, sharded_only, bug, settings, kind, over
):
    """Queries are gathered like keys, experts instead of exchanged; a table is read in parts."""

    def whole(x, *axes):
        return rules.constrain(
            x, *(None if "heads" in axes and axis == "length" else axis for axis in axes)
        )

    def gathered(x, axis, split, joined, *, tiled):
        every = jax.lax.all_gather(x, axis)
        size = x.shape[split] // len(every)
        start = jax.lax.axis_index(axis) * size
        parts = [jax.lax.dynamic_slice_in_dim(one, start, size, split) for one in every]
        return jax.numpy.concatenate(parts, joined)

    if bug == "queries":
        monkeypatch.setattr(attention, "constrain", whole)
    elif bug == "places":
        monkeypatch.setattr(expert.lax, "all_to_all", gathered)
    else:
        monkeypatch.setattr(embedding, "constrain", lambda x, *axes: x)
    flags = [f"--config.{setting}" for setting in settings]
    report = check(capsys, file, *flags, "--steps=1", code=1)
    assert (kind, [over]) in [(each["kind"], each["axes"]) for each in report["unexpected"]]
    if bug == "queries" and "model.family=bert" in settings:
        heads = [each for each in report["unexpected"] if each["largest"].count(",") == 3]
        assert any(each["kind"] == "all-gather" for each in heads), "the queries among them"


WHOLE = {
    "experts": ("expert", "model.family=mixtral", "mesh.expert=2", "mesh.tensor=1"),
    "layers": ("pipe", "mesh.pipe=2", "mesh.tensor=1"),
    # Of a Llama 8B each is less than 2% of all parameters.
    "kv_heads": (
        "tensor",
        "model.width=4096",
        "model.heads=32",
        "model.kv_heads=8",
        "model.hidden=14336",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("axis", WHOLE)
def test_matrices_that_their_own_axis_does_not_split_are_found(
    file, capsys, monkeypatch, sharded_only, axis
):
    monkeypatch.setitem(logical.RULES, axis, None)
    over, *settings = WHOLE[axis]
    flags = [f"--config.{setting}" for setting in settings]
    report = check(capsys, file, *flags, "--steps=1", code=1)
    assert not report["ok"]
    assert all(each["axes"] == [over] for each in report["replicated"])
    paths = {each["path"].removeprefix("stack/0/") for each in report["replicated"]}
    attention = {f"attention/{name}/weight" for name in ("query", "key", "value", "out")}
    mlp = {f"mlp/{name}/weight" for name in ("gate", "up", "down")}
    assert (
        paths
        == {
            "experts": mlp,
            "layers": attention | mlp,
            "kv_heads": {"attention/key/weight", "attention/value/weight"},
        }[axis]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--config.mesh.pipe=2", "--config.mesh.fsdp=1"),
        ("--config.mesh.context=2", "--config.mesh.fsdp=1"),
        ("--config.mesh.context=2", "--config.mesh.fsdp=1", "--config.mesh.context_keys=ring"),
        ("--config.data.sequence=4096",),
        ("--config.model.family=mixtral", "--config.mesh.expert=2", "--config.mesh.tensor=1"),
        ("--config.mesh.data=2", "--config.mesh.zero=1"),
        ("--config.model.family=mixtral", "--config.mesh.expert=2", "--config.mesh.fsdp=1"),
        (
            "--config.model.family=mixtral",
            "--config.mesh.expert=2",
            "--config.mesh.fsdp=1",
            "--config.mesh.tensor=1",
            "--config.mesh.context=2",
            "--config.model.capacity=1.25",
        ),
        ("--config.model.family=gpt2", "--config.model.vocab=50304"),
        ("--config.optim.name=muon", "--config.mesh.data=2"),
        ("--config.optim.name=soap", "--config.mesh.data=2"),
        (
            "--config.mesh.pipe=2",
            "--config.mesh.fsdp=1",
            "--config.model.dropout=0.1",
            "--config.regularization.embedding_noise=5",
        ),
    ],
    ids=lambda flags: " ".join(flag.removeprefix("--config.") for flag in flags),
)
def test_sound_configs_of_every_axis_pass(file, capsys, flags):
    report = check(capsys, file, *flags, code=0)
    assert report["ok"]


def test_the_words_for_people_name_what_is_wrong(capsys, monkeypatch):
    line = collectives.CollectiveRow(
        kind="all-gather",
        axes=("tensor",),
        content="logits",
        count=None,
        sent_bytes=10.0,
        overlapped_bytes=0.0,
        largest="f32[5,512]",
        source="jaxlm/nn/linear.py:48",
        why_unexpected="logits are sent whole",
    )
    answer = {
        "ok": False,
        "is_equal": False,
        "deviation": 1.0,
        "tolerance": 1e-5,
        "gradients": {"w": 0.5},
        "gradient_tolerance": 1e-4,
        "worst_gradient": "w",
        "losses": [1.0],
        "losses_alone": [2.0],
        "grad_norms": [1.0],
        "grad_norms_alone": [1.0],
        "changes": {"model.depth": [12, 2]},
        "replicated": [{"path": "w", "axes": ["fsdp"], "parameters": 10, "share": 0.5}],
        "whole_logits": ["jaxlm/nn/linear.py:48: dot of f32[10,512]"],
        "collectives": [line.record()],
        "unexpected": [line.record()],
    }
    from jaxlm.cli.check import _text

    text = _text(answer)
    assert "model.depth 12 -> 2" in text
    assert "NOT EQUAL" in text
    assert "REPLICATED along fsdp: w" in text
    assert "LOGITS OF THE WHOLE VOCABULARY: jaxlm/nn/linear.py:48: dot of f32[10,512]" in text
    assert "UNEXPECTED: jaxlm/nn/linear.py:48: all-gather over tensor of f32[5,512]" in text
    assert text.endswith("the check failed")


def test_a_misfit_of_the_config_itself_is_an_error_and_no_answer(file, capsys):
    report = check(capsys, file, "--config.mesh.tensor=8", code=2)
    assert "kv_heads = 4" in report["error"]["why"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("settings", "limit", "sizes"),
    [
        ({"fsdp": "auto", "data": 1}, 8, {"fsdp": 8}),
        ({"data": "auto", "fsdp": 16, "tensor": 2}, 8, {"data": 2, "fsdp": 2, "tensor": 2}),
        ({"data": "auto", "fsdp": 16}, 8, {"data": 2, "fsdp": 4}),
        (
            {"pipe": 2, "data": 2, "fsdp": 2, "tensor": 2},
            8,
            {"pipe": 2, "data": 2, "fsdp": 2, "tensor": 2},
        ),
    ],
)
def test_every_axis_that_splits_stays_split(settings, limit, sizes):
    assert mesh_sizes(MeshConfig(**settings), limit) == dict.fromkeys(AXES, 1) | sizes


def test_a_shrunk_run_has_a_mark_in_its_tokens_that_no_parameter_has():
    run = config.load(
        Run,
        None,
        [
            ("mesh.context", "4"),
            ("model.heads", "20"),
            ("model.kv_heads", "4"),
            ("model.width", "640"),
        ],
    ).value
    small = reduced_run(run, 3, 8)
    model = small.run.model
    assert small.run.data.sequence % (2 * 4 * small.mark) == 0
    sizes = (model.vocab, model.width, model.heads, model.kv_heads, model.hidden, model.depth)
    assert all(size % small.mark for size in sizes)
    assert small.run.precision.compute == "float32"
    table = config.load(Run, None, [("model.family", "gpt2"), ("optim.name", "muon")]).value
    small = reduced_run(table, 3, 8)
    assert small.run.model.max_positions >= small.run.data.sequence
    assert small.run.model.max_positions % small.mark, "a table of positions is no activation"
    assert small.run.optim.newton_schulz_dtype == "float32"


def test_a_shrunk_run_drops_nothing_as_other_meshes_draw_other_numbers():
    settings = {
        "model.family": "gpt2",
        "model.dropout": "0.1",
        "regularization.attention_dropout": "0.2",
        "regularization.layer_drop": "0.3",
        "regularization.embedding_noise": "5",
        "mesh.pipe": "2",
    }
    small = reduced_run(config.load(Run, None, list(settings.items())).value, 3, 8)
    rates = {each.path: each.new for each in small.changes if each.path in settings}
    assert rates == dict.fromkeys(list(settings)[1:-1], 0.0)
    model = small.run.decoder(512)
    assert (model.dropout, model.layer_drop, model.embedding_noise) == (0, 0, 0)
    assert {(layer.dropout, layer.attention.dropout) for layer in model.layers} == {(0, 0)}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"data.sequence": "4096"}, ("train.attention", "auto", "blockwise")),
        ({"data.sequence": "256"}, ("train.attention", "auto", "reference")),
        (
            {"data.sequence": "32768", "mesh.context": "4"},
            ("mesh.context_keys", "auto", "ring"),
        ),
        (
            {
                "data.sequence": "256",
                "mesh.context": "4",
                "model.heads": "4",
                "model.kv_heads": "4",
            },
            ("mesh.context_keys", "auto", "gather"),
        ),
    ],
)
def test_a_shrunk_run_computes_attention_as_the_run_itself_would(settings, change):
    small = reduced_run(config.load(Run, None, list(settings.items())).value, 3, 8)
    assert change in {(each.path, each.old, each.new) for each in small.changes}


LINEAR, EXPERT = "jaxlm/nn/linear.py:1", "jaxlm/parallel/expert.py:1"
KEYS, QUERIES = Shape("f32", (1, 20, 2, 8)), Shape("f32", (1, 20, 4, 8))
STEP = collectives.StepShapes(tokens=20, mark=5, vocab=512, head_dim=8, keys=KEYS.elements)
RING = dataclasses.replace(STEP, has_ring=True)
PLACES = dataclasses.replace(STEP, has_places=True)


def why(kind, axes, content="activations", source=LINEAR, *, shapes=(QUERIES,), step=STEP):
    return collectives.unexpected(kind, axes, content, source, shapes, step)


def test_what_is_expected_is_decided_by_what_it_is():
    assert not why("all-gather", ("fsdp",), "parameters")
    assert why("all-gather", ("fsdp",))
    assert why("all-reduce", ("data", "fsdp"))
    assert not why("all-reduce", ("tensor",))
    assert why("all-reduce", ("tensor",), "logits")


def test_one_number_is_no_parameter_of_any_shape():
    """The last target of a device, which multi-token prediction passes to the one before it."""
    one, two = (Shape("f32", sizes) for sizes in ((1, 1), (1, 2)))
    assert collectives.content_of(one, tokens=64, vocab=16, mark=7) == "scalars"
    assert collectives.content_of(two, tokens=64, vocab=16, mark=7) == "parameters"


def test_over_context_keys_are_gathered_or_go_round_and_nothing_else():
    gather = functools.partial(why, "all-gather", ("context",), source="jaxlm/ops/rope.py:1")
    assert not gather(shapes=(KEYS, KEYS))
    assert gather(shapes=(QUERIES,)), "the queries, or what heads have read"
    assert gather(shapes=(KEYS, QUERIES))
    assert gather(shapes=(Shape("f32", (1, 20, 16)),)), "as many numbers, but of no head"
    assert gather(shapes=(KEYS,), step=RING)
    assert why("all-gather", ("fsdp",), shapes=(KEYS,))
    permute = functools.partial(why, "collective-permute")
    assert not permute(("pipe",))
    assert not permute(("context",), step=RING)
    assert permute(("context",))
    assert permute(("pipe", "data"))
    assert permute(("tensor",))


def test_tokens_go_to_experts_by_one_way():
    over = ("expert",)
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        assert not why(kind, over, source=EXPERT)
        assert why(kind, over, source=EXPERT, step=PLACES)
        assert why(kind, over, source="jaxlm/nn/moe.py:1")
    assert why("all-to-all", over, source=EXPERT)
    assert not why("all-to-all", over, source=EXPERT, step=PLACES)
    assert why("all-to-all", ("fsdp",), source="jaxlm/nn/embedding.py:1", step=PLACES)


def test_queries_of_heads_with_keys_of_their_own_are_found_by_counting():
    """Keys and values of two layers are four arrays; a fifth array of their shape is the fault."""
    groups = read_groups("replica_groups={{0,1}}", 2)
    gather = Collective(
        kind="all-gather", name="g", shapes=(KEYS,), groups=groups, times=4, op="", source=LINEAR
    )
    mesh = dict.fromkeys(AXES, 1) | {"context": 2}
    step = dataclasses.replace(STEP, gathers=4)
    (line,) = collectives.table([gather], mesh, step)
    assert not line.why_unexpected
    queries = dataclasses.replace(gather, times=1)
    (line,) = collectives.table([gather, queries], mesh, step)
    assert (line.count, bool(line.why_unexpected)) == (5, True)


def test_a_collective_of_which_no_line_is_known_says_so():
    groups = read_groups("replica_groups={{0,1}}", 2)
    bare = Collective(
        kind="all-gather", name="g", shapes=(QUERIES,), groups=groups, times=1, op="", source=""
    )
    (line,) = collectives.table([bare], dict.fromkeys(AXES, 1) | {"tensor": 2}, STEP)
    assert (line.source, bool(line.why_unexpected)) == ("unknown line", True)
