"""Chat templates in the style of each family, with marks around assistant turns and tokenizers."""

import re
from typing import NamedTuple

from jaxlm.data.chat import ChatTemplate
from jaxlm.data.hub_tokenizer import ExtraToken, ImportedTokenizer, with_extra_tokens
from tests.data.vocabularies.test_byte_pairs import BYTES, made

MARK = re.compile(r"\{% (end)?generation %\}")


class Family(NamedTuple):
    """A template, the token that ends a turn, and the first token of a text; empty without one."""

    template: str
    end: str
    bos: str = ""
    others: tuple[str, ...] = ()


FAMILIES = {
    "chatml": Family(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
        "{% endgeneration %}{{ '\\n' }}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "<|im_end|>",
        others=("<|im_start|>",),
    ),
    "chatml with a default system": Family(
        "{% if messages[0].role != 'system' %}"
        "{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
        "{% endgeneration %}{{ '\\n' }}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "<|im_end|>",
        others=("<|im_start|>",),
    ),
    "llama 2": Family(
        "{% if messages[0].role == 'system' %}"
        "{% set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}"
        "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}"
        "{% endif %}{% for m in turns %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content.strip() + ' "
        "[/INST]' }}{% else %}{% generation %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
        "{% endgeneration %}{% endif %}{% endfor %}",
        "</s>",
        "<s>",
    ),
    "llama 3": Family(
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}"
        "{% endgeneration %}{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
        "<|eot_id|>",
        "<|begin_of_text|>",
        ("<|start_header_id|>", "<|end_header_id|>"),
    ),
    "gemma": Family(
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{% set first = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}{% else %}"
        "{% set first = '' %}{% set turns = messages %}{% endif %}{% for m in turns %}"
        "{% if m.role == 'assistant' %}{{ '<start_of_turn>model\\n' }}{% generation %}"
        "{{ m.content | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
        "{{ '<start_of_turn>' + m.role + '\\n' + (first if loop.first else '') + m.content | "
        "trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<start_of_turn>model\\n' }}{% endif %}",
        "<end_of_turn>",
        "<bos>",
        ("<start_of_turn>",),
    ),
    "mistral": Family(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.role == 'system' %}"
        "{{ m.content + '\\n\\n' }}{% else %}{% generation %}{{ ' ' + m.content + eos_token }}"
        "{% endgeneration %}{% endif %}{% endfor %}",
        "</s>",
        "<s>",
    ),
    "phi 3": Family(
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
        "{{ m.content + '<|end|>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|assistant|>\\n' }}{% endif %}",
        "<|end|>",
        others=("<|user|>", "<|assistant|>", "<|system|>"),
    ),
    "cohere": Family(
        "{{ bos_token }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}"
        "{% if m.role == 'assistant' %}{{ '<|CHATBOT_TOKEN|>' }}{% generation %}"
        "{{ m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endgeneration %}{% else %}"
        "{{ '<|' + m.role | upper + '_TOKEN|>' + m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>",
        ("<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>", "<|SYSTEM_TOKEN|>"),
    ),
    "deepseek": Family(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
        "{% elif m.role == 'user' %}{{ '<\uff5cUser\uff5c>' + m.content }}{% else %}"
        "{{ '<\uff5cAssistant\uff5c>' }}{% generation %}"
        "{{ m.content.split('</think>')[-1] + eos_token }}{% endgeneration %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c>' }}{% endif %}",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
    ),
    "zephyr": Family(
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{{ '\\n' }}{% else %}"
        "{{ m.content + eos_token + '\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|assistant|>\\n' }}{% endif %}",
        "</s>",
    ),
    "thoughts of earlier turns are dropped": Family(
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
        "{% set text = m.content.split('</think>')[-1].lstrip('\\n') %}"
        "{% if '</think>' in m.content and loop.index0 > ns.last %}"
        "{% set text = '<think>\\n' + "
        "m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') + '\\n</think>\\n\\n' "
        "+ text %}{% endif %}{% generation %}{{ text + '<|im_end|>' }}{% endgeneration %}"
        "{{ '\\n' }}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "<|im_end|>",
        others=("<|im_start|>",),
    ),
    "tools": Family(
        "{% if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}"
        "{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + "
        "'\\n</tool_response><|im_end|>\\n' }}{% elif m.role == 'assistant' %}"
        "{{ '<|im_start|>assistant\\n' }}{% generation %}{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}"
        "{{ '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}{% endfor %}"
        "{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "<|im_end|>",
        others=("<|im_start|>",),
    ),
}


def tokenizer(family: Family) -> ImportedTokenizer:
    """A tokenizer of bytes with the control tokens of a family."""
    names = [name for name in (family.bos, family.end, *family.others) if name]
    added = [ExtraToken(name, 256 + number, True) for number, name in enumerate(names)]
    content = with_extra_tokens(made(BYTES), added, "x")
    ids = {name: 256 + number for number, name in enumerate(names)}
    before = [ids[family.bos]] if family.bos else []
    return ImportedTokenizer(content, before=before, after=[ids[family.end]])


def template(family: Family, *, has_marks: bool) -> ChatTemplate:
    """The template of a family, with its marks or without."""
    source = family.template if has_marks else MARK.sub("", family.template)
    return ChatTemplate(source, {"bos_token": family.bos, "eos_token": family.end})
