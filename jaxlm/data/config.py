"""Settings of data."""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Literal

from jaxlm.core import batch_schedule
from jaxlm.core.config import setting
from jaxlm.core.spelling import nearest
from jaxlm.data import mixture_config
from jaxlm.data.mixture_config import Mixture, Temperature

TOKENIZERS = (
    "bytes, characters, sentencepiece:SIZE (byte pairs across words), unigram:SIZE, bpe:SIZE (inside words), wordpiece:SIZE, "
    "or a path: .model, tokenizer.json, or a run's tokenizer"
)
SIZED = ("sentencepiece", "unigram", "bpe", "wordpiece")
TOKENIZER_FILES = (".model", ".json", "/tokenizer")
AUTO = "auto"
HELD_OUT = "tail:5%"  # of data.train, if data.validation is not set
FIND_TOKENIZERS = "find . -name '*.model' -o -name tokenizer -o -name tokenizer.json"
NAMED = re.compile(r"([A-Za-z]\w*)=(.+)")  # of an entry: a set's name, and what is in it


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, how it becomes tokens, and how tokens become rows."""

    train: tuple[str, ...] = setting(
        ("stdlib:train",),
        "globs of text, .jsonl, .parquet or token shards, or NAME=GLOB for each source of a mixture; stdlib:train is Python's own library",
    )
    mixture: Mixture = setting(Temperature(), "how often each source of train is read")
    validation: tuple[str, ...] = setting(
        (AUTO,),
        "globs, or NAME=GLOB; or what is held out of train: 5% of its documents, or tail:10%, the end of each document "
        "(of several sources, each has a set of its own); auto is stdlib:validation for stdlib:train, else tail:5%",
        derived_from="train",
    )
    tokenizer: str = setting("sentencepiece:4096", TOKENIZERS)
    text_key: str = setting("text", "field of a record that holds its text")
    max_dropped: float = setting(
        0.001,
        "share of records that may be broken: not JSON, not UTF-8, without a text; they are left out and counted",
        low=0.0,
        high=1.0,
    )
    damaged: Literal["error", "skip"] = setting(
        "error",
        "tokens for training that turn out damaged as they are read end the run; or they weigh nothing, are told and counted, "
        "up to max_dropped of all",
    )
    sequence: int = setting(256, "tokens in a row", unit="tokens", low=1)
    sequence_warmup: tuple[str, ...] = setting(
        (),
        "TOKENS@SPAN: rows are cut into pieces of so many tokens until then, and a step has as many tokens as ever. Each stage compiles the step once. For the objectives causal and mtp",
    )
    packing: Literal["concat", "first_fit"] = setting(
        "concat",
        "concat cuts documents at row ends; first_fit keeps whole those that fit in a row: of each window the longest first, "
        "each into the fullest row with room for it (best-fit decreasing, which pads less than taking the first row)",
    )
    workers: int = setting(0, "processes that read rows; 0 reads in threads of this one", low=0)
    prefetch: int = setting(8, "batches that are read ahead", unit="batches", low=1)

    @property
    def sources(self) -> dict[str, tuple[str, ...]]:
        """The entries of each source of the training data, by its name; without one they are those of `train`."""
        return _by_name(self.train, "train")

    @property
    def validation_sets(self) -> dict[str, tuple[str, ...]]:
        """The entries of each validation set, by its name; without one they are those of `val`."""
        entries = next((value for _, value, _ in self.derived()), self.validation)
        return _by_name(entries, "val")

    @property
    def validation_names(self) -> list[str]:
        """The names of the sets, as metrics have them: a share that is held out of several sources is one of each."""
        names = []
        for name, patterns in self.validation_sets.items():
            is_share = len(patterns) == 1 and patterns[0].endswith("%") and len(self.sources) > 1
            names += [f"{name}_{source}" for source in self.sources] if is_share else [name]
        return names

    def derived(self) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """Yield (setting, value, reason) of what follows from the other settings.

        A run is never validated on text that the user did not name.
        """
        if self.validation != (AUTO,):
            return
        if self.train == ("stdlib:train",):
            yield "validation", ("stdlib:validation",), ""
        else:
            reason = f"{HELD_OUT} held out of data.train, as data.validation is not set"
            yield "validation", (HELD_OUT,), reason

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """The tokenizer is one of those there are, and something is read."""
        kind, _, size = self.tokenizer.partition(":")
        if kind in SIZED and not (size.isdigit() and int(size) >= 512):
            yield (
                "tokenizer",
                f"{self.tokenizer!r} needs a vocabulary of at least 512",
                "jaxlm config explain data.tokenizer",
            )
        elif kind not in ("bytes", "characters", *SIZED) and not self.tokenizer.endswith(
            TOKENIZER_FILES
        ):
            yield (
                "tokenizer",
                f"{self.tokenizer!r} is none of: {TOKENIZERS}",
                near_tokenizer("data.tokenizer", self.tokenizer),
            )
        yield from self._uncut()
        if not self.train:
            yield "train", "nothing to read", "--config.data.train=stdlib:train"
        sources = self.sources
        if len(sources) > 1 and "train" in sources:
            yield (
                "train",
                f"{sources['train'][0]!r} has no name, and other sources have; train is the name of them all",
                f"--config.data.train={','.join(_named(self.train))}",
            )
        else:
            named = list(sources) if "train" not in sources else []
            yield from mixture_config.problems(self.mixture, named)
        names = self.validation_names
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield (
                "validation",
                f"{twice[0]} would be the name of two sets",
                "--config.data.validation=5%",
            )
        if "train" in self.validation_sets:
            yield (
                "validation",
                "train is what metrics call the training data; a validation set has another name",
                "--config.data.validation="
                + ",".join(re.sub("^train=", "held=", entry) for entry in self.validation),
            )
        shares = [entry for entry in self.validation if entry.endswith("%")]
        if len(shares) > 1:
            yield (
                "validation",
                f"{' and '.join(shares)}: one share can be held out of train",
                f"--config.data.validation={shares[0]}",
            )
        for share in shares:
            amount = share.rpartition("=")[2].removeprefix("tail:").removesuffix("%")
            if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", amount) or not 0 < float(amount) < 100:
                yield (
                    "validation",
                    f"{share!r} is not a share above 0% and below 100%",
                    "--config.data.validation=5%",
                )

    def _uncut(self) -> Iterator[tuple[str, str, str]]:
        """Lengths of a warm-up grow to that of a row, each a part of it."""
        try:
            lengths = [batch_schedule.parse(entry)[0] for entry in self.sequence_warmup]
        except ValueError as error:
            yield "sequence_warmup", str(error), "'--config.data.sequence_warmup=()'"
            return
        is_growing = all(a < b for a, b in itertools.pairwise([0, *lengths, self.sequence]))
        if not is_growing or any(self.sequence % length for length in lengths):
            yield (
                "sequence_warmup",
                f"{', '.join(map(str, lengths))} tokens are not growing parts of a row of {self.sequence}",
                f"--config.data.sequence_warmup={self.sequence // 4}@10%,{self.sequence // 2}@20%"
                if self.sequence % 4 == 0
                else "'--config.data.sequence_warmup=()'",
            )


def near_tokenizer(path: str, text: str) -> str:
    """Return the flag of the tokenizer that a misspelt one means, its size kept, or what there is."""
    kind, colon, size = text.partition(":")
    meant = nearest(kind, (*(SIZED if colon else ()), *(() if colon else ("bytes", "characters"))))
    return f"--config.{path}={meant}{colon}{size}" if meant else f"jaxlm config explain {path}"


def _by_name(given: tuple[str, ...], default: str) -> dict[str, tuple[str, ...]]:
    sets: dict[str, tuple[str, ...]] = {}
    for entry in given:
        match = NAMED.fullmatch(entry)
        name, pattern = (match[1], match[2]) if match else (default, entry)
        sets[name] = (*sets.get(name, ()), pattern)
    return sets


def _named(given: tuple[str, ...]) -> list[str]:
    """The entries, those without a name as the source `other`."""
    return [entry if NAMED.fullmatch(entry) else f"other={entry}" for entry in given]
