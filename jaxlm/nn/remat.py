"""Rematerialization: activations that the backward pass computes again."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxlm.nn.config import REMAT_NAMES, is_remat

RESULT = "adapted_result"


def rematerialize(
    function: Callable[..., Any], remat: str, *, looped: bool, mapped: bool = False
) -> Callable[..., Any]:
    """Wrap `function` so that its backward pass recomputes activations by a policy.

    - none: stores all activations that the backward pass reads.
    - dots: stores the results of matrix products of activations and weights; of a layer with an
      adapter the result with its update, see `stored_result`.
    - full: stores the arguments only.
    - save:attention_out,mlp_out: stores the named arrays.
    - offload:layer_in,attention_out: stores the named arrays in host memory.

    layer_in is the stream that enters a layer, which every policy but offload stores on the
    device; attention_out and mlp_out are the outputs of the two parts. The backward pass reads
    mlp_out only if a norm follows it.

    Outside of a loop (`looped` false) CSE would merge both computations and is prevented; the
    body of a loop has its own backward loop. Before jax 0.12 nothing delays the second computation
    until the backward pass: on a CPU little memory is freed outside of a loop. `mapped` means that
    the function runs for all pipeline stages at once, which adds a batch dimension to each
    product. Raises ValueError for an unknown policy.
    """
    if not is_remat(remat):
        raise ValueError(
            f"{remat!r} is no remat policy: none, dots, full, or save: or offload: with some of "
            f"{','.join(REMAT_NAMES)}"
        )
    checkpoint = functools.partial(jax.checkpoint, function, prevent_cse=not looped)
    policies = jax.checkpoint_policies
    if remat == "none":
        return function
    if remat == "dots":
        is_saved = _is_product if mapped else policies.dots_with_no_batch_dims_saveable
        named = policies.save_only_these_names(RESULT)
        return checkpoint(policy=policies.save_from_both_policies(is_saved, named))
    if remat == "full":
        return checkpoint()
    kind, _, names = remat.partition(":")
    if kind == "save":
        return checkpoint(policy=policies.save_only_these_names(*names.split(",")))
    return checkpoint(
        policy=policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=names.split(","),
            offload_src="device",
            offload_dst="pinned_host",
        )
    )


def stored_result(x: Array) -> Array:
    """Mark a sum of products: `dots` stores it, and not the products if nothing else reads them."""
    return checkpoint_name(x, RESULT)


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a few elementwise operations so that only their arguments are stored.

    By default a scan over layers stores the operands of each operation: three arrays of the
    stream's size for a norm. To recompute them costs less than to write and read them.
    """
    return jax.checkpoint(function, prevent_cse=False)


def _is_product(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """Return whether this is a product whose only batch dimension is that of the stages."""
    if primitive is not lax.dot_general_p:
        return False
    _, (batched, _) = parameters["dimension_numbers"]
    return len(batched) <= 1
