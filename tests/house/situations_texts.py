"""Situations of text, tokenizers, models and objectives, whose fixes `test_fix_lines` pastes."""

import errno
import json
import shlex
import sys
from typing import Any

import pytest

from jaxlm.data import cache
from jaxlm.data.tokenizer import Bytes
from jaxlm.monitor import trackers
from tests.house.situation import Situation


def _full_disk(patch: pytest.MonkeyPatch) -> None:
    """Let the disk of the cache of tokens be full."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/cache")

    patch.setenv("JAXLM_CACHE", "cache")
    patch.setattr(cache, "built", refuse)


def _broken_tokenizer(patch: pytest.MonkeyPatch) -> None:
    """Let a tokenizer give an id outside its table."""
    patch.setenv("JAXLM_CACHE", "cache")
    patch.setattr(Bytes, "encode_many", lambda self, texts: [[self.size] for _ in texts])


def _no_trackio(patch: pytest.MonkeyPatch) -> None:
    """Let the package of a tracker be missing."""
    patch.setitem(trackers.MODULES, "trackio", "no_such_tracker")


def _shell(program: str) -> str:
    """Return the shell command that runs a program in Python."""
    return f"{sys.executable} -c {shlex.quote(program)}"


def _written(name: str, value: Any) -> str:
    """Return the shell command that writes a value as JSON."""
    return f"printf %s {shlex.quote(json.dumps(value))} > {name}"


def _vocabulary(**ids: int) -> dict[str, Any]:
    """Return the content of a tokenizer.json of whole words."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": "a"},
    }


DAMAGE = "mv tokens 'my tokens'; " + _shell(
    "import pathlib; path = next(pathlib.Path('my tokens/train').glob('*tokens*')); "
    "data = bytearray(path.read_bytes()); data[40:44] = b'zzzz'; path.write_bytes(data)"
)
PIECES = _shell(
    "import sentencepiece as s; s.SentencePieceTrainer.train(input='texts/0.txt', "
    "model_prefix='m', "
    "vocab_size=60, hard_vocab_limit=False, minloglevel=2)"
)
CHATS = _shell(
    "import json; f = open('chat.jsonl', 'w'); turn = lambda role, text: {'role': role, "
    "'content': text}; "
    "[print(json.dumps({'messages': [turn('user', f'q{n}'), turn('assistant', 'a' * (200 if n == "
    "7 else 1))]}), file=f) for n in range(60)]"
)
QA = _shell(
    "import json; f = open('qa.jsonl', 'w'); lines = [{'question': f'{n} + 1?', 'answer': str(n), "
    "'text': 'words', 'turns': []} for n in range(40)]; "
    "f.writelines(json.dumps(each) + '\\n' for each in lines)"
)
QUESTIONS = "--config.data.train=qa.jsonl --config.data.validation=20% --config.data.sequence=128"
CHAT = "--config.data.train=chat.jsonl --config.data.kind=chat"
ON_CHATS = f"data stats --config=c.py {CHAT} --config.data.sequence=64 --config.data.validation=20%"
REFUSES = (
    "; echo \"{{ raise_exception('no') if messages[0].content == 'q5' }}{% for m in "
    'messages %}{{ m.content }}{% endfor %}" > own.jinja'
)
ON_TOKENS = (
    "train --config=c.py --workdir=new '--config.data.train=my tokens/train' "
    "'--config.data.validation=my tokens/val' '--config.data.tokenizer=my tokens/train/tokenizer'"
)
TWO = (
    "train --config=c.py --workdir=new --config.data.train=aa=texts/1.txt,bb=texts/2.txt "
    "--config.eval.follow=auto"
)
PART = _shell(
    "open('mine.py', 'w').write('''import dataclasses\n"
    "from jaxlm.objectives.facts import ObjectiveFacts\n"
    "from jaxlm.objectives.objective import Objective\n@dataclasses.dataclass(frozen=True)\n"
    "class Own(ObjectiveFacts):\n    keeps_rows = evaluated_as_causal = True\n"
    "    def build(self, loss, architecture):\n"
    "        return Objective(self, loss, architecture)\n''')"
)
READING = (
    'printf \'import pathlib\\ndef texts():\\n    for path in pathlib.Path("texts").iterdir():\\n'
    "        yield path.read_text()\\n' > reading.py"
)

