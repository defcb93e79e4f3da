"""Web text as FineWeb and C4 clean it: English prose, each page once.

It needs jaxlm[prepare], and jaxlm[parquet] for .parquet.

    jaxlm data run --config=data/clean_text --config.source='crawl/*.warc.gz' --out=clean
    jaxlm data run --config=data/clean_text --config.source='crawl/*.warc.gz' --sample=1% \
      --out=preview

With --config.shards.tokenizer=sentencepiece:32768 the same command also makes token shards, in
clean/shards.

On many machines that share the folders, with jaxlm[prepare,ray] on each: `ray start --head` on one,
`ray start --address=THAT_ONE:6379` on the others, then on the first the first line with
--engine=ray --workers=THEIR_CORES.

Hardware: CPU cores, 1 GiB of memory each, and 2 kB a document in the process that compares them.
scripts/LOG.md has the speed. Expect a few percent of the pages of a raw crawl to stay.
"""

import ml_collections

from jaxlm.core import config
from jaxlm.corpus.config import Recipe


def get_config() -> ml_collections.ConfigDict:
    c = config.new(Recipe)
    c.source = ("texts/*.jsonl",)
    c.stages = (
        "mojibake",
        "normalize",
        "length",
        "language",
        "gopher",
        "repetition",
        "c4",
        "fineweb",
        "pii",
    )
    c.pii.kinds = (*c.pii.kinds, "national_id")
    c.dedup = ("exact", "near", "spans")
    return c
