"""Settings of the data section.

Example:
  >>> DataConfig(train=("web=a/*.txt", "code=b/*.py"), validation=("5%",)).validation_names
  ['val_web', 'val_code']
"""

import dataclasses
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from jaxlm.core import batch_schedule
from jaxlm.core.config import setting
from jaxlm.core.nearest import nearest_word
from jaxlm.data import formats, mixture_config, record_fields
from jaxlm.data.conversations import PREFERENCES, ROLES, ChatFields, Kind
from jaxlm.data.mixture_config import MixtureConfig, Temperature

TOKENIZERS = (
    "bytes, characters, sentencepiece:SIZE (byte pairs across words), unigram:SIZE, bpe:SIZE "
    "(inside words), wordpiece:SIZE, or a path: .model, tokenizer.json, a run's tokenizer, or the "
    "folder of one of them"
)
SIZED = ("sentencepiece", "unigram", "bpe", "wordpiece")
TOKENIZER_FILES = (".model", ".json", "/tokenizer")
FOLDER_FILES = ("tokenizer.json", "tokenizer", "tokenizer.model")  # of a folder, the first is read
AUTO = "auto"
HELD_OUT = "tail:5%"  # share of data.train, if data.validation is not set
HELD_OUT_RECORDS = "5%"  # of conversations, which are never cut, and of other records
FIND_TOKENIZERS = "find . -name '*.model' -o -name tokenizer -o -name tokenizer.json"
NAMED = re.compile(r"([A-Za-z]\w*)=(.+)")  # NAME=GLOB in an entry of data.train or data.validation


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Input files, tokenizer, packing and reading of training and validation data."""

    train: tuple[str, ...] = setting(
        ("stdlib:train",),
        "folders or globs of text, .jsonl, .parquet or token shards, URLs of such files (https, "
        "s3, gs), or hf:ORG/NAME[@REVISION][/SUBSET][:SPLIT], a data set of the Hugging Face Hub; "
        "FILE.py:FUNCTION, which returns texts or records; "
        "NAME=GLOB for each source of a mixture; stdlib:train is Python's own library",
        names_code=True,
    )
    mixture: MixtureConfig = setting(Temperature(), "share of each source of train")
    validation: tuple[str, ...] = setting(
        (AUTO,),
        "entries as in train, or NAME=GLOB; or a held-out part of train: 5% of its documents, or "
        "tail:10%, the end of each document (one set for each source); auto is stdlib:validation "
        "for stdlib:train, 5% of conversations and of the records of .jsonl, .parquet and hf:, "
        "else tail:5%",
        derived_from="train",
        names_code=True,
    )
    tokenizer: str = setting("sentencepiece:4096", TOKENIZERS)
    kind: Kind = setting(
        "text",
        "text of each record; chat: messages of role and content, or ShareGPT's conversations of "
        "from and value, with tools; completion: prompt and completion, texts or messages. A turn "
        "may have train: false or a weight. Conversations are packed whole. For the objective "
        "preference: pairs: prompt, chosen and rejected, texts or messages, with a margin; "
        "labeled: prompt, completion and label, true or false. For the objective process: steps: "
        "prompt, steps, a list of texts, and labels, true or false for each. For the objective "
        "policy: prompts: "
        "prompt, a text or messages, with answer and info for the reward",
    )
    kinds: tuple[str, ...] = setting(
        (),
        "NAME=KIND of a source of train, or of a validation set, of another kind than data.kind: "
        "text and conversations in one mixture",
    )
    roles: tuple[str, ...] = setting(
        ("assistant",), f"roles whose turns are trained: {', '.join(ROLES)}"
    )
    template: str = setting(
        AUTO,
        "chat template: auto is that of the model in the folder of data.tokenizer, else chatml; "
        "chatml; or a Jinja file",
    )
    overlong: Literal["drop", "left", "error"] = setting(
        "drop",
        "conversations longer than a row: drop leaves them out and counts them; left leaves their "
        "first turns out until they fit; error ends the run",
    )
    text_key: str = setting("text", "field of a record with its text")
    fields: tuple[str, ...] = setting(
        (),
        "NAME=FIELD of records whose fields have other names than data.kind reads: "
        "prompt=question,completion=answer. The names system, user and assistant are turns. FIELD+"
        "FIELD are joined by an empty line",
    )
    max_dropped: float = setting(
        0.001,
        "share of records that may be broken (not JSON, not UTF-8, no text); these are left out "
        "and counted",
        low=0.0,
        high=1.0,
    )
    damaged: Literal["error", "skip"] = setting(
        "error",
        "handling of corrupt token shards: error ends the run; skip gives their tokens zero loss "
        "weight, and warns and counts, up to max_dropped of all tokens",
    )
    sequence: int = setting(256, "sequence length: tokens in a row", unit="tokens", low=1)
    sequence_warmup: tuple[str, ...] = setting(
        (),
        "TOKENS@SPAN: sequence length until SPAN; rows are cut, and the tokens of a step stay the "
        "same. Each phase compiles the step once. For the objectives causal and mtp",
    )
    packing: Literal["concat", "first_fit"] = setting(
        "concat",
        "concat cuts documents at row ends; first_fit keeps documents whole if they fit in a row: "
        "the longest of each window first, into the fullest row with room (best-fit decreasing, "
        "which pads less than the first row)",
    )
    workers: int = setting(0, "worker processes that read rows; 0 reads in threads", low=0)
    prefetch: int = setting(8, "number of batches that are read ahead", unit="batches", low=1)

    @property
    def sources(self) -> dict[str, tuple[str, ...]]:
        """Entries of each training source by name; entries without a name belong to `train`."""
        return _by_name(self.train, "train")

    @property
    def validation_sets(self) -> dict[str, tuple[str, ...]]:
        """Entries of each validation set by name; entries without a name belong to `val`."""
        entries = next((value for _, value, _ in self.derived()), self.validation)
        return _by_name(entries, "val")

    @property
    def validation_names(self) -> list[str]:
        """Names of the validation sets in metrics; a share held out of n sources is n sets."""
        names = []
        for name, patterns in self.validation_sets.items():
            is_share = len(patterns) == 1 and patterns[0].endswith("%") and len(self.sources) > 1
            names += [f"{name}_{source}" for source in self.sources] if is_share else [name]
        return names

    def derived(self) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """Yield (setting, value, reason) for settings that follow from others.

        A run is never validated on text that the user did not name.
        """
        if self.validation != (AUTO,):
            return
        entries = [entry for values in self.sources.values() for entry in values]
        is_cut = not all(map(_has_records, entries))  # a short text has no end of its own
        if any(self.of(name).chat for name in self.sources) or not is_cut:
            reason = f"{HELD_OUT_RECORDS} held out of data.train, as data.validation is not set"
            yield "validation", (HELD_OUT_RECORDS,), reason
        elif self.train == ("stdlib:train",):
            yield "validation", ("stdlib:validation",), ""
        else:
            reason = f"{HELD_OUT} held out of data.train, as data.validation is not set"
            yield "validation", (HELD_OUT,), reason

    @property
    def chat(self) -> ChatFields | None:
        """Form of the records if these are conversations."""
        if self.kind == "text":
            return None
        return ChatFields(self.kind, self.roles, record_fields.parsed(self.fields))

    def of(self, name: str) -> "DataConfig":
        """Return the section as it is for one source or validation set: with the kind of that."""
        kind = mixture_config.entries(self.kinds).get(name, self.kind)
        return dataclasses.replace(self, kind=kind)  # type: ignore[arg-type]

    @property
    def answers(self) -> str:
        """The kind if the data is answers that were compared or judged; empty for other data."""
        return self.kind if self.kind in PREFERENCES else ""

    @property
    def has_prompts(self) -> bool:
        """If the data is prompts, whose answers are sampled."""
        return self.kind == "prompts"

    @property
    def has_chats(self) -> bool:
        """If a source or a validation set is conversations."""
        return any(self.of(name).chat for name in (*self.sources, *self.validation_sets))

    def _kind_problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield a problem for an entry of `kinds` that names no set, or no kind."""
        names = [*self.sources, *self.validation_sets]
        kinds = get_args(Kind)
        by_name = mixture_config.entries(self.kinds)
        for name, kind in by_name.items():
            if name in names and kind in kinds and len(by_name) == len(self.kinds):
                continue
            why = f"{name}={kind} names no source; there is {', '.join(names)}"
            if name in names:
                why = f"{kind!r} of {name} is none of: {', '.join(kinds)}"
            if len(by_name) < len(self.kinds):
                why = "a source is named twice"
            usable = {n: k for n, k in by_name.items() if n in names and k in kinds}
            shown = ",".join(f"{n}={k}" for n, k in usable.items())
            nearest = nearest_word(name, names) or names[0]
            yield "kinds", why, f"--config.data.kinds={shown or f'{nearest}=text'}"
            return

    def _chat_problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield a problem for each setting that conversations exclude."""
        if unknown := [role for role in self.roles if role not in ROLES]:
            why = f"{unknown[0]!r} is none of: {', '.join(ROLES)}"
            yield "roles", why, "--config.data.roles=assistant"
        elif not self.roles:
            yield "roles", "no role is trained", "--config.data.roles=assistant"
        yield from self._kind_problems()
        others = {self.of(name).kind for name in (*self.sources, *self.validation_sets)}
        yield from record_fields.problems(
            self.fields, [each for each in get_args(Kind) if each in others]
        )
        if not self.has_chats:
            return
        if others & {*PREFERENCES, "prompts"} and others != {self.kind}:
            why = "prompts, and answers that were compared or judged, are mixed with no other kind"
            same = [e for e in self.train if self.of(e.partition("=")[0]).kind == self.kind]
            entries = ",".join(same or self.train)
            yield "train", why, f"--config.data.train={entries} '--config.data.kinds=()'"
        if self.train == ("stdlib:train",):
            why = f"stdlib:train is text, and data.kind is {self.kind}"
            yield "train", why, f"--config.data.train={self.kind}.jsonl\n--config.data.kind=text"
        if any("tail:" in entry for entry in self.validation):
            why = "the end of a conversation is no conversation"
            yield "validation", why, f"--config.data.validation={HELD_OUT_RECORDS}"
        if self.sequence_warmup:
            why = "shorter rows would cut conversations"
            yield "sequence_warmup", why, "'--config.data.sequence_warmup=()'"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokenizer", file_of_tokenizer(self.tokenizer))

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Yield (setting, why, fix) for each invalid setting."""
        yield from self._chat_problems()
        kind, _, size = self.tokenizer.partition(":")
        if kind in SIZED and not (size.isdigit() and int(size) >= 512):
            why = f"{self.tokenizer!r} needs a vocabulary of at least 512"
            yield "tokenizer", why, "jaxlm config explain data.tokenizer"
        elif kind not in ("bytes", "characters", *SIZED) and not self.tokenizer.endswith(
            TOKENIZER_FILES
        ):
            why = unknown_tokenizer(self.tokenizer)
            yield "tokenizer", why, near_tokenizer("data.tokenizer", self.tokenizer)
        yield from self._uncut()
        if not self.train:
            example = "stdlib:train" if self.kind == "text" else f"{self.kind}.jsonl"
            yield "train", "nothing to read", f"--config.data.train={example}"
        sources = self.sources
        if len(sources) > 1 and "train" in sources:
            why = (
                f"{sources['train'][0]!r} has no name, but other sources have; 'train' names them "
                "all"
            )
            yield "train", why, f"--config.data.train={','.join(_named(self.train))}"
        else:
            named = list(sources) if "train" not in sources else []
            yield from mixture_config.problems(self.mixture, named)
        names = self.validation_names
        if twice := sorted({name for name in names if names.count(name) > 1}):
            why = f"two validation sets would have the name {twice[0]}"
            yield "validation", why, "--config.data.validation=5%"
        if "train" in self.validation_sets:
            yield (
                "validation",
                "metrics use the name train for the training data; name the validation set "
                "differently",
                "--config.data.validation="
                + ",".join(re.sub("^train=", "held=", entry) for entry in self.validation),
            )
        shares = [entry for entry in self.validation if entry.endswith("%")]
        if len(shares) > 1:
            why = f"{' and '.join(shares)}: only one share can be held out of train"
            yield "validation", why, f"--config.data.validation={shares[0]}"
        for share in shares:
            amount = share.rpartition("=")[2].removeprefix("tail:").removesuffix("%")
            if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", amount) or not 0 < float(amount) < 100:
                why = f"{share!r} is not a share above 0% and below 100%"
                yield "validation", why, "--config.data.validation=5%"

    def _uncut(self) -> Iterator[tuple[str, str, str]]:
        """Yield a problem unless warm-up lengths grow and divide the sequence length."""
        try:
            lengths = [batch_schedule.parse(entry)[0] for entry in self.sequence_warmup]
        except ValueError as error:
            yield "sequence_warmup", str(error), "'--config.data.sequence_warmup=()'"
            return
        is_growing = all(a < b for a, b in itertools.pairwise([0, *lengths, self.sequence]))
        if not is_growing or any(self.sequence % length for length in lengths):
            yield (
                "sequence_warmup",
                f"the lengths {', '.join(map(str, lengths))} must grow and divide {self.sequence}",
                f"--config.data.sequence_warmup={self.sequence // 4}@10%,{self.sequence // 2}@20%"
                if self.sequence % 4 == 0
                else "'--config.data.sequence_warmup=()'",
            )


