"""Every fix line and `next:` line of every command is run, as printed, in its situation.

A situation is a command line in a folder. It is run in this process, with every place of the code
that makes a fix or a `next:` line watched; each line that comes out is then pasted in a copy of the
folder as the command left it:

- a command is run as it stands;
- flags are added to the command line, in place of those of the same name and of a word that does
  not exist;
- a line of a config file replaces the line that the error names;
- words for a person (`fetch it again`) are not run, and do not look like a command.

It must end with 0, and so must what follows from it: if two mistakes are fixed one at a time, the
next fix is pasted too. `NOT_YET` lists the places that no situation here reaches, so that a new one
is noticed at once.
"""

import ast
import collections
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlm.cli.main import main
from tests.house import (
    situations_policy,
    situations_preferences,
    situations_prepare,
    situations_recipes,
    situations_rewards,
    situations_serving,
    situations_stores,
    situations_tasks,
    situations_teaching,
    situations_texts,
    situations_tuning,
)
from tests.house.situation import CONFIG, ROOT, RUN, SHORT, Situation

TINY = """\
from jaxlm.core import config
from jaxlm.recipes.config import Run

def get_config():
    c = config.new(Run)
    c.data.train = ("texts/*.txt",)
    c.data.validation = ("tail:20%",)
    c.data.tokenizer = "bytes"
    c.data.sequence = 32
    c.model.width, c.model.depth, c.model.heads, c.model.kv_heads = 32, 1, 4, 2
    c.train.steps, c.train.batch = 2, 4
    c.checkpoint.every = 1
    return c
"""
RECIPE = """\
from jaxlm.core import config
from jaxlm.corpus.config import Recipe

def get_config():
    c = config.new(Recipe)
    c.source = ("texts/*.txt",)
    c.length.least = 10
    return c
"""
COMMAND = re.compile(r"^(jaxlm |'?--[a-z]|echo |find |ls |mv |rm |sed |export |unset )")
# `jaxlm WORDS` in a change of a situation, perhaps only if a folder is not there. It runs in this
# process: one of its own imports for seconds.
JAXLM = re.compile(
    rf"(?:\[ -d (\S+) \] \|\| )?{re.escape(sys.executable)} -m jaxlm ([^;|&]*?)"
    r"(?: >&2)?(?: \|\| exit 1)?(?:;|$)"
)
MADE = ("runs", "tokens", "clean", "mixed", "exported")  # folders of `base`
LONGEST_CHAIN = 3  # fixes after each other, of a command line with several mistakes


