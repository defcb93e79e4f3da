import jax
import jax.numpy as jnp

from jaxlm.core import backend
from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.ops.matmul import matmul


def test_it_is_that_of_the_process_but_for_what_is_made_for_another():
    assert backend.name() == jax.default_backend()
    with backend.compiling_for("tpu"):
        assert backend.name() == "tpu"
    assert backend.name() == jax.default_backend()


def test_activations_and_products_are_those_of_the_platform_that_a_program_is_for():
    precision = Precision.of(PrecisionConfig(compute="bfloat16"))

    def product():
        x, weight = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
        program = jax.make_jaxpr(lambda x, w: matmul(x, w, precision))(x, weight)
        return program.out_avals[0].dtype, "reshape" in str(program)

    assert product() == (jnp.float32, True), "on a CPU rows are merged, and sums stay as they are"
    with backend.compiling_for("tpu"):
        assert product() == (jnp.bfloat16, False)
