"""Pretraining, SFT, DPO and GRPO of a small model on sums whose demonstrations are half wrong.

    python scripts/chain.py --out=runs/chain [--seeds=0,1,2] [--controls] [--smallest]

Imitation of the demonstrations is right half of the time when it is sampled, and no better however
long it lasts; a verifier of answers is not bound by them. After each stage the answers to 1,000
sums that no stage trains on are compared, greedy and sampled. Prompts are held out by the digest of
their text. --controls trains on from the second stage in other ways: more imitation, a random
reward, a reward of the form alone, and imitation of samples that the verifier accepts. --smallest
runs all stages on sums of one digit, too short to learn them. The table that is printed has a row
for each stage; processor seconds are those of its commands, and of the comparison.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Size(NamedTuple):
    """Amounts of data, and the steps of stages that are not those of their configs."""

    numbers: int = 100  # that are added
    held_out: int = 1000  # sums
    demonstrations: int = 4000
    lines: int = 20_000
    drawn: int = 1500  # prompts from which pairs are drawn
    steps: dict[str, int] = {}
    rows: dict[str, int] = {}  # of a batch


FULL = Size()
SMALLEST = Size(
    10,
    20,
    80,
    2000,
    80,
    {"pretrain": 150, "sft": 100, "dpo": 5, "grpo": 2},
    {"sft": 2, "dpo": 4, "grpo": 32},
)
SAMPLES = 4
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
TEMPLATE += "{% endif %}{% endfor %}"
REWARDS = """\
import random


def chance(seed):
    return float(random.Random(seed).random() < 0.5)


def form(completion, reason):
    return float(len(completion) == 3 and completion.isdigit() and reason == "eos_token")
"""


def main() -> None:
    """Make the data, train the stages and print what each answers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/chain"))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--controls", action="store_true")
    parser.add_argument("--smallest", action="store_true")
    args = parser.parse_args()
    chains = [
        Chain(args.out, int(seed), SMALLEST if args.smallest else FULL)
        for seed in args.seeds.split(",")
    ]
    for chain in chains:
        chain.run(has_controls=args.controls)
    print(table(chains))


