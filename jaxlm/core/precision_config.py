"""Settings of the mixed-precision policy."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxlm.core.config import setting

Float = Literal["float32", "bfloat16", "float16"]
Products = Literal["compute", "int8", "fp8"]
Qat = Literal["none", "w8a8", "w4a8", "int4"]
Compute = Literal["auto", "float32", "bfloat16", "float16"]
ITEM_BYTES: dict[Float, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtypes of the master weights, the moments, the matrix products, and summed gradients."""

    params: Literal["float32", "bfloat16"] = setting(
        "float32",
        "dtype of the master weights; bfloat16 updates are rounded stochastically, so that small "
        "updates are not lost",
    )
    moments: Literal["float32", "bfloat16"] = setting(
        "float32",
        "dtype of the optimizer's state between updates, except state in a format of the "
        "optimizer's own; bfloat16 is rounded stochastically",
    )
    compute: Compute = setting(
        "float32",
        "dtype of matrix operands and activations; accumulation, softmax, norms and loss stay "
        "float32; with float16 the loss is scaled (guard.loss_scale); auto is bfloat16, else "
        "float16, if the machine on which the run begins multiplies it faster than float32, and "
        "float32 otherwise. "
        "GPUs from Ampere on multiply float32 as TF32 (11 bits), TPUs as bfloat16",
    )
    reduce: Float = setting("float32", "dtype in which gradients are summed over micro-batches")
    products: Products = setting(
        "compute",
        "rounding of the operands of attention and dense-MLP projections while training: none "
        "beyond `compute`, int8 with a scale per row, or fp8 with a scale per tensor; experts, "
        "router and logits are not rounded",
    )
    qat: Qat = setting(
        "none",
        "quantization-aware training: attention and dense-MLP projections compute as after "
        "`jaxlm quantize` with this scheme, also in evaluations; gradients pass the rounding; "
        "experts, router, latent per-head projections and logits are not rounded",
    )

    @property
    def compute_dtype(self) -> Float:
        """The value of `compute`, which must not be auto any more: see `Run.with_compute`."""
        assert self.compute != "auto", "choose a dtype first"
        return self.compute

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield a problem if two settings round the same products."""
        if self.qat != "none" and self.products != "compute":
            why = f"precision.products={self.products} rounds the same operands in another way"
            yield "qat", why, "--config.precision.products=compute"
