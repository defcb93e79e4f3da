"""The config.json of models that people have, attribute by attribute as they were published, is read to the last one."""

import json
from pathlib import Path

import pytest

from jaxlm.core.errors import DataError
from jaxlm.models import cost
from jaxlm.recipes import foreign

PUBLISHED = Path(__file__).parent / "published.jsonl"
TABLE = [json.loads(line) for line in PUBLISHED.read_text().splitlines()]


class Described:
    """A folder of which config.json alone is looked at."""

    def __init__(self, attributes):
        self.path, self.config = Path("model"), attributes

    def tensors(self):
        return {}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["name"])
def test_a_published_config_is_understood_and_has_as_many_parameters_as_the_model(row):
    family, _ = foreign.described(Described(row["attributes"]), lambda _: None)
    assert cost.parameters(family.build()) == row["parameters"]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["name"])
def test_one_attribute_more_is_refused_by_its_name(row):
    attributes = row["attributes"] | {"residual_multiplier": 0.22}
    with pytest.raises(DataError) as caught:
        foreign.described(Described(attributes), lambda _: None)
    assert caught.value.why == "residual_multiplier = 0.22 is not known"