class Chain:
    """Stages of one seed, in a folder."""

    def __init__(self, out: Path, seed: int, size: Size = FULL) -> None:
        self.out, self.seed, self._size = out / f"seed{seed}", seed, size
        self.data = self.out / "data"
        self.results: dict[str, dict[str, float]] = {}
        self._draw = random.Random(seed)

    def run(self, *, has_controls: bool) -> None:
        """Make the data and train the stages, and the controls if they are wanted."""
        self.write_data()
        self.train("pretrain")
        self.train("sft", "pretrain")
        self.write_samples("sft")
        self.train("dpo", "sft")
        self.train("grpo", "dpo")
        if not has_controls:
            return
        reward = "--config.reward.functions={}"
        rewards = self.data / "rewards.py"
        self.train("sft", "sft", "more_sft")
        self.train("grpo", "sft", "grpo_from_sft")
        self.train("grpo", "sft", "random_reward", reward.format(f"{rewards}:chance=1"))
        form = reward.format(f"{rewards}:form=1")  # which all samples of a rollout may earn
        self.train("grpo", "sft", "form_reward", form, "--config.guard.budget=1000")
        accepted = f"--config.data.train={self.data}/accepted.jsonl"
        self.train("sft", "sft", "accepted_sft", accepted)

    def write_data(self) -> None:
        """Write lines, demonstrations, prompts and held-out prompts."""
        self.data.mkdir(parents=True)
        size = self._size
        sums = [(a, b) for a in range(size.numbers) for b in range(size.numbers)]
        sums.sort(key=lambda pair: hashlib.sha256(question(*pair).encode()).hexdigest())
        self._held_out, known = sums[: size.held_out], sums[size.held_out :]
        lines = (
            question(*p) + self._demonstrated(*p) for p in self._draw.choices(known, k=size.lines)
        )
        (self.data / "lines.txt").write_text("".join(f"{line}\n" for line in lines))
        demonstrations = self._draw.sample(known, size.demonstrations)
        self._write("sft", [chat(*pair, self._demonstrated(*pair)) for pair in demonstrations])
        self._write("held_out", [chat(*pair, answer(*pair)) for pair in self._held_out])
        self._write("prompts", [prompt(*pair) for pair in known])
        self._write("held_out_prompts", [prompt(*pair) for pair in self._held_out])
        (self.data / "sums.jinja").write_text(TEMPLATE)
        (self.data / "rewards.py").write_text(REWARDS)
        self._drawn = self._draw.sample(known, size.drawn)

    def _demonstrated(self, a: int, b: int) -> str:
        """Return the sum, which half of the time is wrong by a digit."""
        digits = list(answer(a, b))
        if self._draw.random() < 1 / 2:
            place = self._draw.randrange(3)
            digits[place] = self._draw.choice([d for d in "0123456789" if d != digits[place]])
        return "".join(digits)

    def _write(self, name: str, records: list[dict]) -> None:
        text = "".join(f"{json.dumps(record)}\n" for record in records)
        (self.data / f"{name}.jsonl").write_text(text)

    def write_samples(self, name: str) -> None:
        """Draw answers of a stage, and write pairs of a right and a wrong one, and right ones."""
        import jaxlm

        model = jaxlm.load(self.out / name)
        prompts = [question(*pair) for pair in self._drawn for _ in range(SAMPLES)]
        written = model.generate(
            prompts, chat=True, max_tokens=5, temperature=1.0, seed=list(range(len(prompts)))
        )
        pairs, accepted = [], []
        for number, pair in enumerate(self._drawn):
            texts = {each.text for each in written[number * SAMPLES : (number + 1) * SAMPLES]}
            wrong = sorted(texts - {answer(*pair)})
            if len(wrong) < len(texts):
                accepted.append(chat(*pair, answer(*pair)))
                turns = {"chosen": answer(*pair), "rejected": wrong[0]} if wrong else {}
                as_turns = {k: [{"role": "assistant", "content": v}] for k, v in turns.items()}
                pairs += [{"prompt": user(*pair), **as_turns}] if wrong else []
        self._write("pairs", pairs)
        self._write("accepted", accepted)
        print(f"{len(pairs)} pairs, {len(accepted)} accepted", file=sys.stderr)

    def train(self, config: str, start: str = "", name: str = "", *more: str) -> None:
        """Train a stage and compare its answers with the held-out sums."""
        name = name or config
        run, begun, used = self.out / name, time.monotonic(), processor_seconds()
        words = [f"--config=chain/{config}:{self.data}", f"--workdir={run}", *more]
        words += [f"--init_from={self.out / start}"] if start else []
        if config in self._size.steps:
            words.append(f"--config.train.steps={self._size.steps[config]}")
        if config in self._size.rows:
            words.append(f"--config.train.batch={self._size.rows[config]}")
        jaxlm_("train", *words, f"--config.seed={self.seed}")
        shares = {} if config == "pretrain" else self._compare(run)
        seconds, processor = time.monotonic() - begun, processor_seconds() - used
        self.results[name] = {"seconds": seconds, "processor": processor} | shares
        print(name, self.results[name], file=sys.stderr)

    def _compare(self, run: Path) -> dict[str, float]:
        """Return the shares of held-out sums that a run answers, greedy and sampled."""
        import jaxlm

        model, shares = jaxlm.load(run), {}
        prompts = [question(*pair) for pair in self._held_out]
        seeds = list(range(len(prompts)))
        for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            written = model.generate(
                prompts, chat=True, max_tokens=5, temperature=temperature, seed=seeds
            )
            right = [
                text.text == answer(*pair)
                for text, pair in zip(written, self._held_out, strict=True)
            ]
            shares[kind] = sum(right) / len(prompts)
            ended = sum(each.finish_reason == "eos_token" for each in written)
            shares["ended"] = ended / len(prompts)
        return shares


def table(chains: list[Chain]) -> str:
    """Return the results of all seeds as a table of Markdown, a row for each stage."""
    columns = ("greedy", "sampled", "ended", "processor", "seconds")
    lines = [" | ".join(("", "stage", "seed", *columns, "")), "|---" * 7 + "|"]
    for name in chains[0].results:
        for chain in chains:
            result = chain.results[name]
            shown = [f"{result[each]:.3g}" if each in result else "" for each in columns]
            lines.append(" | ".join(("", name, str(chain.seed), *shown, "")))
    for chain in chains:
        totals = (sum(each[name] for each in chain.results.values()) for name in columns[3:])
        processor, seconds = (f"{total:.0f}" for total in totals)
        lines.append(
            " | ".join(("", "in all", str(chain.seed), "", "", "", processor, seconds, ""))
        )
    return "\n".join(line.strip() for line in lines)


def processor_seconds() -> float:
    """Return the seconds of the processor that this process and its commands have used."""
    used = (resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def question(a: int, b: int) -> str:
    """Return the prompt of a sum."""
    return f"{a:02}+{b:02}="


def answer(a: int, b: int) -> str:
    """Return the sum with three digits."""
    return f"{a + b:03}"


def user(a: int, b: int) -> list[dict]:
    """Return the turn of a prompt."""
    return [{"role": "user", "content": question(a, b)}]


def prompt(a: int, b: int) -> dict:
    """Return the record of a prompt."""
    return {"prompt": user(a, b), "answer": answer(a, b)}


def chat(a: int, b: int, text: str) -> dict:
    """Return the record of a conversation."""
    return {"messages": [*user(a, b), {"role": "assistant", "content": text}]}


def jaxlm_(*words: str) -> dict:
    """Run a command and return its result."""
    print("jaxlm", *words, file=sys.stderr)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "jaxlm", *words, "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
