"""Python's own library as clean source code: what parses, once, without personal data.

    jaxlm data run --config=data/clean_stdlib --out=clean

Hardware: one CPU core, 0.3 GiB of memory. Minutes: about one. Expect about nine in ten files to
stay; most that are removed are short. To train on the rest:

    jaxlm train --config=quickstart --config.data.train='clean/kept/*.jsonl'
"""

import ml_collections

from jaxlm.core import config
from jaxlm.corpus.config import Recipe


def get_config() -> ml_collections.ConfigDict:
    c = config.new(Recipe)
    c.source = ("stdlib:train", "stdlib:validation")
    c.unit_bytes = 2**22
    c.stages = ("normalize", "length", "code", "pii")
    c.dedup = ("exact", "near")
    c.pii.kinds = (
        "email",
        "card",
        "iban",
        "key",
    )  # code is full of numbers that look like the others
    return c
