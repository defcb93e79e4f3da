"""Seconds to prepare conversations for training: jaxlm and TRL's SFTTrainer, in turns.

    python -m venv peft && peft/bin/pip install torch==2.13.0 transformers==5.* trl==1.16.0
    python scripts/bench_chat.py --peft_python=peft/bin/python --out=runs/chat --file=gsm8k.jsonl

Each measurement is a process of its own and counts from the conversations to packed rows, without
imports. jaxlm reads the file, renders, encodes, masks, writes shards and plans rows. TRL has the
conversations in memory and runs `SFTTrainer._prepare_dataset` with `assistant_only_loss` and
packing, without workers and with two. Both have one tokenizer (byte pairs trained on Python's own
library) and TRL's template of the family; TRL trains with its copy that has `{% generation %}`.
Conversations are those of the file (lines of `messages`, or of `question` and `answer`), and
questions about Python's own documentation, with one to six turns. Before the rounds, ids and masks
of both sides are compared, conversation by conversation.
TRL's copy of Qwen 2.5's template also marks the newline before each answer and the one behind it.
"""

import argparse
import hashlib
import importlib
import inspect
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

FAMILIES = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>")),
    "qwen2_5": ("", "<|im_end|>", ("<|im_start|>", "<|endoftext|>")),
}
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEQUENCE, VOCAB = 1024, 32_000
SIDES = ("jaxlm", "trl", "trl with 2 workers")


def documented() -> list[tuple[str, str]]:
    """Return names and documentation of Python's own library."""
    texts = {}
    for module in sorted(sys.stdlib_module_names - {"antigravity", "this", "idlelib"}):
        if module.startswith("_"):
            continue
        try:
            loaded = __import__(module)
        except ImportError:
            continue
        for name, value in sorted(vars(loaded).items()):
            text = (
                inspect.getdoc(value) if inspect.isroutine(value) or inspect.isclass(value) else ""
            )
            if text and not name.startswith("_"):
                texts[f"{module}.{name}"] = text
    return list(texts.items())


