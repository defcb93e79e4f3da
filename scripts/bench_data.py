"""Speed of text to rows: tokenizing, packing and reading on one core, and the loader's wait.

    python scripts/bench_data.py
    python scripts/bench_data.py --tokenizer=bytes --sequence=2048 --rate=1e6 --json

On the source of Python's standard library. Speeds are of processor time, all threads together, so
other programs take little from them. The consumer computes nothing: it idles for as long as a
device that takes `--rate` tokens a second would compute, so its waits are the loader's.
"""

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxlm.data import dataset, packing, parts, writer
from jaxlm.data.config import DataConfig
from jaxlm.data.loader import Loader
from jaxlm.data.records import LeftOut

ROWS, WARM = 8, 5
# Ten times what `jaxlm train --config=configs/quickstart.py` takes on two cores.
RATE = 40_000.0


def measure(config: DataConfig, rate: float, seconds: float) -> dict[str, Any]:
    """MB of text a second on a core by stage, and the waiting share of a consumer.

    The consumer takes `rate` tokens a second.
    """
    encoder = dataset.open_tokenizer(config)
    train, _ = parts.find_parts(config)
    documents = [document for part in train for document in part.documents(LeftOut())]
    size = sum(len(document.text.encode()) for document in documents)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizing, shards = _timed(
            lambda: writer.write(folder / "shards", documents, encoder, LeftOut())
        )

        def pack(kind: packing.Packing) -> packing.PackingPlan:
            return packing.open_plan(shards, config.sequence, kind, 0, folder / kind)

        kinds: tuple[packing.Packing, ...] = ("concat", "first_fit")
        timed = [_timed(functools.partial(pack, kind)) for kind in kinds]
        packs, plans = zip(*timed, strict=True)
        loader = Loader(shards, plans[0], config.sequence, 0, config.workers, config.prefetch)
        loader.at(0, batch=ROWS, rows=slice(0, ROWS))  # imports
        reading, _ = _timed(
            lambda: [loader.at(step, batch=ROWS, rows=slice(0, ROWS)) for step in range(200)]
        )
        waited = _waited(loader, rate, seconds)
    per_token = size / shards.manifest.tokens / 1e6
    return {
        "megabytes": size / 1e6,
        "tokens": shards.manifest.tokens,
        "tokenize_mb_per_second": size / 1e6 / tokenizing,
        "pack_concat_mb_per_second": size / 1e6 / packs[0],
        "pack_first_fit_mb_per_second": size / 1e6 / packs[1],
        "tokenize_and_pack_mb_per_second": size / 1e6 / (tokenizing + max(packs)),
        "read_mb_per_second": 200 * ROWS * config.sequence * per_token / reading,
        "rate": rate,
        "waited": waited,
    }


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.process_time()
    result = work()
    return time.process_time() - begun, result


def _waited(loader: Loader, rate: float, seconds: float) -> float:
    """The share of its time that a consumer waits, once the first batches are there."""
    stream = loader.batches(0, batch=ROWS)
    pause = ROWS * loader.sequence / rate
    for _ in range(WARM):
        next(stream)
    waited = 0.0
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        asked = time.perf_counter()
        next(stream)
        waited += time.perf_counter() - asked
        time.sleep(pause)
    total = time.perf_counter() - begun
    stream.close()  # type: ignore[attr-defined]
    return waited / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", default="sentencepiece:4096")
    parser.add_argument("--sequence", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--rate", type=float, default=RATE, metavar="TOKENS_PER_SECOND")
    parser.add_argument("--seconds", type=float, default=10.0, help="for which batches are taken")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = DataConfig(tokenizer=args.tokenizer, sequence=args.sequence)
    figures = measure(config, args.rate, args.seconds)
    if args.json:
        print(json.dumps(figures))
        return
    print(f"{figures['megabytes']:.1f} MB of text, {figures['tokens']:,} tokens; MB/s on one core:")
    for stage in ("tokenize", "pack_concat", "pack_first_fit", "tokenize_and_pack", "read"):
        print(f"  {stage:<20}{figures[f'{stage}_mb_per_second']:>10.1f}")
    print(f"at {args.rate:,.0f} tokens/s a consumer waits {figures['waited']:.2%} of its time")


if __name__ == "__main__":
    main()
