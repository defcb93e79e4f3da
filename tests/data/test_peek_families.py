"""The texts of `data peek` on the page of fine-tuning are those of templates of three families."""

import json
import re
from pathlib import Path

import pytest

from jaxlm.data import dataset, peek
from jaxlm.data.config import DataConfig
from tests.data import chat_families

PAGE = Path(__file__).parents[2] / "jaxlm/docs/finetuning.md"
CONVERSATION = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.mark.parametrize("name", ["chatml", "llama 3", "gemma"])
def test_the_page_shows_what_peek_prints(tmp_path, name):
    family = chat_families.FAMILIES[name]
    (tmp_path / "hub").mkdir()
    (tmp_path / "tokenizer").write_bytes(chat_families.tokenizer(family).serialize())
    template = chat_families.template(family, has_marks=False).source
    (tmp_path / "hub/chat_template.jinja").write_text(template)
    tokens = json.dumps({"bos_token": family.bos, "eos_token": family.end})
    (tmp_path / "hub/tokenizer_config.json").write_text(tokens)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CONVERSATION}) + "\n")
    config = DataConfig(
        train=(str(tmp_path / "chat.jsonl"),),
        validation=(),
        kind="chat",
        sequence=256,
        tokenizer=str(tmp_path / "tokenizer"),
    )
    data = dataset.open_data(config, seed=0, root=tmp_path / "cache")
    batch = next(data.train.evaluation(batch=1))
    (text,) = peek.render_segments(batch, data.tokenizer, 0)
    shown = re.search(rf"<!-- peek {name} -->\n\n```\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    assert text.rstrip("\n") == shown[1]