def file_of_tokenizer(text: str) -> str:
    """Return the tokenizer file of a folder, such as a run or a folder of transformers.

    Any other value, and a folder without such a file, is returned as it is.
    """
    is_kind = text.partition(":")[0] in ("", "bytes", "characters", *SIZED)
    if is_kind or not os.path.isdir(text):  # `Path.is_dir` raises for a name that is too long
        return text
    files = (Path(text) / name for name in FOLDER_FILES)
    return next((str(file) for file in files if file.is_file()), text)


def unknown_tokenizer(text: str) -> str:
    """Return why a value is refused that names no kind of tokenizer, and no file of one."""
    if text and Path(text).is_dir():
        return f"the folder {text} has no {', '.join(FOLDER_FILES[:-1])} or {FOLDER_FILES[-1]}"
    return f"{text!r} is none of: {TOKENIZERS}"


def near_tokenizer(path: str, text: str) -> str:
    """Return the flag of the nearest tokenizer kind, or a command that lists the kinds."""
    kind, colon, size = text.partition(":")
    meant = nearest_word(kind, SIZED if colon else ("bytes", "characters"))
    return f"--config.{path}={meant}{colon}{size}" if meant else f"jaxlm config explain {path}"


def _has_records(entry: str) -> bool:
    """Return whether the name of an entry of data.train is that of records."""
    return entry.startswith("hf:") or formats.kind_of(entry) in formats.FORMATS


def _by_name(entries: tuple[str, ...], default: str) -> dict[str, tuple[str, ...]]:
    sets: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        match = NAMED.fullmatch(entry)
        name, pattern = (match[1], match[2]) if match else (default, entry)
        sets[name] = (*sets.get(name, ()), pattern)
    return sets


def _named(entries: tuple[str, ...]) -> list[str]:
    """Give entries without a name the source name `other`."""
    return [entry if NAMED.fullmatch(entry) else f"other={entry}" for entry in entries]
