"""lm-evaluation-harness with a run: the results are those of `jaxlm eval --tasks`."""

import inspect
import json
import subprocess
import sys
import textwrap

import pytest
import yaml

from jaxlm.cli.main import main as jaxlm
from jaxlm.core.errors import ConfigError

pytestmark = pytest.mark.parity

TASK = """\
task: facts
dataset_path: json
dataset_kwargs: {data_files: {test: ITEMS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{ q }} ="
doc_to_choice: "{{ choices }}"
doc_to_target: "{{ answer }}"
"""
WRITTEN = """\
task: written
dataset_path: json
dataset_kwargs: {data_files: {test: ITEMS}}
test_split: test
output_type: generate_until
doc_to_text: "{{ q }} ="
doc_to_target: "{{ choices[answer] }}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
"""
READ = """\
task: read
dataset_path: json
dataset_kwargs: {data_files: {test: ITEMS}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{ text }}"
metric_list: [{metric: byte_perplexity}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two steps, and task files over sums."""
    folder = tmp_path_factory.mktemp("lm_eval")
    items = [
        {
            "q": f"{a} + {b}",
            "choices": [str(a + b), str(a + b + 1), "7"],
            "answer": 0,
            "text": f"{a} + {b} = {a + b}. " * 20,
        }
        for a in range(11, 15)
        for b in range(20, 23)
    ]
    lines = "".join(json.dumps(item) + "\n" for item in items)
    (folder / "items.jsonl").write_text(lines)
    for name, text in (("facts", TASK), ("written", WRITTEN), ("read", READ)):
        (folder / f"{name}.yaml").write_text(text.replace("ITEMS", str(folder / "items.jsonl")))
    flags = ["model.width=32", "model.depth=2", "model.heads=2", "data.sequence=64"]
    flags += ["train.batch=8", "train.steps=2", "data.tokenizer=bytes", "eval.batches=1"]
    flags += ["precision.compute=float32"]
    words = ["--config=quickstart", f"--workdir={folder / 'run'}", "--quiet"]
    assert jaxlm(["train", *words, *(f"--config.{flag}" for flag in flags)]) == 0
    return folder


def samples(folder, name):
    """Results of lm-eval's command line for a task, by the number of the item."""
    out = folder / f"out-{name}"
    command = [sys.executable, "-W", "ignore", "-m", "jaxlm.recipes.lm_eval_model", "run"]
    command += ["--model", "jaxlm", "--model_args", f"run={folder / 'run'}", "--tasks", name]
    command += ["--include_path", str(folder), "--log_samples", "--output_path", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = out.rglob(f"samples_{name}_*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]


def our_samples(folder, name):
    """Samples of `jaxlm eval --tasks`, in the order of the items."""
    words = [f"--workdir={folder / 'run'}", f"--tasks={folder / f'{name}.yaml'}", "--quiet"]
    assert jaxlm(["eval", *words]) == 0
    (file,) = (folder / "run/evals").glob(f"*{name}*/samples.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_choices_have_the_log_likelihoods_of_jaxlm_eval(folder):
    theirs = [[float(choice[0][0]) for choice in item] for item in samples(folder, "facts")]
    ours = [[-nats for nats in row["nats"]] for row in our_samples(folder, "facts")]
    assert len(theirs) == len(ours) == 12
    for first, second in zip(theirs, ours, strict=True):
        assert first == pytest.approx(second, abs=1e-4)


def test_answers_are_those_of_jaxlm_eval(folder):
    theirs = [item[0][0] for item in samples(folder, "written")]
    assert theirs == [row["text"] for row in our_samples(folder, "written")]


def test_texts_longer_than_a_row_are_read_in_windows(folder):
    (nats, *_) = [float(item[0][0]) for item in samples(folder, "read")]
    ours = our_samples(folder, "read")
    assert nats == pytest.approx(-ours[0]["nats"], rel=0.05)


def test_what_the_model_cannot_do_is_refused_with_a_way_out(folder):
    # These are only in the environment that compares with other programs.
    from lm_eval.api.instance import Instance

    from jaxlm.recipes.lm_eval_model import LmEvalModel

    def request(*arguments):
        return Instance(request_type="", doc={}, arguments=arguments, idx=0)

    model = LmEvalModel(str(folder / "run"), sequence=16)
    with pytest.raises(ConfigError, match="does not fit a row") as error:
        model.loglikelihood([request("a" * 20, "b")])
    assert error.value.fix == f"--model_args=run={folder / 'run'},sequence=21"
    with pytest.raises(ConfigError, match="top_z is no setting") as error:
        model.generate_until([request("a", {"top_z": 1})])
    assert error.value.fix == "remove top_z from the generation_kwargs of the task"


def test_prompts_of_a_chat_are_those_of_apply_chat_template(folder):
    import torch
    import transformers
    from lm_eval.api.task import ConfigurableTask

    words = inspect.getsource(textwrap).split()
    talk = [
        [
            {"role": "user", "content": f"{' '.join(words[at : at + 40])} ="},
            {"role": "assistant", "content": f"{at} {words[at]}"},
        ]
        for at in range(0, len(words), 40)
    ]
    lines = [json.dumps({"messages": each}) + "\n" for each in talk]
    (folder / "talk.jsonl").write_text("".join(lines))
    flags = ["model.width=32", "model.depth=2", "model.heads=2", "data.sequence=256"]
    flags += ["train.batch=8", "train.steps=2", "data.tokenizer=sentencepiece:512"]
    flags += ["eval.batches=1", "precision.compute=float32", "data.kind=chat"]
    flags += [f"data.train={folder / 'talk.jsonl'}", "data.validation=25%", "sample.prompts=()"]
    run = folder / "chat"
    words = ["--config=quickstart", f"--workdir={run}", "--quiet"]
    assert jaxlm(["train", *words, *(f"--config.{flag}" for flag in flags)]) == 0
    assert jaxlm(["export", f"--workdir={run}", f"--out={folder / 'hf'}", "--to=hf"]) == 0
    names = [f"--workdir={run}", f"--tasks={folder / 'facts.yaml'}", "--quiet", "--chat"]
    assert jaxlm(["eval", *names, "--shots=1"]) == 0
    (file,) = (run / "evals").glob("*/samples.jsonl")
    ours = [json.loads(line) for line in file.read_text().splitlines()]
    first = json.loads((file.parent / "results.json").read_text())["first_request"]

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
    items = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]

    def templated(messages, *, add_generation_prompt=True):
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    config = yaml.safe_load((folder / "facts.yaml").read_text())
    for number, (item, line) in enumerate(zip(items, ours, strict=True)):
        # lm-eval draws other examples: here it has that of `jaxlm eval` alone.
        (shot,) = line["shots"]
        examples = {"sampler": "first_n", "samples": [items[int(shot) - 1]]}
        task = ConfigurableTask(config=config | {"num_fewshot": 1, "fewshot_config": examples})
        shared = {"apply_chat_template": True, "chat_template": templated}
        context = task.fewshot_context(item, 1, fewshot_as_multiturn=False, **shared)
        for request, nats in zip(
            task.construct_requests(item, context, metadata=("facts", 0, 1), **shared),
            line["nats"],
            strict=True,
        ):
            _, answer = request.args
            ids = tokenizer.encode(context + answer, add_special_tokens=False)
            begin = len(tokenizer.encode(context, add_special_tokens=False))
            if not number and request.args[1] == str(item["choices"][0]):
                assert ids == first["ids"]
                assert begin == first["begin"]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            total = sum(float(logits[at - 1, ids[at]]) for at in range(begin, len(ids)))
            assert -nats == pytest.approx(total, abs=1e-4)