SITUATIONS = {
    # the command line
    "no such verb": Situation("trian --config=c.py --workdir=new"),
    "a verb like none": Situation("frobnicate"),
    "flags before the verb": Situation("--quiet train --config=c.py --workdir=new"),
    "no verb but a flag": Situation("--quiet"),
    "no such action": Situation("data statz --config=c.py"),
    "an action like none": Situation("data frobnicate"),
    "no such choice": Situation("eval --workdir=runs/a --weights=rwa"),
    "a choice like none": Situation("eval --workdir=runs/a --weights=best"),
    "a count with a letter": Situation(f"train {CONFIG} --stop_at=0.001k"),
    "a count that is none": Situation(f"train {CONFIG} --stop_at=soon"),
    "two steps": Situation("eval --workdir=runs/a --text=texts/*.txt --step=1,2"),
    "a flag misspelt": Situation(f"train {CONFIG} --stopat=1"),
    "a flag with dashes": Situation(f"train {CONFIG} --stop-at=1"),
    "a setting as a flag": Situation(f"train {CONFIG} --lr=0.1"),
    "a setting as a flag, its value apart": Situation(f"train {CONFIG} --lr 0.1"),
    "a flag like none": Situation(f"train {CONFIG} --frobnicate=1"),
    "a word too many": Situation(f"train {CONFIG} word"),
    "flags without dashes": Situation("train config=c.py workdir=new"),
    "a setting of a verb without settings": Situation(
        "eval --workdir=runs/a --config.eval.batch=4"
    ),
    "--config without a value": Situation("config validate --config"),
    "--workdir without a value": Situation("train --config=c.py --workdir"),
    "a setting without a value": Situation(f"train {CONFIG} --config.optim.lr"),
    "--json with a value": Situation("config show --json=yes"),
    "train without a workdir": Situation("train --config=c.py"),
    "train without a config": Situation("train --workdir=new", more=SHORT),
    "eval without a run": Situation("eval"),
    "eval without a run, and none there": Situation("eval", "rm -r runs"),
    "plan without a config": Situation("plan --on=h100"),
    "plan of a run as the directory": Situation(f"plan --on=h100 --serve {RUN}"),
    "plan that begins with a run": Situation("plan --on=h100 --init_from=runs/a@2"),
    "data run without a config": Situation("data run --out=out --config.source=texts/*.txt"),
    "scale without a budget": Situation("scale"),
    "scale with runs and a sweep": Situation(
        "scale --budget=1e18 --runs=runs/* --sweep --config=c.py"
    ),
    "scale with widths alone": Situation("scale --budget=1e18 --widths=32 --config=c.py"),
    "launch of another verb": Situation("launch --processes=1 -- eval --workdir=runs/a"),
    "launch of nothing": Situation("launch --processes=1"),
    "launch of no process": Situation("launch --processes=0 -- train --config=c.py --workdir=new"),
    "generate as a stream of json": Situation(
        "generate --workdir=runs/a --prompt=a --stream --json"
    ),
    "report of no run": Situation("report --workdir=none"),
    "a workdir in a bucket": Situation("train --config=c.py --workdir=gs://bucket/run"),
    "a password": Situation(f"train {CONFIG} --init_from=https://me:secret@host/run"),
    # configs
    "no such config": Situation("config validate --config=d.py"),
    "no shipped config of the name": Situation("config validate --config=quickstrat"),
    "a shipped config misspelt as a file": Situation(
        "config validate --config=configs/llama-1bb.py"
    ),
    "a recipe as the config of a run": Situation("train --config=r.py --workdir=new"),
    "a model of transformers as a run": Situation(
        "eval --workdir=exported --text=texts/*.txt --sequence=32"
    ),
    "a config like none": Situation("config validate --config=frobnicate.py"),
    "a config that is text": Situation("config validate --config=texts/0.txt"),
    "a config that is no JSON": Situation(
        "config validate --config=bad.json", "echo '[' > bad.json"
    ),
    "a config that is a list": Situation(
        "config validate --config=bad.json", "echo '[]' > bad.json"
    ),
    "a config without get_config": Situation(
        "config validate --config=d.py", "echo 'x = 1' > d.py"
    ),
    "a config that fails": Situation("config validate --config=d.py", "echo '1 / 0' > d.py"),
    "a config that gives a number": Situation(
        "config validate --config=d.py", "echo 'def get_config(): return 1' > d.py"
    ),
    "a config with an argument too many": Situation("config validate --config=c.py:long"),
    "a config with an argument too few": Situation(
        "config validate --config=d.py", "sed 's/get_config()/get_config(size)/' c.py > d.py"
    ),
    "a setting misspelt in a file": Situation(
        "config validate --config=d.py", "sed 's/train.batch/train.bacth/' c.py > d.py"
    ),
    "a setting of another trainer in a file": Situation(
        "config validate --config=d.py", "sed 's/data.sequence/data.seq_len/' c.py > d.py"
    ),
    "a setting like none in a file": Situation(
        "config validate --config=d.py", "sed 's/data.sequence/data.frobnicate/' c.py > d.py"
    ),
    "a section set to a word in a file": Situation(
        "config validate --config=d.py",
        "sed 's/    return c/    c.optim = \"loin\"\\n    return c/' c.py > d.py",
    ),
    "a section set to a word like none": Situation(
        "config validate --config=d.py",
        "sed 's/    return c/    c.optim = \"prodigy2\"\\n    return c/' c.py > d.py",
    ),
    "a section set to a number in JSON": Situation(
        "config validate --config=d.json", "echo '{\"optim\": 5}' > d.json"
    ),
    "an arm misspelt in JSON": Situation(
        "config validate --config=d.json", 'echo \'{"optim": {"name": "lino"}}\' > d.json'
    ),
    "a setting misspelt": Situation("config validate --config=c.py --config.optim.lrr=0.1"),
    "a setting of another trainer": Situation(
        "config validate --config=c.py --config.train.batch_size=8"
    ),
    "a setting like none": Situation("config validate --config=c.py --config.optim.frobnicate=8"),
    "a setting of another arm": Situation(
        "config validate --config=c.py --config.optim.momentum=0.5"
    ),
    "a setting of an inner arm": Situation(
        "config validate --config=c.py --config.model.rope_scaling.factor=2"
    ),
    "a value in another notation": Situation(
        "config validate --config=c.py --config.train.steps=2k"
    ),
    "a dtype of another name": Situation(
        "config validate --config=c.py --config.precision.compute=bf16"
    ),
    "a value out of range": Situation("config validate --config=c.py --config.train.batch=0"),
    "two values": Situation(
        "config validate --config=c.py --config.train.batch=0 --config.optim.name=addam"
    ),
    "two values that have other notations": Situation(
        "config validate --config=c.py --config.train.steps=2k --config.precision.compute=bf16"
    ),
    "a span that is none": Situation(
        "config validate --config=c.py --config.schedule.warmup=often"
    ),
    "an arm misspelt": Situation("config validate --config=c.py --config.optim.name=loin"),
    "a section named": Situation("config validate --config=c.py --config.optim=lion"),
    "a size misspelt": Situation("config validate --config.model=lama3-8b"),
    "a section set to a number": Situation("config validate --config=c.py --config.data=5"),
    "a secret in a setting": Situation(
        "config validate --config=c.py --config.data.train=https://me:pw@host/a.txt"
    ),
    "explain misspelt": Situation("config explain optim.lrr"),
    "explain of a name": Situation("config explain lr"),
    # contradictions: each arm's and section's own
    "batch and microbatches": Situation(
        "config validate --config=c.py --config.train.microbatches=3"
    ),
    "heads and width": Situation("config validate --config=c.py --config.model.heads=5"),
    "kv heads": Situation("config validate --config=c.py --config.model.kv_heads=3"),
    "rows longer than the table": Situation(
        "config validate --config=c.py --config.model.family=gpt2 --config.model.width=32 "
        "--config.model.heads=4 --config.model.max_positions=16"
    ),
    "an encoder and causal": Situation(
        "config validate --config.model.family=bert --config.data.sequence=64"
    ),
    "a pair and causal": Situation(
        "config validate --config.model.family=t5 --config.data.sequence=64"
    ),
    "follow a set like none": Situation("config validate --config=c.py --config.eval.follow=none"),
    "qk_clip and schedule_free": Situation(
        "config validate --config=c.py --config.optim.name=schedule_free "
        "--config.regularization.qk_clip=50"
    ),
    "qk_clip and a pair": Situation(
        "config validate --config.model.family=t5 --config.objective.name=span "
        "--config.regularization.qk_clip=50"
    ),
    "sequence warm-up and span": Situation(
        "config validate --config.objective.name=masked --config.data.sequence_warmup=64@10%"
    ),
    "layers and tokens": Situation(
        "config validate --config.log.layers=norms --config.train.batch_warmup=8@10% "
        "--config.log.every=1e5tok"
    ),
    "layers and a time": Situation(
        "config validate --config.log.layers=norms --config.log.every=10s"
    ),
    "stages out of order": Situation("config validate --config.train.batch_warmup=8@20%,16@10%"),
    "sophia and heads": Situation(
        "config validate --config.objective.name=mtp --config.optim.name=sophia"
    ),
    "mup and a pair": Situation(
        "config validate --config.model.family=t5 --config.objective.name=span "
        "--config.mup.base_width=64"
    ),
    "mup and sgd": Situation("config validate --config.optim.name=sgd --config.mup.base_width=64"),
    "mup and xavier": Situation(
        "config validate --config.model.init=xavier --config.mup.base_width=64"
    ),
    "a schedule in time": Situation("config validate --config.schedule.warmup=10s"),
    "a schedule of more than all": Situation("config validate --config.schedule.end=150%"),
    "a warm-up beyond the run": Situation("config validate --config.schedule.warmup=5000"),
    "a decay beyond the run": Situation(
        "config validate --config.schedule.name=wsd --config.schedule.decay=99%"
    ),
    "cycles of no step": Situation("config validate --config.schedule.cycles=5000"),
    "a first cut beyond the run": Situation(
        "config validate --config.schedule.name=step --config.schedule.every=5000"
    ),
    "no warm-up": Situation(
        "config validate --config.schedule.name=inverse_sqrt --config.schedule.warmup=0"
    ),
    "no cut": Situation("config validate --config.schedule.name=step --config.schedule.every=0"),
    "no decay": Situation("config validate --config.schedule.name=wsd --config.schedule.decay=0"),
    "an average that begins late": Situation(
        "config validate --config.average.name=swa --config.average.begin=200%"
    ),
    "an average in time": Situation(
        "config validate --config.average.name=swa --config.average.every=10s"
    ),
    "hidden and random": Situation(
        "config validate --config.objective.name=masked --config.objective.hidden=0.9 "
        "--config.objective.random=0.5"
    ),
    "a head of no weight": Situation(
        "config validate --config.objective.name=mtp --config.objective.weights=0"
    ),
    "no objective of a mixture": Situation(
        "config validate --config.objective.name=ul2 --config.objective.weights.causal=0"
    ),
    "a window that is none": Situation("config validate --config.profile.steps=5"),
    "a limit that is no time": Situation("config validate --config.watch.step=5"),
    "remat by layers that are none": Situation("config validate --config.train.remat=frobnicate"),
    "a tokenizer too small": Situation("config validate --config.data.tokenizer=bpe:100"),
    "a tokenizer misspelt": Situation("config validate --config.data.tokenizer=sentencepeice:4096"),
    "nothing to read": Situation("config validate --config.data.train=()"),
    "a source without a name": Situation(
        "config validate --config.data.train=a=texts/*.txt,texts/1*.txt"
    ),
    "two sets of one name": Situation(
        "config validate --config.data.train=b=texts/1.txt,c=texts/2.txt "
        "--config.data.validation=a=5%,a_b=texts/3.txt"
    ),
    "a set called train": Situation("config validate --config.data.validation=train=texts/1.txt"),
    "two shares": Situation("config validate --config.data.validation=5%,b=6%"),
    "a share of all": Situation("config validate --config.data.validation=100%"),
    "lengths that do not grow": Situation("config validate --config.data.sequence_warmup=100@10%"),
    "lengths that are none": Situation("config validate --config.data.sequence_warmup=short"),
    "two axes left open": Situation("config validate --config.mesh.fsdp=auto"),
    "a mixture of no sources": Situation("config validate --config.data.mixture.temperature=2"),
    "an epoch of no source": Situation(
        "config validate --config.data.train=aa=texts/1*.txt,bb=texts/2*.txt "
        "--config.data.mixture.epochs=ba=2"
    ),
    "weights of half": Situation(
        "config validate --config.data.train=aa=texts/1*.txt,bb=texts/2*.txt "
        "--config.data.mixture.name=weights --config.data.mixture.weights=aa=1"
    ),
    "weights of another mixture": Situation(
        "config validate --config.data.train=aa=texts/1*.txt,bb=texts/2*.txt "
        "--config.data.mixture.weights=aa=1,bb=3"
    ),
    "a stage twice": Situation("data run --config=r.py --out=out --config.stages=length,length"),
    "a recipe of nothing": Situation("data run --config=r.py --out=out --config.source=()"),
    "shards without a tokenizer": Situation(
        "data run --config=r.py --out=out --config.shards.held_out=0.1"
    ),
    "decontaminate from nothing": Situation(
        "data run --config=r.py --out=out --config.stages=decontaminate"
    ),
    "quality without a classifier": Situation(
        "data run --config=r.py --out=out --config.stages=quality"
    ),
    "perplexity without a run": Situation(
        "data run --config=r.py --out=out --config.stages=perplexity"
    ),
    "harmful without lists": Situation("data run --config=r.py --out=out --config.stages=harmful"),
    "urls without lists": Situation("data run --config=r.py --out=out --config.stages=urls"),
    "least above most": Situation("data run --config=r.py --out=out --config.length.most=5"),
    "perplexities crossed": Situation(
        "data run --config=r.py --out=out --config.perplexity.least=2000"
    ),
    # data
    "a folder without text as data": Situation(
        "data stats --config=c.py --config.data.train=pictures",
        "mkdir pictures; printf '\\0\\377' > pictures/a.png",
    ),
    "a store without the file": Situation(
        "data stats --config=c.py --config.data.train=memory://none/*.txt"
    ),
    "a folder misspelt": Situation("data stats --config=c.py --config.data.train=txets/*.txt"),
    "a glob of nothing": Situation("data stats --config=c.py --config.data.train=texts/*.md"),
    "empty files": Situation(
        "data stats --config=c.py --config.data.train=empty.txt", "touch empty.txt"
    ),
    "not UTF-8": Situation(
        "data stats --config=c.py --config.data.train=l.txt,texts/*.txt",
        "printf 'caf\\351 au lait' > l.txt",
    ),
    "a line that is no JSON": Situation(
        "data stats --config=c.py --config.data.train=a.jsonl",
        """printf '{"text": "some text"}\\nno JSON\\n' > a.jsonl""",
    ),
    "a record among others without a text": Situation(
        "data stats --config=c.py --config.data.train=a.jsonl",
        "for i in $(seq 40); do echo '{\"text\": \"some text, and more of it, number '$i'\"}'; "
        "done > a.jsonl; sed -i '8s/text/txet/' a.jsonl",
    ),
    "no text key": Situation(
        "data stats --config=c.py --config.data.train=a.jsonl",
        "for i in $(seq 40); do echo '{\"body\": \"some text, and more of it, number '$i'\"}'; "
        "done > a.jsonl",
    ),
    "tokens tokenized again": Situation(
        "data tokenize --config=c.py --out=more --config.data.train=tokens/train "
        "'--config.data.validation=()'"
    ),
    "tokens into a folder that is there": Situation("data tokenize --config=c.py --out=tokens"),
    "a share of tokens": Situation(
        "data stats --config=c.py --config.data.train=tokens/train "
        "--config.data.tokenizer=tokens/train/tokenizer"
    ),
    "text and tokens": Situation(
        "data stats --config=c.py --config.data.train=tokens/train,texts/1.txt "
        "'--config.data.validation=()' --config.data.tokenizer=tokens/train/tokenizer"
    ),
    "tokens of another tokenizer": Situation(
        "data stats --config=c.py --config.data.train=tokens/train "
        "--config.data.validation=tokens/val --config.data.tokenizer=characters"
    ),
    "validated on what is trained on": Situation(
        "data stats --config=c.py --config.data.validation=texts/1.txt"
    ),
    "a file in two sources": Situation(
        "data stats --config=c.py --config.data.train=a=texts/1*.txt,b=texts/*.txt "
        "'--config.data.validation=()'"
    ),
    "no such tokenizer file": Situation(
        "data stats --config=c.py --config.data.tokenizer=tokens/train/tokenizr"
    ),
    "no tokenizer file at all": Situation(
        "data stats --config=c.py --config.data.tokenizer=none/frob.json"
    ),
    "a vocabulary larger than the text": Situation(
        "data stats --config=c.py --config.data.tokenizer=sentencepiece:40000"
    ),
    "no shards to check": Situation("data check texts"),
    "a run into another recipe": Situation(
        "data run --config=r.py --out=clean --config.length.least=20"
    ),
    "a share that is none": Situation("data run --config=r.py --out=out --sample=0"),
    "no workers": Situation("data run --config=r.py --out=out --workers=0"),
    "clusters of no run": Situation("data clusters texts"),
    "clusters shown none": Situation("data clusters clean --most=0"),
    "a mix of nothing": Situation("data mix --out=out"),
    "a mix of no corpus": Situation(
        "data mix --config.sources=a=texts --config.tokenizer=bytes --out=out"
    ),
    "a mix into another": Situation(
        "data mix --config.sources=a=clean --config.tokenizer=characters --out=mixed"
    ),
    "examples of one label": Situation(
        "data train-classifier --examples=good=texts/*.txt --out=out"
    ),
    "examples without a label": Situation("data train-classifier --examples=texts/*.txt --out=out"),
    # runs
    "no such run": Situation("eval --workdir=runs/b"),
    "no such step": Situation(f"eval {RUN} --step=7"),
    "no step to inspect": Situation(f"checkpoint show {RUN} --step=7"),
    "no checkpoints": Situation("checkpoint list --workdir=texts"),
    "an average that is not kept": Situation(f"eval {RUN} --weights=ema"),
    "eval of no text": Situation(f"eval {RUN} --text=txets/*.txt"),
    "answers of a run of text": Situation(f"eval {RUN} --verify=exact"),
    "samples without a comparison": Situation(f"eval {RUN} --samples=2"),
    "chat without a template": Situation(f"generate {RUN} --prompt=a --chat"),
    "another config in the workdir": Situation(f"train --config=c.py {RUN} --config.optim.lr=0.5"),
    "start_at of no step": Situation(f"train --config=c.py {RUN} --start_at=7"),
    "start_at without force": Situation(f"train --config=c.py {RUN} --start_at=1"),
    "init_from nothing": Situation(f"train {CONFIG} --init_from=none"),
    "init_from no such step": Situation(f"train {CONFIG} --init_from=runs/a@7"),
    "init_from a step that is no number": Situation(f"train {CONFIG} --init_from=runs/a@last"),
    "init_from another model": Situation(
        f"train {CONFIG} --init_from=runs/a --config.model.width=64"
    ),
    "an import into a run": Situation(f"import --from=exported {RUN}"),
    "an export over a folder": Situation(f"export {RUN} --out=exported"),
    "damaged metrics": Situation(
        f"report {RUN}", "sed -i '1s/.*/{\"step\": /' runs/a/metrics.jsonl"
    ),
    "a replay of no step": Situation(f"replay {RUN} --step=70"),
    "averages of no step": Situation(f"average {RUN} --steps=5,6 --out=averaged"),
    "averages of none": Situation(f"average {RUN} --newest=0 --out=averaged"),
    "proportions of others": Situation(
        f"average {RUN} --newest=2 --proportions=1,2,3 --out=averaged"
    ),
    "lr-find over one": Situation("lr-find --config=c.py --out=out --low=1 --high=0.1"),
    "lr-find of no step": Situation("lr-find --config=c.py --out=out --steps=1"),
    "lr-find over an earlier one": Situation(
        "lr-find --config=c.py --out=found --steps=20", "mkdir found; touch found/lr-find.json"
    ),
    "plan on no machine": Situation("plan --config=c.py --on=h100x"),
    "plan of no price": Situation("plan --config=c.py --on=h100 --price=-1"),
    "a batch that does not divide": Situation(
        "check --config=c.py --config.train.batch=9 --devices=2"
    ),
    # arms and rarer settings
    "a share out of range": Situation(f"generate {RUN} --prompt=a --min_p=1.5"),
    "a cache dtype misspelt": Situation(
        f"generate {RUN} --prompt=a --max_tokens=2 --kv_cache_dtype=imt8"
    ),
    "memory of a CPU": Situation("plan --config=c.py --on=cpu --memory=24GB"),
    "memory of a TPU": Situation("plan --config=c.py --on=v5e-16 --memory=24GB"),
    "memory that is none": Situation("plan --config=c.py --on=h100 --memory=much"),
    "a GPU that is in no table": Situation("plan --config=c.py --on=a11"),
    "a slice that is in no table": Situation("plan --config=c.py --on=v5e-17"),
    "too little text held out": Situation(
        f"train {CONFIG} --config.data.validation=auto --config.data.sequence=1000"
    ),
    "a run that diverges": Situation(
        f"train {CONFIG} --config.guard.divergence=stop --config.optim.lr=1 "
        "--config.train.steps=40 --config.log.every=1 --config.schedule.warmup=0"
    ),
    "a run that is not a number": Situation(
        f"train {CONFIG} --config.optim.name=sgd --config.optim.lr=1e4 "
        "--config.optim.clip_norm=None --config.train.steps=40 --config.schedule.warmup=0"
    ),
    "seeds of others": Situation(f"generate {RUN} --prompt=a --seed=1 --seed=2"),
    "an empty stop": Situation(f"generate {RUN} --prompt=a --stop="),
    "stops too long": Situation(f"generate {RUN} --prompt=a --stop={'x' * 400}"),
    "beams at a temperature": Situation(f"generate {RUN} --prompt=a --beams=2 --top_k=5"),
    "odd rotated features": Situation(
        "config validate --config.model.family=deepseek_v2 --config.model.rope_dim=5"
    ),
    "mscale without yarn": Situation(
        "config validate --config.model.family=deepseek_v2 --config.model.mscale=1"
    ),
    "groups of other sizes": Situation(
        "config validate --config.model.family=deepseek_v2 --config.model.groups=7"
    ),
    "more groups than there are": Situation(
        "config validate --config.model.family=deepseek_v2 --config.model.groups=2 "
        "--config.model.top_groups=3"
    ),
    "groups that hold too few": Situation(
        "config validate --config.model.family=deepseek_v2 --config.model.experts=16 "
        "--config.model.groups=8 --config.model.top_groups=1 --config.model.top_k=4"
    ),
    "more experts than there are": Situation(
        "config validate --config.model.family=mixtral --config.model.top_k=90"
    ),
    "no layer with experts": Situation(
        "config validate --config.model.family=deepseek_v2 --config.model.dense_depth=99"
    ),
    "an odd head of modernbert": Situation(
        "config validate --config.model.family=modernbert --config.objective.name=masked "
        "--config.model.width=36 --config.model.heads=4"
    ),
    "an odd share of neox": Situation(
        "config validate --config.model.family=neox --config.model.rotary_fraction=0.01"
    ),
    "an odd head": Situation("config validate --config.model.head_dim=5"),
    "buckets that do not halve": Situation(
        "config validate --config.model.family=t5 --config.objective.name=span "
        "--config.model.buckets=30"
    ),
    "buckets beyond the max_distance": Situation(
        "config validate --config.model.family=t5 --config.objective.name=span "
        "--config.model.max_distance=8"
    ),
    "a ramp the wrong way": Situation(
        "config validate --config.model.rope_scaling.name=llama3 --config.model.rope_scaling.low=9"
    ),
    "a yarn the wrong way": Situation(
        "config validate --config.model.rope_scaling.name=yarn --config.model.rope_scaling.slow=90"
    ),
    "a long rope of others": Situation(
        "config validate --config.model.family=phi3 --config.model.rope_scaling.name=longrope "
        "--config.model.rope_scaling.short=1,2 --config.model.rope_scaling.long=1,2"
    ),
    "more than all predicted": Situation(
        "config validate --config.objective.name=masked --config.objective.hidden=0.9 "
        "--config.objective.random=0.5 --config.model.family=bert --config.data.sequence=64"
    ),
    "no further head": Situation(
        "config validate --config.objective.name=mtp --config.objective.weights=()"
    ),
    "an average of no cycle": Situation(
        "config validate --config.average.name=swa --config.average.every=0"
    ),
    "a pattern without a factor": Situation("config validate --config.optim.lr_scale=embedding"),
    "an entry that names no source": Situation(
        "config validate --config.data.train=aa=texts/1*.txt,bb=texts/2*.txt "
        "--config.data.mixture.name=weights --config.data.mixture.weights=aa=0.5,zz=0.5"
    ),
    "an entry twice": Situation(
        "config validate --config.data.train=aa=texts/1*.txt,bb=texts/2*.txt "
        "--config.data.mixture.name=weights --config.data.mixture.weights=aa=0.5,aa=0.5"
    ),
    "an entry that is no number": Situation(
        "config validate --config.data.train=aa=texts/1*.txt,bb=texts/2*.txt "
        "--config.data.mixture.name=weights --config.data.mixture.weights=aa=0.5,bb=much"
    ),
    "weights of more than all": Situation(
        "config validate --config.data.train=aa=texts/1*.txt,bb=texts/2*.txt "
        "--config.data.mixture.name=weights --config.data.mixture.weights=aa=0.9,bb=0.9"
    ),
    "weights that move in time": Situation(
        "config validate --config.data.train=aa=texts/1*.txt,bb=texts/2*.txt "
        "--config.data.mixture.name=weights --config.data.mixture.weights=aa=0.5@0..0.6@10s,bb=0.5"
    ),
    "weights that move back": Situation(
        "config validate --config.data.train=aa=texts/1*.txt,bb=texts/2*.txt "
        "--config.data.mixture.name=weights "
        "--config.data.mixture.weights=aa=0.5@50%..0.6@10%,bb=0.5"
    ),
    "batches that are none": Situation("config validate --config.train.batch_warmup=few"),
    "batches that do not grow": Situation("config validate --config.train.batch_warmup=64@10%"),
    "batches that do not divide": Situation(
        "config validate --config.train.microbatches=4 --config.train.batch_warmup=6@10%"
    ),
    "a source of a recipe without a value": Situation(
        "data run --config=r.py --out=out --config.parts=web"
    ),
    "a weight of no part": Situation(
        "data run --config=r.py --out=out --config.parts=a=texts/1*,b=* "
        "--config.shards.tokenizer=bytes --config.shards.weights=a=1"
    ),
    "a weight that is no number": Situation(
        "data run --config=r.py --out=out --config.parts=a=texts/1*,b=* "
        "--config.shards.tokenizer=bytes --config.shards.weights=a=1,b=much"
    ),
    "a tokenizer of shards misspelt": Situation(
        "data run --config=r.py --out=out --config.shards.tokenizer=sentencepeice:512"
    ),
    "parts that do not hold all": Situation(
        "data run --config=r.py --out=out --config.parts=a=texts/1*"
    ),
    "a part of nothing": Situation("data run --config=r.py --out=out --config.parts=a=none/*,b=*"),
    "hardware that has no layout": Situation(
        f"config validate --config={ROOT}/configs/llama_8b.py:9gpu"
    ),
    "hardware that is none": Situation(
        f"config validate --config={ROOT}/configs/llama_8b.py:frobnicate"
    ),
    "init without text": Situation("init --on=t4"),
    "init over a file": Situation("init --data=texts --on=t4", "touch my_config.py"),
    "init into a file": Situation("init --data=texts --on=t4 --out=c.py/own.py"),
    "a page that is none": Situation("docs objective"),
    "a replay of other text": Situation(
        "replay --workdir=runs/a --step=1", "printf 'more text\\n' >> texts/1.txt"
    ),
    "an evaluation of no set": Situation(
        "eval --workdir=runs/a",
        'sed -zi \'s/"validation": \\[[^]]*\\]/"validation": []/\' runs/a/config.json',
    ),
    "widths that are none": Situation(
        "scale --budget=1e18 --sweep --config=c.py --workdir=ladder --widths=wide"
    ),
    "init of no size": Situation("init --data=texts --on=t4 --params=much"),
    "init of too few parameters": Situation("init --data=texts --on=t4 --params=50k"),
    "init of too many parameters": Situation("init --data=texts --on=t4 --params=2000B"),
    "init of no time": Situation("init --data=texts --on=t4 --minutes=-1"),
    "init of a model that fits nowhere": Situation("init --data=texts --on=t4 --params=70B"),
    "several devices of a GPU": Situation("plan --config=c.py --on=h100 --devices=4"),
    "an exact plan on a GPU": Situation("plan --config=c.py --on=h100 --exact"),
    "a sweep's runs and a config": Situation("scale --budget=1e18 --runs=runs/* --config=c.py"),
    "a budget that is none": Situation("scale --budget=much"),
    "runs that are not there": Situation("scale --budget=1e18 --runs=none/*"),
    "a diff with nothing": Situation(f"checkpoint diff {RUN} --step=1"),
    "a checkpoint of no step": Situation(f"checkpoint inspect {RUN} --step=9"),
    "a share of examples": Situation(
        "data train-classifier --examples=a=texts/1*.txt --examples=b=texts/2*.txt --out=out "
        "--held_out=90%"
    ),
    "no classifier": Situation(
        "data run --config=r.py --out=out --config.stages=quality --config.quality.model=none"
    ),
    "no run to score by": Situation(
        "data run --config=r.py --out=out --config.stages=perplexity --config.perplexity.run=none"
    ),
    "a language that is none": Situation(
        "data run --config=r.py --out=out --config.stages=language --config.language.keep=xx"
    ),
    "a tokenizer file over another": Situation(
        "tokenizer train --config=c.py --out=t", "touch t.json"
    ),
    "a tokenizer that is no JSON": Situation(
        "data stats --config=c.py --config.data.tokenizer=bad.json", "echo '[' > bad.json"
    ),
    "a tokenizer that is no SentencePiece": Situation(
        "data stats --config=c.py --config.data.tokenizer=bad.model", "echo '[' > bad.model"
    ),
    "an earlier run that is none": Situation(
        "data run --config=r.py --out=out --config.against=texts"
    ),
    "a plot that cannot be written": Situation("config plot --config=c.py --out=c.py/rate.png"),
    "an imported model as a workdir": Situation(
        "train --config=c.py --workdir=imported", "mkdir imported; touch imported/imported.json"
    ),
    "damaged shards": Situation(
        "data check tokens/train",
        "for f in tokens/train/*.bin tokens/train/*.tokens; do [ -f $f ] && printf x >> $f; "
        "done; true",
    ),
    "half a process": Situation("train --config=c.py --workdir=new --process_id=0"),
    "a pattern of no parameter": Situation(f"train {CONFIG} --config.optim.freeze=frobnicate/*"),
    "every parameter frozen": Situation(f"train {CONFIG} --config.optim.freeze=*"),
    "two groups of one parameter": Situation(
        f"train {CONFIG} --config.optim.lr_scale=embedding/*=0.5,embed*=0.1"
    ),
    "a set to follow like none": Situation(
        f"train {CONFIG} --config.data.validation=aa=tail:20% --config.eval.follow=ab"
    ),
    "other data in the workdir": Situation(
        f"train --config=c.py {RUN} --config.train.steps=3", "printf 'more text\\n' >> texts/1.txt"
    ),
    "an export of no run": Situation("export --workdir=none --out=out"),
    "a model of no such type": Situation(
        "import --from=odd --workdir=new",
        "cp -r exported odd; sed -i 's/llama/frobnicate/' odd/config.json",
    ),
    "a sweep of one run": Situation("sweep --config=c.py --workdir=new"),
    "a sweep in a run": Situation("sweep --config=c.py --workdir=runs/a --seeds=2"),
    "a sweep without values": Situation("sweep --config=c.py --workdir=new --vary=seed"),
    "a sweep of a list": Situation(
        "sweep --config=c.py --workdir=new --seeds=2 --vary=optim.freeze=embedding/*,final_norm/*"
    ),
    "a sweep of a setting misspelt": Situation(
        "sweep --config=c.py --workdir=new --vary=optim.lrr=1e-3,3e-3"
    ),
    "a sweep in a setting": Situation("sweep --config=c.py --workdir=new --config.seed=1,2"),
    "a sweep of a setting twice": Situation(
        "sweep --config=c.py --workdir=new --vary=seed=1 --vary=seed=2"
    ),
    "a sweep over other runs": Situation(
        "sweep --config=c.py --workdir=s --vary=seed=1,2",
        'mkdir -p s/seed=1; sed \'s/"steps": 2/"steps": 3/\' runs/a/config.json > '
        "s/seed=1/config.json",
    ),
    "a comparison of one run": Situation("compare runs/a"),
    "a comparison of nothing": Situation("compare"),
    "a comparison with no run": Situation("compare runs/a texts"),
    "a list of runs of no folder": Situation("runs none"),
    "an import of no folder": Situation("import --from=none --workdir=new"),
    "a rewind that is none": Situation(f"replay {RUN} --step=1 --rewinds=5"),
    # what comes next
    "next of train": Situation("train --config=c.py --workdir=new", code=0),
    "next of train, continued without a config": Situation("train --workdir=runs/a", code=0),
    "next of a run without validation": Situation(
        "train --config=c.py --workdir=new '--config.data.validation=()'", code=0
    ),
    "next of a run that predicts hidden tokens": Situation(
        "train --config=c.py --workdir=new --config.model.family=bert --config.model.width=32 "
        "--config.model.depth=1 --config.model.heads=4 --config.model.max_positions=64 "
        "--config.objective.name=masked",
        code=0,
    ),
    "next of data run": Situation("data run --config=r.py --out=out", code=0, more=SHORT),
    "next of data tokenize": Situation("data tokenize --config=c.py --out=out", code=0),
    "next of data mix": Situation(
        "data mix --config.sources=a=clean --config.tokenizer=bytes --out=out", code=0, more=SHORT
    ),
    "next of data mix with held out text": Situation(
        "data mix --config.sources=a=clean --config.tokenizer=bytes --config.held_out=0.2 "
        "--out=out",
        code=0,
        more=SHORT,
    ),
    "next of import": Situation("import --from=exported --workdir=imported", code=0),
}


