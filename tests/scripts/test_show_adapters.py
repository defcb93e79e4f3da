"""The data of scripts/show_adapters.py, and its table."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("show_adapters", ROOT / "scripts/show_adapters.py")
show = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(show)


def test_no_held_out_sum_is_in_either_task_and_the_second_has_its_digits_reversed(tmp_path):
    held_out = show.write_data(tmp_path, 1)
    for task, sign in (("start", "="), ("arm", "<")):
        rows = [json.loads(line) for line in (tmp_path / f"{task}.jsonl").read_text().splitlines()]
        for row in rows[:50]:
            a, b = map(int, row["prompt"].removesuffix(sign).split("+"))
            answer = row["completion"] if task == "start" else row["completion"][::-1]
            assert int(answer) == a + b
        sums = {row["prompt"][:-1] for row in rows}
        for prompts in held_out.values():
            assert not sums & {prompt[:-1] for prompt, _ in prompts}


def test_the_table_has_the_mean_and_the_range_of_the_seeds():
    each = {"parameters": 1200, "bytes": 34_000, "seconds": 0.0125}
    text = show.table({"lora": [each | {"exact": 0.5}, each | {"exact": 1.0}]})
    assert text.endswith("| `lora` | 0.01 | 1,200 | 34 | 12.5 | 0.750 (0.500 to 1.000) |")
