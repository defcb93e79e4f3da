"""A model of Hugging Face's form, opened on one device; what scripts that compare share."""

from typing import Any

import jax

from jaxlm.checkpoint import hub_architecture
from jaxlm.checkpoint.hub_folder import ModelSource
from jaxlm.checkpoint.hub_tensors import layout
from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.recipes.exchange import import_model


def opened(source: ModelSource, precision: Precision) -> tuple[Blueprint, Any]:
    """The model and its parameters."""
    family, _ = hub_architecture.read_family(source, lambda _: None)
    decoder = family.build()
    blueprint = Blueprint(decoder, precision)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), blueprint.shapes
    )
    with source.opened() as fetch:
        tensors = hub_architecture.in_folder_names(layout(decoder, family.HUB), source, family.HUB)
        return blueprint, import_model.load(tensors, fetch, placed)
