import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxlm.core.errors import ConfigError
from jaxlm.parallel import mesh, rules
from jaxlm.parallel.config import MeshConfig


def test_every_parameter_axis_has_a_rule_and_an_unknown_one_is_refused():
    assert rules.spec(("layers", "embed", "heads", "head_dim")) == PartitionSpec(
        "pipe", "fsdp", "tensor", None
    )
    with pytest.raises(KeyError):
        rules.spec(("embed", "wings"))


def test_constrain_does_nothing_without_a_mesh_and_places_with_one():
    x = jnp.zeros((8, 4, 16))
    assert rules.constrain(x, "batch", "length", None) is x
    with jax.set_mesh(mesh.build(MeshConfig(data=2, fsdp=2, tensor=2))):
        placed = jax.jit(lambda x: rules.constrain(x + 1, "batch", "length", "mlp"))(x)
    assert placed.sharding.spec == PartitionSpec(("data", "fsdp"), None, "tensor")


def test_constrain_wants_a_name_for_each_dimension():
    with pytest.raises(ValueError, match="2 axis names"):
        rules.constrain(jnp.zeros((2, 3, 4)), "batch", "length")


def test_sizes_that_do_not_divide_are_named_with_the_nearest_mesh_that_does():
    grid = mesh.build(MeshConfig(data=1, fsdp=1, tensor=8))
    shapes = {
        "a": jax.ShapeDtypeStruct((4, 16), jnp.float32),
        "b": jax.ShapeDtypeStruct((16, 8), jnp.float32),
    }
    axes = {"a": ("heads", "embed"), "b": ("mlp", "embed")}
    with pytest.raises(ConfigError) as caught:
        rules.shardings(grid, axes, shapes)
    assert "heads = 4 does not divide by 8 (for example a)" in caught.value.why
    sizes = dict(
        word.removeprefix("--config.mesh.").split("=")
        for word in caught.value.fix.splitlines()[0].split()
    )
    fit = mesh.build(MeshConfig(**{axis: int(size) for axis, size in sizes.items()}))
    rules.shardings(fit, axes, shapes)
    assert sizes["tensor"] == "4"
