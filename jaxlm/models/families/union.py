"""The registry of families: a family is a class in this folder and a name in this union.

Example:
  >>> SIZES["llama3-8b"].width
  4096
"""

from typing import get_args

from jaxlm.models.families.bert import BERT, RoBERTa
from jaxlm.models.families.cohere import Cohere
from jaxlm.models.families.deepseek import DeepSeekV2, DeepSeekV3
from jaxlm.models.families.gemma import Gemma, Gemma2, Gemma3
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.llama import Llama, OLMo2, SmolLM3
from jaxlm.models.families.mistral import Mistral, Mixtral
from jaxlm.models.families.modernbert import ModernBERT
from jaxlm.models.families.neox import NeoX
from jaxlm.models.families.phi3 import Phi3
from jaxlm.models.families.qwen import Qwen2, Qwen3, Qwen3Moe
from jaxlm.models.families.t5 import T5

Family = (
    Llama
    | GPT2
    | NeoX
    | Mistral
    | Mixtral
    | Qwen2
    | Qwen3
    | Qwen3Moe
    | Gemma
    | Gemma2
    | Gemma3
    | Phi3
    | OLMo2
    | SmolLM3
    | DeepSeekV2
    | DeepSeekV3
    | Cohere
    | BERT
    | RoBERTa
    | ModernBERT
    | T5
)
EncoderFamily = BERT | RoBERTa | ModernBERT
EncoderDecoderFamily = T5
# Families with a position table, which bounds the sequence length.
TabledFamily = GPT2 | BERT | RoBERTa
# Every published size by its name, the value of `--config.model=NAME`.
SIZES: dict[str, Family] = {
    name: arm(**sizes) for arm in get_args(Family) for name, sizes in arm.SIZES.items()
}
BY_PARAMETERS = {  # other names of sizes that are published under a word
    "gpt2-124m": "gpt2",
    "gpt2-355m": "gpt2-medium",
    "gpt2-774m": "gpt2-large",
    "gpt2-1.5b": "gpt2-xl",
}
SIZES |= {other: SIZES[name] for other, name in BY_PARAMETERS.items()}
