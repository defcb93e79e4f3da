"""Situations of runs, whose fixes `test_fix_lines` pastes."""

import shutil
import sys

from jaxlm.core import faults
from jaxlm.parallel import replicas
from jaxlm.recipes.exchange import import_model
from jaxlm.recipes.plan import oom
from tests.house.situation import CONFIG, RUN, Situation

SMALL = (
    "--config.model.width=32 --config.model.heads=4 --config.model.depth=1 "
    "--config.model.max_positions=64"
)
FLIP = (
    "python3 -c 'import pathlib, sys; "
    'p = max(pathlib.Path(sys.argv[1]).rglob("*"), key=lambda f: f.is_file() and '
    "f.stat().st_size); "
    "b = bytearray(p.read_bytes()); b[len(b) // 2] ^= 1; p.write_bytes(b)' "
)


def trained(name, flags):
    """Return a shell command that puts a run into runs/NAME; it is trained once for all."""
    words = f"-m jaxlm train --config=c.py --workdir=../../{name} {flags} --quiet"
    return (
        f"[ -d ../../{name} ] || {sys.executable} {words} >&2 || exit 1; cp -r ../../{name} runs/"
    )


BERT = trained("bert", f"--config.model.family=bert --config.objective.name=masked {SMALL}")
MOVED = trained("moved", "--config.data.tokenizer=exported/tokenizer.json")
GPT2 = trained("gpt2", f"--config.model.family=gpt2 {SMALL}")
HUGE = trained(
    "huge",
    "--config.optim.lr=1e5 --config.schedule.name=constant --config.schedule.warmup=0 "
    "--config.train.steps=1",
)


def broken(text):
    """Return what makes a run meet the faults that a text names."""
    return lambda patch: patch.setattr(faults, "_faults", faults.parse(text))


def other_weights(patch):
    """Make an export read back other weights than were written."""
    read = import_model.leaf_reader

    def reader(*args):
        inner = read(*args)
        return lambda path, like: 2 * inner(path, like)

    patch.setattr(import_model, "leaf_reader", reader)


def nearly_the_weights(patch):
    """Make an export read back weights that differ by too little to change its logits."""
    read = import_model.leaf_reader

    def reader(*args):
        inner = read(*args)
        return lambda path, like: inner(path, like) * (1 + 2e-7)

    patch.setattr(import_model, "leaf_reader", reader)


def another_result(patch):
    """Make a step that is computed twice come out otherwise the second time."""
    patch.setattr(replicas.Replicas, "changes", lambda *_: ["final_norm/scale on cpu:0"])


def drifted_copies(patch):
    """Make the copies of the parameters differ between devices."""
    patch.setattr(replicas.Replicas, "differences", lambda *_: ["final_norm/scale on cpu:0"])


def unknown_chip(patch):
    """Make the device one that no table has, with too little memory."""
    patch.setattr(oom, "_machine", lambda assumed: None)
    patch.setattr(oom, "memory_limit", lambda run: 1e4)


def full_disk(patch):
    """Leave room for five checkpoints of the six that are kept by default."""
    free = shutil.disk_usage(".")._replace(free=2_300_000)
    patch.setattr(shutil, "disk_usage", lambda _: free)


