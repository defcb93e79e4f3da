"""Operations, read from a program that was really compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.core.precision import Precision
from jaxlm.ops import masks
from jaxlm.ops.attention import attention
from jaxlm.parallel import hlo


@pytest.fixture(scope="module")
def program():
    """A loop with attention and a matrix product in it, whose width two devices share."""
    precision = Precision.float32()

    def layer(x, weight):
        heads = x.reshape(2, 8, 2, 4)
        out = attention(heads, heads, heads, masks.causal(8), precision, scale=0.5)
        return jnp.tanh(out.reshape(2, 8, 8) @ weight), None

    def loss(x, weights):
        return jax.lax.scan(layer, x, weights)[0].sum()

    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    split = NamedSharding(mesh, PartitionSpec(None, "x", None))
    weights = jax.device_put(jnp.ones((3, 8, 8)), split)
    return jax.jit(jax.grad(loss)).lower(jnp.ones((2, 8, 8)), weights).compile().as_text()


def test_products_attention_communication_and_loops_are_told_apart(program):
    operations = hlo.read_operations(program)
    kinds = {
        kind: {name for name in operations if operations[name].kind == kind}
        for kind in {each.kind for each in operations.values()}
    }
    assert set(kinds) == {"matmul", "attention", "communication", "control", "other"}
    assert all("while" in name or "call" in name or "cond" in name for name in kinds["control"])
    attended = {operations[name].source.partition(":")[0] for name in kinds["attention"]}
    assert attended == {"jaxlm/ops/attention.py"}
    assert not any(
        "attention" in operations[name].source for name in kinds["matmul"] | kinds["other"]
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("all-reduce-start.3", "communication"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("sm90_xmma_gemm_bf16", "matmul"),
        ("dot.12", "matmul"),
        ("while.3", "control"),
        ("fusion.7", "other"),
        ("convert.2", "other"),
    ],
)
def test_a_name_alone_tells_some(name, kind):
    assert hlo.operation_by_name(name).kind == kind


def test_a_kernel_of_a_gpu_is_the_operation_that_has_a_point_for_its_underscore(program):
    name, operation = next(
        (name, each)
        for name, each in hlo.read_operations(program).items()
        if "." in name and each.source and each.kind == "other"
    )
    classify = hlo.classifier(program)
    assert classify(name) == classify(name.replace(".", "_").replace("-", "_"))
    assert classify(name) == (*operation, True)
    assert classify("nvjet_sm90_tst_64x8") == ("matmul", "", False)
    assert hlo.classifier("")(name)[2] is False
