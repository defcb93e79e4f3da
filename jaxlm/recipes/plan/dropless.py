"""Cost of experts without a capacity if the platform has no ragged product. Free of JAX."""

from collections.abc import Iterator

from jaxlm.core.precision_config import ITEM_BYTES
from jaxlm.models import routed
from jaxlm.models.config import ModelConfig
from jaxlm.monitor import formatting
from jaxlm.nn.config import MoeConfig
from jaxlm.parallel import logical
from jaxlm.parallel.logical import Sizes
from jaxlm.recipes.config import Run

CAPACITY = 1.25  # of the shipped GPU layouts; Fedus et al. 2021, arXiv:2101.03961, section 2.2


def cautions(run: Run, decoder: ModelConfig, sizes: Sizes, platform: str) -> Iterator[str]:
    """Yield a warning for each kind of experts that multiplies rows with other experts' weights.

    Only GPUs are considered: a CPU does the same, but its runs are small.
    """
    if platform != "gpu":
        return
    length = run.data.sequence // logical.ways(sizes, "length")
    rows = run.train.batch // (run.train.microbatches * logical.ways(sizes, "batch"))
    cost_of: dict[MoeConfig, tuple[float, float]] = {}
    for block in (*decoder.layers, *decoder.heads):
        mlp = block.mlp
        if isinstance(mlp, MoeConfig) and mlp.capacity is None:
            multiple = routed.multiple(mlp, length, sizes, is_dense=True)
            widest = max(decoder.width, mlp.hidden // logical.ways(sizes, "mlp"))
            copies = routed.held(mlp, sizes) * routed.rows(mlp, length, sizes)
            size = max(rows, 1) * length * copies * widest * ITEM_BYTES[run.precision.compute]
            cost_of[mlp] = multiple, size
    for mlp, (multiple, size) in cost_of.items():
        if multiple > 1:
            yield (
                "model.capacity=None makes XLA for GPUs multiply each row with the weights of all "
                f"{routed.held(mlp, sizes)} experts of a device: {multiple:.3g} times the "
                "FLOPs that "
                f"the tokens' experts need, and {formatting.size(size)} for one padded operand; "
                f"--config.model.capacity={CAPACITY} avoids both, and drops tokens instead"
            )