SITUATIONS: dict[str, Situation] = {
    # text and token shards
    "tokens into a place that is no folder": Situation(
        "data tokenize --config=c.py --out=c.py/tokens"
    ),
    "a cache that is a file": Situation(
        "data stats --config=c.py",
        prepare=lambda patch: patch.setenv("JAXLM_CACHE", "/dev/null/cache"),
    ),
    "a cache on a full disk": Situation("data stats --config=c.py", prepare=_full_disk),
    "validation by tokens of another tokenizer": Situation(
        "data stats --config=c.py --config.data.validation=tokens/val "
        "--config.data.tokenizer=characters"
    ),
    "a batch of more rows than the text has": Situation(
        "train --config=c.py --workdir=new --config.data.train=texts/0.txt --config.train.batch=64"
    ),
    "a share that holds no document": Situation(
        "data stats --config=c.py --config.data.train=texts/0.txt --config.data.validation=5%"
    ),
    "token shards changed in place": Situation("data check 'my tokens/train'", DAMAGE),
    "training on token shards changed in place": Situation(ON_TOKENS, DAMAGE),
    "a look at two sources, one of them damaged": Situation(
        "data peek --config=c.py '--config.data.train=aa=my tokens/train,bb=my tokens/val' "
        "'--config.data.validation=()' '--config.data.tokenizer=my tokens/train/tokenizer' "
        "--config.train.batch=64 --rows=64",
        DAMAGE,
    ),
    "more damage than may be lost": Situation(f"{ON_TOKENS} --config.data.damaged=skip", DAMAGE),
    "data from Python whose copy is gone": Situation(
        "train --config=c.py --workdir=new --config.data.train=python:0"
    ),
    # conversations
    # fields of records under other names
    **{
        f"fields {why}": Situation(
            f"config validate --config=c.py {QUESTIONS} --config.data.kind={kind} "
            f"--config.data.fields={fields}",
            QA,
        )
        for why, kind, fields in (
            ("of text", "text", "user=question"),
            ("without a name", "chat", "question"),
            ("of an unknown name", "chat", "usr=question,assistant=answer"),
            ("of one name", "chat", "user=question,user=answer,assistant=answer"),
            ("of messages and turns", "chat", "messages=turns,system=system"),
            ("without an answer", "chat", "user=question"),
        )
    },
    "questions and answers as conversations": Situation(
        f"data stats --config=c.py {QUESTIONS} --config.data.kind=chat", QA
    ),
    "conversations under another name": Situation(
        ON_CHATS, CHATS + "; sed -i 's/messages/turns/' chat.jsonl"
    ),
    "conversations under another name as text": Situation(
        f"{ON_CHATS} --config.data.kind=text", CHATS + "; sed -i 's/messages/turns/' chat.jsonl"
    ),
    "pairs under other names": Situation(
        f"data stats --config=c.py {QUESTIONS} --config.data.kind=pairs",
        QA + "; sed -i 's/answer/good/; s/text/bad/' qa.jsonl",
    ),
    "questions that are rewarded": Situation(
        f"data stats --config=c.py {QUESTIONS} --config.data.kind=prompts", QA
    ),
    "init of texts under another name": Situation(
        "init --data=web.jsonl --on=t4",
        QA + "; sed 's/text/body/; s/answer/note/' qa.jsonl > web.jsonl",
    ),
    "a table as conversations": Situation(
        "data stats --config=c.py --config.data.kind=chat --config.data.validation=20% "
        "--config.data.train=qa.csv",
        "printf 'question,answer\\n1,2\\n' > qa.csv",
    ),
    "a field that records do not have": Situation(
        f"data stats --config=c.py {QUESTIONS} --config.data.kind=chat "
        "--config.data.fields=user=question,assistant=anwser",
        QA,
    ),
    "fields that are joined and no texts": Situation(
        f"data stats --config=c.py {QUESTIONS} --config.data.kind=chat "
        "--config.data.fields=user=question+turns,assistant=answer",
        QA,
    ),
    "a chat template that is none": Situation(
        f"{ON_CHATS} --config.data.template=own.jinja", f"{CHATS}; echo '{{% for %}}' > own.jinja"
    ),
    "a chat template that is not there": Situation(
        f"{ON_CHATS} --config.data.template=own.jinja", CHATS
    ),
    "conversations without a mask of documents": Situation(
        f"{ON_CHATS} --config.objective.document_mask=False", CHATS
    ),
    "a conversation that the template refuses": Situation(
        f"{ON_CHATS} --config.data.template=own.jinja", CHATS + REFUSES
    ),
    "a conversation longer than a row": Situation(
        f"{ON_CHATS} --config.data.overlong=error", CHATS
    ),
    "text as conversations": Situation(
        "data stats --config=c.py --config.data.kind=chat --config.data.validation=20% "
        "--config.data.train=text.jsonl",
        'echo \'{"text": "one two three"}\' > text.jsonl; for n in 1 2 3 4 5 6 7 8 9; do echo '
        "'{\"text\": \"'$n'\"}' >> text.jsonl; done",
    ),
    "a prompt that is trained on": Situation(
        f"data stats --config=c.py {CHAT} --config.data.sequence=64 "
        "--config.data.validation=held.jsonl",
        CHATS + '; sed \'s/"a"/"b"/\' chat.jsonl > held.jsonl',
    ),
    "conversations under an objective that changes rows": Situation(
        f"{ON_CHATS} --config.objective.name=prefix", CHATS
    ),
    "a role that is none": Situation("config validate --config=c.py --config.data.roles=bot"),
    "no role": Situation("config validate --config=c.py '--config.data.roles=()'"),
    "init of conversations": Situation(
        "init --data=chat.jsonl --on=t4",
        CHATS + "; cp -r runs/a runs/base",
        more="--config.train.steps=1 --config.train.batch=4 --config.data.sequence=64",
    ),
    "a kind of no source": Situation(
        "config validate --config=c.py --config.data.kind=chat --config.data.validation=5% "
        "--config.data.train=talk=chat.jsonl,web=texts/*.txt --config.data.kinds=wob=text",
        CHATS,
    ),
    "a kind like none of a source": Situation(
        "config validate --config=c.py --config.data.kind=chat --config.data.validation=5% "
        "--config.data.train=talk=chat.jsonl,web=texts/*.txt --config.data.kinds=web=prose",
        CHATS,
    ),
    "a kind twice": Situation(
        "config validate --config=c.py --config.data.kind=chat --config.data.validation=5% "
        "--config.data.train=talk=chat.jsonl,web=texts/*.txt --config.data.kinds=web=text,web=chat",
        CHATS,
    ),
    "the library as conversations": Situation("config validate --config.data.kind=chat", CHATS),
    "the end of conversations as a set": Situation(
        "config validate --config=c.py --config.data.kind=chat"
    ),
    "conversations in rows that grow": Situation(
        f"config validate --config=c.py {CHAT} --config.data.validation=20% "
        "--config.data.sequence_warmup=16@50%"
    ),
    # mixtures
    "an epoch of less than a row": Situation(
        f"{TWO} --config.data.mixture.name=temperature --config.data.mixture.epochs=aa=0.0001"
    ),
    "fewer epochs than the run takes": Situation(
        f"{TWO} --config.data.mixture.name=temperature --config.data.mixture.epochs=aa=0.1,bb=0.1"
    ),
    "no weight where a source has ended": Situation(
        f"{TWO} --config.train.steps=4 --config.data.mixture.name=weights "
        "--config.data.mixture.weights=aa=1@0..1@50%..0.5@100%,bb=0@0..0@50%..0.5@100% "
        "--config.data.mixture.epochs=aa=0.1"
    ),
    "rows beyond the most epochs": Situation(
        "data peek --config=c.py --step=20 --config.data.train=aa=texts/1.txt,bb=texts/2.txt "
        "--config.data.mixture.name=temperature --config.data.mixture.epochs=aa=0.3,bb=0.3"
    ),
    # tokenizers
    "a tokenizer.json that is none": Situation(
        "data stats --config=c.py --config.data.tokenizer=bad.json", "echo '{}' > bad.json"
    ),
    "a tokenizer.json of a huge id": Situation(
        "data stats --config=c.py --config.data.tokenizer=bad.json",
        _written("bad.json", _vocabulary(a=0, b=2**31)),
    ),
    "a trained tokenizer without the special tokens": Situation(
        "data stats --config=c.py --config.data.tokenizer=bad.json",
        _written("bad.json", {"kind": "trained", "content": json.dumps(_vocabulary(a=0))}),
    ),
    "a SentencePiece model without the special tokens": Situation(
        "data stats --config=c.py --config.data.tokenizer=m.model", PIECES
    ),
    "a tokenizer of our own that is damaged": Situation(
        "data stats --config=c.py --config.data.tokenizer=bad.json",
        'echo \'{"kind": "characters", "characters": 5}\' > bad.json',
    ),
    "a tokenizer file of a gigabyte": Situation(
        "data stats --config=c.py --config.data.tokenizer=big.json", "truncate -s 1G big.json"
    ),
    "a tokenizer that gives ids of no token": Situation(
        "data stats --config=c.py", prepare=_broken_tokenizer
    ),
    "a tokenizer that no GGUF has": Situation("export --workdir=runs/a --to=gguf --out=model.gguf"),
    # models, objectives, schedules
    "numbers of another head in a long rope": Situation(
        "config validate --config.model.family=phi3 --config.model.rope_scaling.name=long "
        "--config.model.rope_scaling.short=1 --config.model.rope_scaling.long=1"
    ),
    "a mixture of objectives without any": Situation(
        "config validate --config.objective.name=mixture --config.objective.weights.causal=0 "
        "--config.objective.weights.fim=0"
    ),
    "rows too short for an objective": Situation(
        "train --config=c.py --workdir=new --config.objective.name=fim --config.data.sequence=4"
    ),
    # parts of a user
    "a part in no file": Situation(
        "config validate --config=c.py --config.objective.name=none.py:Own"
    ),
    "a part in no module": Situation(
        "config validate --config=c.py --config.objective.name=none.none:Own"
    ),
    "a part of another name": Situation(
        "config validate --config=c.py --config.objective.name=mine.py:Owm", PART
    ),
    "a part that lacks a method": Situation(
        "config validate --config=c.py --config.objective.name=mine.py:Own",
        f"{PART}; sed -i s/build/built/ mine.py",
    ),
    "a function of another name": Situation(
        "data stats --config=c.py --config.data.train=reading.py:textz", READING
    ),
    "a function in a file without any": Situation(
        "data stats --config=c.py --config.data.train=reading.py:texts", "echo > reading.py"
    ),
    "a part that changes rows in workers": Situation(
        "config validate --config=c.py --config.objective.name=mine.py:Own --config.data.workers=1",
        f"{PART}; sed -i s/keeps_rows/other/ mine.py",
    ),
    "a part whose file is gone": Situation(
        "train --workdir=runs/own",
        f"{PART}; {sys.executable} -m jaxlm train --config=c.py --workdir=runs/own "
        "--config.objective.name=mine.py:Own --quiet; rm mine.py",
    ),
    # reports and trackers
    "a figure of a run of another shape": Situation(
        "report --workdir='runs/my run'",
        "mv runs/a 'runs/my run'; " + _written("'runs/my run/exit.json'", [1]),
    ),
    "a tracker that is not installed": Situation(
        "train --config=c.py --workdir=new --config.log.sinks=console,trackio", prepare=_no_trackio
    ),
}

