"""Situations of the command line and of data preparation, whose fixes `test_fix_lines` pastes."""

import errno
import fcntl
import os
import sys
import tempfile

import pytest

from tests.house.situation import RUN, SHORT, Situation

DATA_RUN = "data run --config=r.py --out=out"
DATA_MIX = "data mix --config.sources=a=clean --config.tokenizer=bytes"
# An untrained classifier of two labels: both are as likely for every text.
CLASSIFIER = f"""{sys.executable} -c '
import pathlib
import numpy
from jaxlm.corpus.filters.linear import Features, LinearClassifier
features = Features(buckets=8, run=1)
weights, biases = numpy.zeros((8, 2), numpy.float32), numpy.zeros(2, numpy.float32)
linear = LinearClassifier(("good", "bad"), features, weights, biases)
pathlib.Path("classifier").mkdir()
linear.write(pathlib.Path("classifier"), {{}})
'"""


class _Lock:
    """The lock of an output folder, held until this object is gone."""

    def __init__(self, path: str):
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __del__(self):
        os.close(self.handle)


def _in_use(patch: pytest.MonkeyPatch) -> None:
    """Another process writes to the folder `clean`."""
    from jaxlm.corpus import run

    patch.setattr(run, "lock_of_another", _Lock(f"clean/{run.LOCK}"), raising=False)


def _no_room(patch: pytest.MonkeyPatch) -> None:
    """The disk of temporary files is full."""

    class Full(tempfile.SpooledTemporaryFile):
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(tempfile, "TemporaryFile", Full)


SITUATIONS: dict[str, Situation] = {
    # the command line
    "steps that are no numbers": Situation(f"average {RUN} --steps=1,last --out=averaged"),
    "a bench to compare with that is not there": Situation(
        "bench --sizes=0.8M --compare=b.json", more="--seconds=0.01"
    ),
    "a bench to compare with that is none": Situation(
        "bench --sizes=0.8M --compare=c.py", more="--seconds=0.01"
    ),
    "memory of no GPU": Situation("plan --config=c.py --memory=24GB"),
    "a tokenizer inside a file": Situation("tokenizer train --config=c.py --out=c.py/t"),
    # data run
    "an output folder that is a file": Situation(DATA_RUN, "touch out"),
    "an output folder of something else": Situation("data run --config=r.py --out=exported"),
    "an output folder in use": Situation("data run --config=r.py --out=clean", prepare=_in_use),
    "an earlier run that looked for less": Situation(
        f"{DATA_RUN} --config.against=clean --config.dedup=exact,near"
    ),
    "an earlier run that looked for nothing": Situation(
        f"{DATA_RUN} --config.against=clean --config.dedup=near"
    ),
    "an earlier run with other settings": Situation(
        f"{DATA_RUN} --config.against=clean --config.dedup=near --config.near.rows=4 "
        "--config.near.bands=5",
        'sed -i \'s/"exact"/"near"/\' clean/recipe.json',
    ),
    "evaluation sets of short records": Situation(
        f"{DATA_RUN} --config.stages=decontaminate --config.decontaminate.against=e.txt",
        "echo three short words > e.txt",
    ),
    "evaluation sets without words": Situation(
        f"{DATA_RUN} --config.stages=decontaminate --config.decontaminate.against=e.txt",
        "echo ... > e.txt",
    ),
    "a label misspelt": Situation(
        f"{DATA_RUN} --config.stages=quality --config.quality.model=classifier "
        "--config.quality.label=godo",
        CLASSIFIER,
    ),
    "a label like none": Situation(
        f"{DATA_RUN} --config.stages=quality --config.quality.model=classifier "
        "--config.quality.label=fine",
        CLASSIFIER,
    ),
    "a harmless label misspelt": Situation(
        f"{DATA_RUN} --config.stages=harmful --config.harmful.model=classifier "
        "--config.harmful.harmless=goood",
        CLASSIFIER,
    ),
    "next of data run with more rules": Situation(
        f"{DATA_RUN} --config.stages=length,repetition --config.repetition.top=1,1,1 "
        "--config.repetition.repeated=1,1,1,1,1,1 --config.dedup=near --config.near.bands=64 "
        "--config.near.rows=1 --config.near.words=1 --config.near.jaccard=0.1",
        code=0,
        more=SHORT,
    ),
    # stores of objects
    "a URL of no file": Situation(f"{DATA_RUN} --config.source=file://none/*.txt"),
    "a chain of file systems": Situation(
        f"{DATA_RUN} --config.source=texts/1*.txt,simplecache::file://texts/2*.txt"
    ),
    "a chain of file systems to copy to": Situation(f"{DATA_RUN} --copy_to=simplecache::copied"),
    "a full disk of temporary files": Situation(
        f"{DATA_RUN} --config.source=file://texts/*.txt", prepare=_no_room
    ),
    "a copy over something else": Situation(
        f"{DATA_RUN} --copy_to=copied", "mkdir copied; echo {} > copied/report.json"
    ),
    "a copy of shards over something else": Situation(
        f"{DATA_RUN} --config.shards.tokenizer=bytes --copy_to=copied/shards",
        "mkdir -p copied/shards/shards; echo {} > copied/shards/shards/mix.json",
    ),
    # token shards
    "a mix into a file": Situation(f"{DATA_MIX} --out=out", "touch out"),
    "a mix into something else": Situation(f"{DATA_MIX} --out=texts"),
    "a mix that holds out all": Situation(f"{DATA_MIX} --config.held_out=0.9999 --out=out"),
    "a mix with a larger vocabulary than its text": Situation(
        "data mix --config.sources=a=clean --config.tokenizer=sentencepiece:40000 --out=out"
    ),
    "a mix with a tokenizer file misspelt": Situation(
        "data mix --config.sources=a=clean --config.tokenizer=mixed/tok.json --out=out",
        "echo {} > mixed/toks.json",
    ),
    "licences of no source": Situation(f"{DATA_MIX} --config.licences=web=MIT --out=out"),
    "weights of a mix with a name misspelt": Situation(
        "data mix --config.sources=code=clean,notes=other --config.tokenizer=bytes "
        "--config.weights=code=0.2,note=0.8 --out=out",
        "cp -r clean other",
    ),
    "clusters of a corpus in the making": Situation("data clusters clean", "rm clean/report.json"),
    "shards that hold out all": Situation(
        "data run --config=r.py --out=clean --config.shards.tokenizer=bytes "
        "--config.shards.held_out=0.9999"
    ),
    "shards of another mix": Situation(
        "data run --config=r.py --out=clean --config.shards.tokenizer=bytes "
        "--config.shards.held_out=0.2",
        "mkdir clean/shards; echo {} > clean/shards/recipe.json",
    ),
    "shards with a larger vocabulary than the text": Situation(
        "data run --config=r.py --out=clean --config.shards.tokenizer=sentencepiece:40000 "
        "--config.shards.held_out=0.2"
    ),
}

# Of these, the ones that take long: each measures a size for the time of a compilation.
SLOW: set[str] = {
    "a bench to compare with that is not there",
    "a bench to compare with that is none",
}

# Places whose lines are pasted by another test: PLACE -> tests/FILE::TEST.
ELSEWHERE: dict[str, str] = {
    "cli/data.py:_classified:1": "tests/recipes/"
    "test_train_classifier.py::test_what_comes_next_works_when_it_is_pasted",
}

# Places that no test reaches yet.
NOT_YET: set[str] = set()