MORE = (
    situations_policy,
    situations_preferences,
    situations_prepare,
    situations_recipes,
    situations_rewards,
    situations_serving,
    situations_stores,
    situations_tasks,
    situations_teaching,
    situations_texts,
    situations_tuning,
)
for each in MORE:
    assert not SITUATIONS.keys() & each.SITUATIONS.keys()
    SITUATIONS |= each.SITUATIONS

# A complete run is not reported twice; an encoder generates no text.
NOTHING_NEXT = {"next of train, continued without a config"}

# Each is a run, or several, and another situation reaches the same places.
SLOW = {
    "a sweep's runs and a config",
    "a sweep of one run",
    "a sweep in a run",
    "a sweep without values",
    "a sweep of a list",
    "widths that are none",
    "a sweep of a setting misspelt",
    "a sweep in a setting",
    "a sweep over other runs",
    "a setting as a flag, its value apart",
    "a flag misspelt",
    "a flag with dashes",
    "flags before the verb",
    "no such verb",
    "train without a workdir",
    "train without a config",
    "scale with widths alone",
    "another config in the workdir",
    "init_from another model",
    "start_at of no step",
    "lr-find over an earlier one",
    "two groups of one parameter",
    "a pattern of no parameter",
    "a set to follow like none",
    "other data in the workdir",
    "next of train, continued without a config",
    "next of a run that predicts hidden tokens",
    "next of data tokenize",
    "next of data mix",
    "next of data run with more rules",
    "scale with runs and a sweep",
    "a rewind that is none",
    "a set of an objective that is none",
    "lr-find that is not finite",
    "too little text held out",
    "a run that diverges",
    "a run that is not a number",
    "a loss of text of a reward model",
    "a penalty by fresh weights",
    "a verb like none",
    "an imported model without text",
    "a collection without a judge",
    "a teacher of another vocabulary",
    "next of data run",
    "a setting as a flag",
    "a step that comes out otherwise",
}


