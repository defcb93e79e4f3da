"""The reader of compiled programs, on real small ones, and on the texts that XLA may write."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlm.parallel import hlo, mesh
from jaxlm.parallel.config import MeshConfig
from jaxlm.parallel.hlo import Shape, read_groups

P = PartitionSpec


def compiled(function, grid, *arguments):
    """The collectives of a function of arrays, given as (shape, spec)."""
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(grid, spec))
        for shape, spec in arguments
    ]
    with jax.set_mesh(grid):
        return hlo.read_collectives(jax.jit(function).lower(*shapes).compile().as_text(), "/tests/")


@pytest.fixture(scope="module")
def grid():
    return mesh.build(MeshConfig(data=2, tensor=2), jax.devices()[:4])


def test_a_gather_is_what_comes_out_of_it_with_its_axis_and_its_line(grid):
    def function(x):
        doubled = jax.lax.with_sharding_constraint(x * 2, P("tensor", "data"))
        return jax.lax.with_sharding_constraint(doubled, P(None, "data")).sum(0)

    (collective,) = compiled(function, grid, ((4, 6), P("tensor", "data")))
    assert (collective.kind, collective.times, collective.axes(grid.shape)) == (
        "all-gather",
        1,
        ("tensor",),
    )
    assert collective.shapes == (Shape("f32", (4, 3)),)
    assert (collective.bytes, collective.sent) == (48, 24)
    assert collective.source.startswith("tests/parallel/test_hlo.py:")
    line = int(collective.source.rpartition(":")[2])
    assert line > 0


def test_a_loop_counts_its_turns_and_a_sum_is_sent_twice(grid):
    def function(x, w):
        def turn(x, _):
            return jax.lax.with_sharding_constraint((x @ w) @ w.T, P("data", None)), None

        return jax.lax.scan(turn, x, length=5)[0]

    collectives = compiled(function, grid, ((4, 8), P("data", None)), ((8, 16), P(None, "tensor")))
    (sums,) = [each for each in collectives if each.kind == "all-reduce"]
    assert (sums.times, sums.axes(grid.shape)) == (5, ("tensor",))
    assert sums.shapes == (Shape("f32", (2, 8)),)
    assert sums.sent == 2 * 4 * 2 * 8 / 2


def test_eight_devices_keep_their_axes_apart():
    grid = mesh.build(MeshConfig(data=2, fsdp=2, tensor=2))

    def function(x):
        rows = jax.lax.with_sharding_constraint(x, P(("data", "fsdp"), None, None))
        return rows, x.sum(0)

    collectives = compiled(function, grid, ((8, 4, 6), P(("data", "fsdp"), None, "tensor")))
    by_kind = {each.kind: each.axes(grid.shape) for each in collectives}
    assert by_kind == {"all-gather": ("tensor",), "all-reduce": ("data", "fsdp")}


def test_a_permutation_and_an_exchange_cross_their_axis(grid):
    def moved(x):
        return jax.lax.ppermute(x, "tensor", [(0, 1), (1, 0)]), jax.lax.all_to_all(
            x, "data", 0, 1, tiled=True
        )

    specs = P("data", "tensor")
    function = jax.shard_map(
        moved, mesh=grid, in_specs=specs, out_specs=(specs, P(None, None)), check_vma=False
    )
    by_kind = {each.kind: each for each in compiled(function, grid, ((4, 4), specs))}
    permuted, exchanged = by_kind["collective-permute"], by_kind["all-to-all"]
    assert permuted.axes(grid.shape) == ("tensor",)
    assert permuted.sent == permuted.bytes == 16
    assert exchanged.axes(grid.shape) == ("data",)
    assert (exchanged.bytes, exchanged.sent) == (16, 8)


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("replica_groups={{0,1},{2,3}}, x", ((0, 1), (2, 3))),
        ("replica_groups={}, x", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4], x", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, x", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=4] {'a':(1)2}, x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4] {'a':(2)2}, x", ((0, 1), (2, 3))),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}, x",
            ((0, 2), (1, 3)),
        ),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}, x", ((0, 2), (1, 3))),
        ("source_target_pairs={{0,1},{1,0}}, x", ((0, 1), (1, 0))),
    ],
)
def test_groups_are_read_however_they_are_written(text, members):
    assert read_groups(f"%a = f32[2] all-reduce(%b), {text}", 4) == members


def test_groups_that_nobody_knows_are_refused():
    with pytest.raises(ValueError, match="unknown form"):
        read_groups("replica_groups=elsewhere", 4)
    with pytest.raises(ValueError, match="no entry"):
        hlo.read_collectives("nothing")


ASYNC = """HloModule a, num_partitions=4
FileNames
1 "/x/jaxlm/nn/mlp.py"
2 "/y/optax/a.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%inner (p: bf16[8,4]) -> bf16[2,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %rs = bf16[2,4]{1,0} reduce-scatter(%p), replica_groups={}, dimensions={0}, to_apply=%add
}

%body (t: (s32[])) -> (s32[]) {
  ROOT %ar = f32[3]{0} all-reduce(%t), replica_groups={{0,1},{2,3}}, to_apply=%add
}