SITUATIONS: dict[str, Situation] = {
    "a requirement that is none": Situation(
        "compare runs/a runs/b --out=p.html --require=better", "cp -r runs/a runs/b", code=2
    ),
    "a requirement without results": Situation(
        "compare runs/a runs/b --out=p.html --require=not_worse:1%", "cp -r runs/a runs/b"
    ),
    "ratings of one run": Situation("rate runs/a --prompts=texts/0.txt"),
    "ratings without prompts": Situation("rate runs/a runs/a --prompts=none.txt", code=66),
    "ratings of an empty file": Situation(
        "rate runs/a runs/a --prompts=p.txt", "touch p.txt", code=65
    ),
    "ratings of a prompt that is none": Situation(
        "rate runs/a runs/a --prompts=p.jsonl", "echo 1 > p.jsonl", code=65
    ),
    "ratings of a run and itself": Situation(
        "rate runs/a runs/a --prompts=p.txt --max_tokens=4", "echo one > p.txt"
    ),
    "a report of no ratings": Situation("rate --report", code=66),
    "a resumed run that diverges": Situation(
        f"train --config=c.py {RUN} --config.train.steps=20 --config.optim.lr=30 "
        "--config.guard.divergence=stop --allow_change=optim,train"
    ),
    "eval of rows beyond the table": Situation("eval --workdir=runs/gpt2 --sequence=128", GPT2),
    "a GGUF of a model that it has no name for": Situation(
        "export --workdir=runs/gpt2 --out=m.gguf --to=gguf", GPT2
    ),
    "weights beyond a dtype": Situation("export --workdir=runs/huge --out=m --dtype=float16", HUGE),
    "an export that computes something else": Situation(
        f"export {RUN} --out=m", prepare=other_weights
    ),
    "an export of other weights": Situation(f"export {RUN} --out=m", prepare=nearly_the_weights),
    "an export into a file": Situation(f"export {RUN} --out=c.py/m"),
    "too large for a chip of no table": Situation(f"train {CONFIG}", prepare=unknown_chip),
    "too large for the memory": Situation(f"train {CONFIG} --config.train.memory_gib=0.001"),
    "a text of a model that writes none": Situation(
        "generate --workdir=runs/bert --prompt=a", BERT
    ),
    "answers of a model that writes none": Situation(
        "eval --workdir=runs/bert --verify=exact", BERT
    ),
    "a plan from a step that is not there": Situation(
        "plan --config=c.py --on=cpu --init_from=runs/a@999"
    ),
    "lr-find into a file": Situation("lr-find --config=c.py --out=c.py/found --steps=20"),
    "lr-find of a model of another library, without a run": Situation(
        "lr-find --config=c.py --init_from=exported --steps=20"
    ),
    "init of a very short text": Situation(
        "init --data=short.txt --on=t4 --out=short.py", "echo a short text > short.txt"
    ),
    "lr-find that is not finite": Situation(
        "lr-find --config=c.py --out=found --steps=20 --config.precision.compute=float16",
        prepare=broken("grads:nan"),
    ),
    "perplexity by a model that reads both ways": Situation(
        "data run --config=r.py --out=out --config.stages=perplexity "
        "--config.perplexity.run=runs/bert",
        BERT,
    ),
    "a vocabulary too small": Situation(f"train {CONFIG} --config.model.vocab=100"),
    "too little text to hold out": Situation(
        "train --config=d.py --workdir=new",
        "sed '/validation/d' c.py > d.py; mv texts all; mkdir texts; head -4 all/1.txt > "
        "texts/1.txt",
    ),
    "too little text to hold any out": Situation(
        "train --config=d.py --workdir=new",
        "sed '/validation/d' c.py > d.py; mv texts all; mkdir texts; head -1 all/1.txt > "
        "texts/1.txt",
    ),
    "a step beyond settings that changed": Situation(
        "replay --workdir=runs/a --step=3",
        f"{sys.executable} -m jaxlm train --config=c.py {RUN} --config.optim.lr=0.01 "
        f"--config.train.steps=3 --allow_change=optim,train --quiet >&2; {FLIP} "
        "runs/a/checkpoints/2",
    ),
    "other data and nothing else": Situation(
        f"train --config=c.py {RUN}",
        "rm -r runs/a/checkpoints/2; printf 'more text\\n' >> texts/1.txt",
    ),
    "other dtypes in the workdir": Situation(
        f"train --config=c.py {RUN} --config.train.steps=3 --config.precision.params=bfloat16 "
        "--allow_change=precision,train"
    ),
    "no rewinds left": Situation(
        f"train {CONFIG} --config.train.steps=12 --config.guard.budget=2 --config.guard.rewinds=1",
        prepare=broken("grads:nan@4-99"),
    ),
    "a step that comes out otherwise": Situation(
        f"train {CONFIG} --config.guard.repeat_every=1", prepare=another_result
    ),
    "copies that drift apart": Situation(
        f"train {CONFIG} --config.guard.compare_every=1", prepare=drifted_copies
    ),
    "a set of an objective that is none": Situation(
        f"train {CONFIG} --config.objective.name=ul2 --config.eval.follow=val.causul"
    ),
    "a GGUF of ids that are moved": Situation(
        "export --workdir=runs/moved --out=m.gguf --to=gguf", MOVED
    ),
    "a disk too small": Situation(f"train {CONFIG}", prepare=full_disk),
    "a ladder without validation": Situation(
        "scale --budget=1e18 --sweep --config=c.py --workdir=ladder '--config.data.validation=()'"
    ),
    "a ladder of odd widths": Situation(
        "scale --budget=1e18 --sweep --config=c.py --workdir=ladder --widths=30,100,200"
    ),
    "a ladder too short": Situation(
        "scale --budget=1e18 --sweep --config=c.py --workdir=ladder --widths=64 --steps=2"
    ),
    "a classifier of few examples": Situation(
        "data train-classifier --examples=a=a.jsonl --examples=b=b.jsonl --out=out",
        "for i in $(seq 60); do echo '{\"text\": \"apples and pears, number '$i'\"}' >> a.jsonl; "
        "echo '{\"text\": \"cars and trains, number '$i'\"}' >> b.jsonl; done",
    ),
    "a classifier over a folder": Situation(
        "data train-classifier --examples=a=a.jsonl --examples=b=b.jsonl --out=texts",
        "for i in $(seq 600); do echo '{\"text\": \"apples and pears, number '$i'\"}' >> "
        "a.jsonl; echo '{\"text\": \"cars and trains, number '$i'\"}' >> b.jsonl; done",
    ),
    "a classifier into a file": Situation(
        "data train-classifier --examples=a=a.jsonl --examples=b=b.jsonl --out=c.py/out",
        "for i in $(seq 600); do echo '{\"text\": \"apples and pears, number '$i'\"}' >> "
        "a.jsonl; echo '{\"text\": \"cars and trains, number '$i'\"}' >> b.jsonl; done",
    ),
    "a damaged checkpoint": Situation(f"eval {RUN} --step=1", f"{FLIP} runs/a/checkpoints/1"),
    "noise of one row": Situation(
        f"train {CONFIG} --config.train.batch=1 --config.log.layers=noise"
    ),
    "noise of stages of one row": Situation(
        f"train {CONFIG} --config.log.layers=noise --config.train.batch_warmup=1@50%"
    ),
}