SLOW = SLOW.union(*(each.SLOW for each in MORE))


@pytest.fixture(scope="module")
def base(tmp_path_factory, one_device, without_plots):
    """A user's folder: texts, config, recipe, run, token shards, corpus, exported model."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "texts").mkdir()
    for number in range(12):
        lines = (f"Text {number} speaks of line {n} and no more.\n" for n in range(30))
        (folder / f"texts/{number}.txt").write_text("".join(lines))
    (folder / "c.py").write_text(TINY)
    (folder / "r.py").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in (
            "train --config=c.py --workdir=runs/a --quiet",
            "data tokenize --config=c.py --out=tokens --quiet",
            "data run --config=r.py --out=clean --quiet",
            "data mix --config.sources=a=clean --config.tokenizer=bytes --out=mixed --quiet",
            "export --workdir=runs/a --out=exported --quiet",
        ):
            assert main(words.split()) == 0
    return folder


class Places:
    """The lines of the code that make fixes and `next:` lines, and which of them ran."""

    def __init__(self):
        self.ran, self.seen = set(), set()

    @functools.cached_property  # it reads all of the code, and only a trace needs it
    def known(self):
        return dict(sites())

    @functools.cached_property
    def lines(self):
        lines = {}
        for place, (file, first, last) in self.known.items():
            for line in range(first, last + 1):
                lines.setdefault((file, line), []).append(place)
        return lines

    @functools.cached_property
    def files(self):
        return {file for file, _ in self.lines}

    def trace(self, frame, event, arg):
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            self.ran.update(self.lines.get((frame.f_code.co_filename, frame.f_lineno), ()))
        return self.trace


def sites():
    """Yield each place that makes a line to paste: a lasting name, its file and lines."""
    for path in sorted((ROOT / "jaxlm").rglob("*.py")):
        tree = ast.parse(path.read_text())
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        numbers = collections.Counter()  # methods of several classes may have one name
        for function in functions:
            inner = {
                id(n)
                for f in ast.walk(function)
                if f is not function and isinstance(f, ast.FunctionDef)
                for n in ast.walk(f)
            }
            named = assigned(function)
            returns = ast.unparse(function.returns) if function.returns else ""
            yields_problems = returns in ("Problems", "Iterator[tuple[str, str, str]]")
            for node in ast.walk(function):
                if isinstance(node, ast.Yield) and not yields_problems:
                    continue  # it yields three values without a fix
                if id(node) not in inner and makes_lines(node, named):
                    numbers[function.name] += 1
                    name = (
                        f"{path.relative_to(ROOT / 'jaxlm')}:{function.name}:"
                        f"{numbers[function.name]}"
                    )
                    yield name, (str(path), node.lineno, node.end_lineno)


def assigned(function):
    """Return the values that each name of a function is assigned."""
    values = collections.defaultdict(list)
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=False)  # one may be starred
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    values[name.id].append(value)
    return values


def makes_lines(node, named):
    """Return True if a piece of code makes a fix or a `next:` line that may be pasted.

    Code that passes one on (`self.fix`) does not make it.
    """
    match node:
        case ast.Call(keywords=keywords):
            return any(
                each.arg == "fix"
                and ast.unparse(each.value) != "self.fix"
                and any(map(may_be_pasted, values_of(each.value, named)))
                for each in keywords
            )
        case ast.Yield(value=ast.Tuple(elts=[_, _, fix])):
            return any(map(may_be_pasted, values_of(fix, named)))
        case ast.Constant(value=str(text)):
            return text.startswith("next: ")
    return False


def values_of(fix, named):
    """Return what a fix may be: of a name, the values that it is assigned."""
    return named.get(fix.id) or [fix] if isinstance(fix, ast.Name) else [fix]


def may_be_pasted(fix):
    texts = [
        n.value for n in ast.walk(fix) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    return not texts or any(COMMAND.match(line) for text in texts for line in text.splitlines())


@pytest.fixture(scope="module")
def places():
    return Places()


def run(words, places, capsys, trace=False):
    """Return the exit code and all that a command line wrote."""
    capsys.readouterr()
    before = sys.gettrace()
    if trace and places.files:
        sys.settrace(places.trace)
    try:
        code = main(words)
    finally:
        sys.settrace(before)
    return code, capsys.readouterr()


def error_of(written):
    """Return the parts of the error that a command wrote, or None."""
    try:
        return json.loads(written.out.strip().splitlines()[-1]).get("error")
    except (ValueError, IndexError, AttributeError):
        return None


def pasted(words, error, line):
    """Return the command line with a fix pasted into it."""
    flags = shlex.split(line, comments=True)
    names = {flag.partition("=")[0] for flag in flags}
    unknown = any(output in error["what"] for output in ("unknown", "not a setting", "not allowed"))
    wrong = shlex.split(error["where"])[-1] if unknown else None
    remaining, skip = [], False
    for at, word in enumerate(words):
        follows = at + 1 < len(words) and "=" not in word and not words[at + 1].startswith("-")
        is_wrong = (
            word == wrong or word.partition("=")[0] == wrong or word.partition("=")[0] in names
        )
        if not is_wrong and not skip:
            remaining.append(word)
        skip = is_wrong and follows and word.startswith("--")
    at = remaining.index("--") if "--" in remaining else len(remaining)
    return [*remaining[:at], *flags, *remaining[at:]]


def follow(line, words, error, more, places, capsys, depth=0):
    """Paste a line, and the fixes of what it leads to; return the failure, or None.

    Args:
      line: the line to paste.
      words: the words of the command line that printed it.
      error: the error that the command line raised, or None.
      more: flags that make a pasted command short.
      places: places that make lines, and those that were reached.
      capsys: the output of this process.
      depth: number of lines that were pasted before this one.
    """
    to = None  # the file that the output is written to
    if not COMMAND.match(line):
        file, _, number = error["where"].rpartition(":") if error else ("", "", "")
        if not number.isdecimal() or not re.match(r"[\w.]+(, [\w.]+)* = ", line):
            return None  # words for a person
        lines = Path(file).read_text().splitlines()
        old = lines[int(number) - 1]
        lines[int(number) - 1] = old[: len(old) - len(old.lstrip())] + line
        Path(file).write_text("\n".join(lines) + "\n")
        repeated = words
    elif line.startswith("jaxlm "):
        command = shlex.split(line, comments=True)[1:]
        *command, to = command if ">" in command else [*command, None]
        command = command[:-1] if to else command
        short = [w for w in shlex.split(more) if command[0] in ("train", "bench")]
        flags = {w.partition("=")[0] for w in command}
        repeated = [*command, *(w for w in short if w.partition("=")[0] not in flags)]
    elif line.startswith(("--", "'")):
        repeated = pasted(words, error, line)
        short = shlex.split(more) if repeated[:1] == ["train"] else []
        flags = {w.partition("=")[0] for w in repeated}
        repeated += [w for w in short if w.partition("=")[0] not in flags]
    elif line.startswith("export JAXLM_"):  # read at each use, so this process may set it
        name, _, value = shlex.split(line, comments=True)[1].partition("=")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", os.getcwd())
            patch.setenv(name, os.path.expanduser(value))
            code, written = run([*words, "--json"], places, capsys)
            used = Path(os.environ[name])
        return None if code == 0 and used.is_dir() else f"{line}: {code}, {written}"
    else:
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        return None if done.returncode == 0 else done.stderr
    if "--help" not in repeated and "--json" not in repeated:
        repeated = [*repeated, "--json"]
    code, written = run(repeated, places, capsys)
    if code == 0:
        if to:
            Path(to).write_text(written.out)
        return None
    after = error_of(written)
    if after is None or depth == LONGEST_CHAIN or after == error:
        return f"{repeated} ended with {code}: {after or written}"
    return follow(after["fix"].splitlines()[0], repeated, after, more, places, capsys, depth + 1)


def marked(name):
    return pytest.param(name, marks=pytest.mark.slow if name in SLOW else (), id=name)


def copied(base, folder, situation):
    """Make a fresh copy of the base folder, apply the change of the situation, and enter it.

    Commands that only read a config get no copy of what other commands have made.
    """
    text = f"{situation.words} {situation.change}"
    reads_config = text.startswith("config ") and not any(name in text for name in MADE)
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns(*MADE) if reads_config else None)
    os.chdir(folder)
    shell = situation.change
    while command := JAXLM.search(shell):
        bash(shell[: command.start()])
        shell = shell[command.end() :]
        folder, words = command.groups()
        if folder is None or not Path(folder).is_dir():
            assert main(shlex.split(words)) == 0, words
    bash(shell)


def bash(shell):
    if shell.strip():
        subprocess.run(["bash", "-c", shell], check=True)


def first(situation, places, capsys, trace):
    """Run the command line of a situation; return its code and what it wrote."""
    with pytest.MonkeyPatch.context() as patch:
        if situation.prepare:
            situation.prepare(patch)
        return _first(situation, places, capsys, trace)


def _first(situation, places, capsys, trace):
    words = shlex.split(situation.words)
    at = words.index("--") if "--" in words else len(words)
    is_text = "--json" in words or situation.code == 0
    return run(words if is_text else [*words[:at], "--json", *words[at:]], places, capsys, trace)


@pytest.mark.parametrize("name", [marked(name) for name in SITUATIONS])
def test_each_line_that_is_printed_works_when_it_is_pasted(
    name, base, places, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    situation = SITUATIONS[name]
    words = shlex.split(situation.words)
    copied(base, tmp_path / "first", situation)
    # Tracing takes a third of the time, and only a slow test reads what it finds.
    is_traced = name in SLOW
    code, written = first(situation, places, capsys, is_traced)
    if is_traced:
        places.seen.add(name)
    if situation.code == 0:
        assert code == 0, written
        block = re.search(r"next:? +(jaxlm .*(?:\n +jaxlm .*)*)", written.out + written.err)
        lines = [line.strip() for line in block[1].splitlines()] if block else []
        error, following = None, [("first", line) for line in lines]
        assert lines or name in NOTHING_NEXT
    else:
        assert code not in (0, 70), written
        error = error_of(written)
        assert error, written
        following = list(enumerate(error["fix"].splitlines()))
    for part, line in following:
        if part != "first":
            shutil.copytree(tmp_path / "first", tmp_path / str(part))  # as the error left it
            os.chdir(tmp_path / str(part))
        wrong = follow(line, words, error, situation.more, places, capsys)
        assert wrong is None, f"{line}\n{wrong}"


ELSEWHERE = {place: test for each in MORE for place, test in each.ELSEWHERE.items()}
NOT_YET = set().union(*(each.NOT_YET for each in MORE))


def test_every_test_that_pastes_a_line_elsewhere_exists():
    for place, test in ELSEWHERE.items():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), f"{place}: there is no {test}"


@pytest.mark.slow  # it runs every situation
@pytest.mark.timeout(2400)
def test_every_place_that_makes_such_a_line_is_reached(base, places, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # Those that no slow test has run and traced: all of them, if this test runs alone.
    for number, name in enumerate(sorted(SITUATIONS.keys() - places.seen)):
        copied(base, tmp_path / str(number), SITUATIONS[name])
        first(SITUATIONS[name], places, capsys, True)
    left = places.known.keys() - places.ran
    new = sorted(left - NOT_YET - ELSEWHERE.keys())
    assert not new, f"no situation reaches {new}"
    gone = sorted((NOT_YET | ELSEWHERE.keys()) - places.known.keys())
    assert not gone, f"listed, and gone: {gone}"
