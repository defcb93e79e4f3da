"""Published config.json files of models are read, to their last attribute."""

import json
from pathlib import Path

import pytest

from jaxlm.checkpoint import hub_architecture
from jaxlm.core.errors import DataError, JaxlmError
from jaxlm.models.cost import model_cost

PUBLISHED = Path(__file__).parent / "published.jsonl"
TABLE = [json.loads(line) for line in PUBLISHED.read_text().splitlines()]


class Described:
    """A folder whose config.json alone is read."""

    def __init__(self, attributes):
        self.path, self.config = Path("model"), attributes

    def tensors(self):
        return {}


@pytest.mark.few(16)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["name"])
def test_a_published_config_is_understood_and_has_as_many_parameters_as_the_model(row):
    family, _ = hub_architecture.read_family(Described(row["attributes"]), lambda _: None)
    assert model_cost.parameters(family.build()) == row["parameters"]


@pytest.mark.few(12)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["name"])
def test_one_attribute_more_is_refused_by_its_name(row):
    attributes = row["attributes"] | {"residual_multiplier": 0.22}
    with pytest.raises(DataError) as caught:
        hub_architecture.read_family(Described(attributes), lambda _: None)
    assert caught.value.why == "residual_multiplier = 0.22 is not known"


LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.5] * 48}
OF_128K = {"max_position_embeddings": 131_072, "rope_scaling": LONG}


def described(name, **changed):
    (row,) = (row for row in TABLE if row["name"] == name)
    return hub_architecture.read_family(Described(row["attributes"] | changed), lambda _: None)[0]


def test_phi_3_of_128k_has_frequencies_of_its_own_for_what_goes_beyond_4096_tokens():
    scaling = described("phi-3-mini-4k", **OF_128K).rope_scaling
    assert (scaling.original, scaling.factor, scaling.long) == (4096, 32, (2.5,) * 48)
    assert scaling.amplitude == pytest.approx(1.19024, rel=1e-5)  # sqrt(1 + ln 32 / ln 4096)
    attributes = {"rope_type": "longrope", "original_max_position_embeddings": 4096} | LONG
    del attributes["type"]
    newer = {
        "max_position_embeddings": 131_072,
        "rope_parameters": attributes,
        "rope_scaling": None,
    }
    assert described("phi-3-mini-4k", **newer).rope_scaling == scaling


@pytest.mark.parametrize(
    ("name", "scaling", "why"),
    [
        ("phi-3-mini-4k", {"long_factor": [1.0] * 47}, "it has 47 numbers, and 48 frequencies"),
        ("phi-3-mini-4k", {"long_factor": [0.0] * 48}, "a list of numbers above 0"),
        ("phi-3-mini-4k", {"attention_factor": 1.0}, "attention_factor = 1.0, and None or 1.19"),
        ("llama-3-8b", {}, "type = 'longrope', and 'default' or 'linear' or"),
    ],
)
def test_frequencies_that_are_not_computed_are_refused(name, scaling, why):
    with pytest.raises(JaxlmError) as caught:
        described(name, **OF_128K | {"rope_scaling": LONG | scaling})
    assert why in caught.value.why


def test_norms_of_queries_and_keys_with_a_scale_per_head_are_refused_by_name():
    """Command-R+ has them."""
    with pytest.raises(DataError) as caught:
        described("command-r-v01", use_qk_norm=True)
    assert caught.value.why == "use_qk_norm = True, and False is what jaxlm computes"
