"""Situations of stored teachers and of students, whose fixes `test_fix_lines` pastes."""

import os
import sys

from jaxlm.data import teacher
from jaxlm.recipes.use import teach
from tests.house.situation import CONFIG, RUN, Situation
from tests.house.situations_recipes import SMALL, trained

TAUGHT = f"{sys.executable} -m jaxlm teach {RUN} --config=c.py --out=taught --quiet >&2"
STORED = "--config.objective.name=distill --config.objective.stored=taught"
TEACH = f"teach {RUN} --config=c.py --out=new"
ENCODER = trained("encoder", f"--config.model.family=bert {SMALL} --config.objective.name=masked")
CODES = (
    f"{sys.executable} -m jaxlm quantize --workdir=runs/a --scheme=int8 --out=runs/codes "
    f"--allow=loss:50% --quiet >&2"
)
KINDS = trained(
    "kinds",
    "--config.model.family=gemma2 --config.model.depth=2 --config.model.window=8 "
    "--config.model.width=32 --config.model.heads=4 --config.model.kv_heads=2 "
    "--config.model.head_dim=8 --config.model.hidden=64",
)


def not_finite(patch):
    """Make the distributions of the teacher none."""
    patch.setattr(teacher, "problem", lambda rows, vocab: "a distribution has the mass nan")


def full_disk(patch):
    """Make every write fail as on a full disk."""

    def pwrite(*_):
        raise OSError(28, os.strerror(28))

    patch.setattr(teacher.os, "pwrite", pwrite)


def little_space(patch):
    """Leave 1,000 bytes on the disk."""
    usage = teach.shutil.disk_usage(".")._replace(free=1000)
    patch.setattr(teach.shutil, "disk_usage", lambda path: usage)


SITUATIONS: dict[str, Situation] = {
    "a teacher and a stored one": Situation(
        f"config validate --config=c.py {STORED} --config.objective.teacher=runs/a"
    ),
    "samples and a stored teacher": Situation(
        f"config validate --config=c.py {STORED} --config.objective.sampled=0.5 "
        "--config.objective.weight=1"
    ),
    "no stored teacher": Situation(f"train {CONFIG} {STORED}"),
    "a stored teacher of another tokenizer": Situation(
        f"train {CONFIG} {STORED} --config.data.tokenizer=characters", TAUGHT
    ),
    "a stored teacher of another vocabulary": Situation(
        f"train {CONFIG} {STORED} --config.model.vocab=640", TAUGHT
    ),
    "a stored teacher of another temperature": Situation(
        f"train {CONFIG} {STORED} --config.objective.temperature=2", TAUGHT
    ),
    "a stored teacher of another text": Situation(
        f"train {CONFIG} {STORED} --config.data.train=texts/0.txt", TAUGHT
    ),
    "a stored teacher that is damaged": Situation(
        f"train {CONFIG} {STORED}", f"{TAUGHT}; truncate -s 100 taught/*/top-00000.bin"
    ),
    "judged answers and a teacher": Situation(
        f"{TEACH} --config.data.kind=pairs --config.objective.name=preference"
    ),
    "a teacher that is an encoder": Situation(
        "teach --workdir=runs/encoder --config=c.py --out=new", ENCODER
    ),
    "no id behind a token": Situation(f"{TEACH} --top=0"),
    "a folder of another pass": Situation(
        f"teach {RUN} --config=c.py --out=taught --top=5", TAUGHT
    ),
    "a teacher that is not finite": Situation(TEACH, prepare=not_finite),
    "a teacher and a full disk": Situation(TEACH, prepare=full_disk),
    "a teacher and little space": Situation(TEACH, prepare=little_space),
    "kept layers that are words": Situation(f"prune {RUN} --out=new --keep=some"),
    "a kept layer that is none": Situation(f"prune {RUN} --out=new --keep=0,9"),
    "layers of an encoder": Situation("prune --workdir=runs/encoder --out=new --keep=0", ENCODER),
    "layers of quantized weights": Situation(
        "prune --workdir=runs/codes --out=new --keep=0", CODES
    ),
    "layers of kinds that do not repeat": Situation(
        "prune --workdir=runs/kinds --out=new --keep=1", KINDS
    ),
    "next of teach": Situation(TEACH, code=0),
}

# Of these, the ones that take long.
SLOW = {
    "layers of kinds that do not repeat",
    "a kept layer that is none",
    "a stored teacher of another tokenizer",
    "a stored teacher of another vocabulary",
    "a stored teacher of another temperature",
    "a stored teacher of another text",
    "a teacher that is an encoder",
    "layers of an encoder",
    "layers of quantized weights",
    "a folder of another pass",
    "next of teach",
}

# Places whose lines are pasted by another test: PLACE -> tests/FILE::TEST.
ELSEWHERE: dict[str, str] = {}

# Places that no test reaches yet.
NOT_YET: set[str] = set()
