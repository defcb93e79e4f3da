"""What the backward pass computes again."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxlm.nn.config import REMAT_NAMES, is_remat


def rematerialised(
    function: Callable[..., Any], remat: str, *, looped: bool, mapped: bool = False
) -> Callable[..., Any]:
    """`function` with what its backward pass needs computed again, by the policy's name.

    - none: nothing is; all that the backward pass reads is kept.
    - dots: keeps the results of matrix products of activations and weights.
    - full: keeps the arguments alone.
    - save:attention_out,mlp_out: keeps what it names.
    - offload:layer_in,attention_out: the same, in the memory of the host, from which the backward pass fetches it.

    layer_in is the stream that comes into a layer, which each policy but the last keeps on the device; attention_out and
    mlp_out are what the two parts add to it. Only where a norm follows mlp_out does the backward pass read it.

    Outside of a loop XLA would find the two computations equal and keep the first, so it is told not to look; the
    body of a loop has its own backward loop, where that would only be in the way. Before jax 0.12 nothing makes the second
    wait for the backward pass: on a CPU little memory is freed outside of a loop. `mapped` says that the function is
    run for all stages of a pipeline at once, which gives every product one batch dimension more.

    Raises:
      ValueError: where there is no such policy.
    """
    if not is_remat(remat):
        raise ValueError(
            f"{remat!r} is no remat policy: none, dots, full, or save: or offload: with some of {','.join(REMAT_NAMES)}"
        )
    again = functools.partial(jax.checkpoint, function, prevent_cse=not looped)
    policies = jax.checkpoint_policies
    if remat == "none":
        return function
    if remat == "dots":
        return again(policy=_is_product if mapped else policies.dots_with_no_batch_dims_saveable)
    if remat == "full":
        return again()
    kind, _, names = remat.partition(":")
    saved = names.split(",")
    if kind == "save":
        return again(policy=policies.save_only_these_names(*saved))
    return again(
        policy=policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=saved,
            offload_src="device",
            offload_dst="pinned_host",
        )
    )


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, of which the backward pass keeps the arguments alone: for a few operations, element by element.

    JAX keeps what each of them needs, and a scan over layers stores all that for every layer: three arrays of the
    stream's size for a norm. To compute them again costs less than to write and read them.
    """
    return jax.checkpoint(function, prevent_cse=False)


def _is_product(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """Whether this is a product whose only batch dimension is that of the stages."""
    if primitive is not lax.dot_general_p:
        return False
    _, (batched, _) = parameters["dimension_numbers"]
    return len(batched) <= 1