def conversations(file: str | None, count: int) -> list[dict[str, Any]]:
    """Return conversations: those of a file, then questions about Python's documentation."""
    made = []
    for line in Path(file).read_text().splitlines() if file else ():
        record = json.loads(line)
        turns = record.get("messages") or [
            {"role": "user", "content": record["question"]},
            {"role": "assistant", "content": record["answer"]},
        ]
        made.append({"messages": turns})
    made, texts, draw = made[: count // 2], documented(), random.Random(0)
    while len(made) < count:
        turns = [{"role": "system", "content": "Answer from the documentation of Python."}]
        for name, text in draw.sample(texts, draw.randint(1, 6)):
            turns += [
                {"role": "user", "content": f"How do I use {name}?"},
                {"role": "assistant", "content": text[: draw.choice((200, 600, 1200))]},
            ]
        made.append({"messages": turns})
    return made


def make(family: str, folder: Path) -> None:
    """Write a fast tokenizer with a family's tokens and template (the other interpreter)."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    transformers, trl = (importlib.import_module(name) for name in ("transformers", "trl"))
    bos, eos, others = FAMILIES[family]
    built = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    built.decoder = decoders.ByteLevel()
    specials = [name for name in (bos, eos, *others) if name]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    built.train(
        [str(path) for path in sorted(Path(json.__file__).parents[1].glob("*.py"))], trainer
    )
    template = Path(str(trl.__file__)).parent / f"chat_templates/{family}.jinja"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=built,
        bos_token=bos or None,
        eos_token=eos,
        pad_token=eos,
        chat_template=template.read_text(),
    ).save_pretrained(folder)


def trl_side(folder: Path, workers: int | None, is_check: bool) -> dict[str, Any]:
    """Return seconds and figures of TRL's preparation (the other interpreter)."""
    datasets, transformers, trl = map(importlib.import_module, ("datasets", "transformers", "trl"))
    datasets.disable_progress_bars()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    small = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    lines = (folder / "chat.jsonl").read_text().splitlines()
    data = datasets.Dataset.from_list(list(map(json.loads, lines)))
    config = trl.SFTConfig(
        output_dir=str(folder / "trl"), max_length=SEQUENCE, packing=not is_check, report_to="none",
        assistant_only_loss=True, dataset_num_proc=workers, use_cpu=True, bf16=False,
    )  # fmt: skip
    seconds, prepared, original = [], [], trl.SFTTrainer._prepare_dataset

    def timed(*args: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        prepared.append(original(*args, **options))
        seconds.append(time.perf_counter() - begun)
        return prepared[-1]

    trl.SFTTrainer._prepare_dataset = timed
    trl.SFTTrainer(
        transformers.LlamaForCausalLM(small), config, train_dataset=data, processing_class=tokenizer
    )
    (rows,) = prepared
    result: dict[str, Any] = {"seconds": seconds[0], "rows": len(rows)}
    if is_check:
        masks = [[label != -100 for label in row["labels"]] for row in rows]
        result["digests"] = digests(zip(rows["input_ids"], masks, strict=True))
    return result


def jaxlm_side(folder: Path, is_check: bool) -> dict[str, Any]:
    """Return seconds and figures of jaxlm's preparation, with an empty cache."""
    import tempfile

    import numpy as np

    from jaxlm.data.config import DataConfig
    from jaxlm.data.dataset import open_data

    config = DataConfig(
        train=(str(folder / "chat.jsonl"),), validation=(), kind="chat", packing="first_fit",
        sequence=2**20 if is_check else SEQUENCE, tokenizer=str(folder / "ours/tokenizer"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as root:
        begun = time.perf_counter()
        data = open_data(config, seed=0, root=Path(root))
        seconds = time.perf_counter() - begun
        shards = data.train.shards
        result: dict[str, Any] = {"seconds": seconds, "rows": data.train.plan.rows}
        result |= shards.manifest.figures
        if is_check:
            sizes = shards.lengths(0, shards.documents).tolist()
            result["digests"] = digests(
                (shards.read(n, 0, size).tolist(), np.greater(shards.weights(n, 0, size), 0))
                for n, size in enumerate(sizes)
            )
    return result


def digests(pairs: Any) -> list[list[str]]:
    """Return the digests of the ids of each conversation, and of its ids and mask."""
    texts = ((json.dumps(ids), json.dumps(list(map(int, mask)))) for ids, mask in pairs)
    parts = [[ids, ids + mask] for ids, mask in texts]
    return [[hashlib.sha256(each[n].encode()).hexdigest() for each in parts] for n in range(2)]


def convert(folder: Path) -> None:
    """Write the tokenizer and the template as an imported model keeps them."""
    from jaxlm.data.hub_tokenizer import ImportedTokenizer

    content = (folder / "tokenizer.json").read_bytes()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    numbers = {each["content"]: each["id"] for each in json.loads(content)["added_tokens"]}
    before = [numbers[settings["bos_token"]]] if settings.get("bos_token") else []
    ours = ImportedTokenizer(content, before=before, after=[numbers[settings["eos_token"]]])
    (folder / "ours/hub").mkdir(parents=True, exist_ok=True)
    (folder / "ours/tokenizer").write_bytes(ours.serialize())
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / "ours/hub" / name).write_bytes((folder / name).read_bytes())


def measured(python: str, folder: Path, side: str, *, is_check: bool = False) -> dict[str, Any]:
    """Return the result of one side, in a process of its own."""
    interpreter = sys.executable if side == "jaxlm" else python
    command = [interpreter, __file__, f"--out={folder}", f"--side={side}"]
    command += ["--check"] if is_check else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{side}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(python: str, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Compare ids and masks, then return the seconds of each side in each round."""
    ours, theirs = (
        [Counter[str](each) for each in measured(python, folder, side, is_check=True)["digests"]]
        for side in SIDES[:2]
    )
    same_ids, same = ((a & b).total() for a, b in zip(ours, theirs, strict=True))
    count = ours[0].total()
    print(
        f"{folder.name}: ids of {same_ids} and masks of {same} of {count} conversations are equal"
    )
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            times[side].append(measured(python, folder, side)["seconds"])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peft_python", help="interpreter of the environment with TRL")
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--file", help="JSON lines of conversations, or of question and answer")
    parser.add_argument("--count", type=int, default=10_000, help="conversations (10,000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=("make", *SIDES), help="of the script itself")
    parser.add_argument("--check", action="store_true", help="the same")
    args = parser.parse_args()
    if args.side == "make":
        make(args.out.name, args.out)
    elif args.side == "jaxlm":
        print(json.dumps(jaxlm_side(args.out, args.check)))
    elif args.side:
        print(json.dumps(trl_side(args.out, 2 if "2" in args.side else None, args.check)))
    if args.side:
        return
    made = conversations(args.file, args.count)
    for family in FAMILIES:
        folder = args.out / family
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "chat.jsonl").write_text("".join(json.dumps(each) + "\n" for each in made))
        subprocess.run([args.peft_python, __file__, f"--out={folder}", "--side=make"], check=True)
        convert(folder)
        times = compare(args.peft_python, folder, args.rounds)
        for side, seconds in times.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, times["jaxlm"], strict=True))
            print(f"{family:8} {side:19} {statistics.median(seconds):6.2f} s  {ratio:.2f} of jaxlm")


if __name__ == "__main__":
    main()