# Of these, the ones that take long.
SLOW = {
    "init of conversations",
    "an epoch of less than a row",
    "no weight where a source has ended",
    "a batch of more rows than the text has",
    "rows too short for an objective",
    "training on token shards changed in place",
    "more damage than may be lost",
    "a part whose file is gone",
}

# Places whose lines are pasted by another test: PLACE -> tests/FILE::TEST.
ELSEWHERE: dict[str, str] = {
    "data/dataset.py:_loader:1": "tests/data/"
    "test_chat_documents.py::test_token_shards_of_conversations_keep_weights_and_template",
    "core/hub.py:_translated:1": "tests/data/"
    "test_remote.py::test_without_the_hub_its_copies_are_used",
    "data/remote.py:_full:1": "tests/data/"
    "test_remote.py::test_a_disk_without_room_is_refused_before_anything_is_copied",
    "data/remote.py:_of_hub:1": "tests/data/"
    "test_remote.py::test_a_file_that_arrives_damaged_is_refused",
    "data/loader.py:_closing:1": "tests/faults/"
    "test_data.py::test_e8_a_killed_loader_worker_ends_the_run_with_70_in_five_seconds",
    "optim/schedule_config.py:cautions:1": "tests/cli/"
    "test_config.py::test_validate_names_what_the_run_does_not_reach_and_how_it_would",
    "optim/schedule_config.py:lr_factor:1": "tests/optim/"
    "test_schedules.py::test_a_schedule_that_does_not_fit_is_refused_by_what_builds_it_too",
}

# Places that no test reaches yet.
NOT_YET: set[str] = set()