ENTRY %main (x: f32[2,4], y: bf16[8,4]) -> f32[8,4] {
  %x = f32[2,4]{1,0} parameter(0)
  %s = (f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%x), replica_groups={}, \
dimensions={0}, metadata={op_name="a['b']" stack_frame_id=2}
  %w = (s32[]) while(%s), condition=%c, body=%body
  %r = bf16[2,4]{1,0} fusion(%y), kind=kCustom, calls=%inner
  ROOT %d = f32[8,4]{1,0} all-gather-done(%s)
}
"""


def test_starts_fusions_and_loops_that_do_not_say_are_read():
    by_kind = {each.kind: each for each in hlo.read_collectives(ASYNC)}
    gather, scatter, summed = (
        by_kind[kind] for kind in ("all-gather", "reduce-scatter", "all-reduce")
    )
    assert gather.shapes == (Shape("f32", (8, 4)),)
    assert (gather.source, gather.op, gather.times) == ("jaxlm/nn/mlp.py:7", "a['b']", 1)
    assert scatter.shapes == (Shape("bf16", (8, 4)),)
    assert (scatter.bytes, scatter.sent, scatter.times) == (64, 48, 1)
    assert (summed.times, summed.axes({"a": 2, "b": 2})) == (None, ("b",))


@pytest.mark.parametrize("counter", ["s32[]", "u32[]{:T(128)}"])
def test_the_turns_of_a_loop_are_the_number_in_its_condition(counter):
    """A scan counts in s32; the TPU compiler's own loops, around a product in parts, in u32."""
    condition = f"""%c (t: (s32[])) -> pred[] {{
  %n = {counter} constant(6)
  %i = {counter} get-tuple-element(%t), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

ENTRY"""
    (summed,) = (
        each
        for each in hlo.read_collectives(ASYNC.replace("ENTRY", condition))
        if each.kind == "all-reduce"
    )
    assert summed.times == 6


def test_what_follows_a_kernel_whose_metadata_has_line_breaks_counts():
    """A splash kernel of a TPU has such metadata."""
    kernel = """ENTRY %main (x: f32[2,4], y: bf16[8,4]) -> f32[8,4] {
  %k = f32[2,4]{1,0} custom-call(), frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="kernel" stack_frame_id=2}
"""
    head = "ENTRY %main (x: f32[2,4], y: bf16[8,4]) -> f32[8,4] {\n"
    before = hlo.read_collectives(ASYNC)
    assert head in ASYNC
    assert hlo.read_collectives(ASYNC.replace(head, kernel)) == before
    operations = hlo.read_operations(ASYNC.replace(head, kernel))
    assert operations["k"].source == "jaxlm/nn/mlp.py:7"


OVERLAP = """HloModule jit_step, is_scheduled=true, num_partitions=2

%fused (p: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  ROOT %c = bf16[8,8]{1,0} convolution(%p, %p), dim_labels=bf_io->bf
}

%wrapped (q: f32[4]) -> f32[8] {
  %q = f32[4]{0} parameter(0)
  ROOT %wg = f32[8]{0} all-gather(%q), replica_groups={{0,1}}, dimensions={0}
}

%offloaded (r: f32[4]) -> f32[8] {
  %r = f32[4]{0} parameter(0)
  ROOT %og = f32[8]{0} all-gather(%r), replica_groups={{0,1}}, dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (x: bf16[8,8], y: f32[4]) -> bf16[8,8] {
  %x = bf16[8,8]{1,0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %early = (f32[4]{0}, f32[8]{0}) all-gather-start(%y), replica_groups={{0,1}}, dimensions={0}
  %early-done = f32[8]{0} all-gather-done(%early)
  %call = ((f32[4]{0}), f32[8]{0}, u32[]) async-start(%y), calls=%wrapped
  %thread = ((f32[4]{0}), f32[8]{0}, u32[]) call-start(%y), to_apply=%offloaded
  %thread-update = ((f32[4]{0}), f32[8]{0}, u32[]) call-update(%thread)
  %hidden = (f32[4]{0}, f32[8]{0}) all-gather-start(%y), replica_groups={{0,1}}, dimensions={0}
  %product = bf16[8,8]{1,0} fusion(%x), kind=kOutput, calls=%fused
  %hidden-done = f32[8]{0} all-gather-done(%hidden)
  %call-done = f32[8]{0} async-done(%call)
  %thread-done = f32[8]{0} call-done(%thread-update)
  %late = (f32[4]{0}, f32[8]{0}) all-gather-start(%y), replica_groups={{0,1}}, dimensions={0}
  %late-done = f32[8]{0} all-gather-done(%late)
  %sync = f32[4]{0} all-reduce(%y), replica_groups={{0,1}}, to_apply=%fused
  ROOT %end = bf16[8,8]{1,0} add(%product, %product)
}
"""


def test_a_collective_is_overlapped_if_a_product_runs_between_its_start_and_its_end():
    overlapped = {each.name: each.is_overlapped for each in hlo.read_collectives(OVERLAP)}
    assert overlapped == {
        "wg": True, "og": True, "early": False, "hidden": True, "late": False, "sync": False,
    }  # fmt: skip
