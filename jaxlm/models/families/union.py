"""The registry of families: a new one is a file beside this one and a name in this union."""

from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.mixtral import Mixtral

Family = Llama | GPT2 | Mixtral