# Of these, the ones that take long.
SLOW = {
    "a classifier into a file",
    "a resumed run that diverges",
    "a vocabulary too small",
    "too large for a chip of no table",
    "too large for the memory",
    "lr-find into a file",
    "too little text to hold out",
    "too little text to hold any out",
    "a step beyond settings that changed",
    "other dtypes in the workdir",
    "no rewinds left",
    "a ladder without validation",
    "a ladder of odd widths",
    "a ladder too short",
    "eval of rows beyond the table",
    "weights beyond a dtype",
    "a text of a model that writes none",
    "answers of a model that writes none",
    "perplexity by a model that reads both ways",
    "a GGUF of a model that it has no name for",
    "a GGUF of ids that are moved",
    "a disk too small",
    "noise of one row",
    "noise of stages of one row",
    "other data and nothing else",
    "ratings of a run and itself",
}

# Places whose lines are pasted by another test: PLACE -> tests/FILE::TEST.
ELSEWHERE: dict[str, str] = {
    # Their fixes, pasted, serve a page until they are interrupted.
    "recipes/rate/server.py:__init__:1": "tests/recipes/rate/"
    "test_rate.py::test_a_port_or_a_file_that_is_taken_is_refused_before_texts_are_written",
    "recipes/rate/texts.py:open_ratings:1": "tests/recipes/rate/"
    "test_rate.py::test_a_port_or_a_file_that_is_taken_is_refused_before_texts_are_written",
    "recipes/use/verify.py:_questions:1": "tests/recipes/use/"
    "test_verify.py::test_a_limit_that_no_prompt_leaves_is_refused",
    "recipes/use/verify.py:_questions:2": "tests/recipes/use/"
    "test_verify.py::test_what_cannot_be_verified_has_a_fix_to_paste",
}

# Places that no test reaches yet.
NOT_YET: set[str] = set()
