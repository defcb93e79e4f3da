"""What the settings that families share mean, and their ranges; a default is each family's own."""

from collections.abc import Mapping
from typing import Any

Term = Mapping[str, Any]  # what `setting` takes beside the default

VOCAB: Term = dict(doc="rows of the embedding; auto is the tokenizer's size", low=2)
CONTEXT: Term = dict(doc="longest sequence that the model is meant for", unit="tokens", low=1)
DEPTH: Term = dict(doc="layers", low=1)
WIDTH: Term = dict(doc="size of the residual stream", low=2)
HEADS: Term = dict(doc="attention heads", low=1)
KV_HEADS: Term = dict(doc="key and value heads; auto is as many as heads", low=1)
PLAIN_HIDDEN: Term = dict(doc="hidden units of the MLP; auto is 4 x width", low=1)
GATED_HIDDEN: Term = dict(
    doc="hidden units of the MLP; auto is 8/3 of the width, rounded up to 64", low=1
)
PLAIN_ACTIVATION: Term = dict(doc="activation of the MLP")
GATED_ACTIVATION: Term = dict(doc="activation of the MLP's gate")
LAYER_NORM_EPS: Term = dict(doc="added to the variance in each norm", above=0.0)
RMS_NORM_EPS: Term = dict(doc="added to the mean square in each norm", above=0.0)
TIED: Term = dict(doc="the unembedding is the embedding's transpose")
DROPOUT: Term = dict(
    doc="share of embeddings, attention weights and each part's output that is dropped in training",
    low=0.0,
    below=1.0,
)
OUTPUT_DROPOUT: Term = dict(
    doc="share of each part's output that is dropped in training", low=0.0, below=1.0
)
INIT: Term = dict(
    doc="initial weights: normal(init_std), gpt2 (residual outputs scaled by 1/sqrt(2 depth)), xavier, he"
)
INIT_STD: Term = dict(doc="standard deviation of the initial weights", above=0.0)

ROPE_THETA: Term = dict(doc="base of the rotary frequencies", above=1.0)
ROPE_SHARE: Term = dict(doc="share of each head that is rotated", above=0.0, high=1.0)
ROPE_SCALING: Term = dict(doc="how rotary positions are stretched")
WINDOW: Term = dict(
    doc="keys that a token sees, itself included; None sees all before it", unit="tokens", low=1
)
LOCAL_WINDOW: Term = dict(
    doc="keys that a token sees in local layers, itself included", unit="tokens", low=1
)
GLOBAL_ROPE_THETA: Term = dict(doc="base of the rotary frequencies in global layers", above=1.0)
LOCAL_ROPE_THETA: Term = dict(doc="base of the rotary frequencies in local layers", above=1.0)
ATTENTION_CAP: Term = dict(doc="scores s become cap x tanh(s / cap); None has no cap", above=0)
LOGIT_CAP: Term = dict(doc="logits z become cap x tanh(z / cap); None has no cap", above=0)
TOKEN_TYPES: Term = dict(
    doc="rows of the table of kinds of text, of which training reads the first", low=1
)

EXPERTS: Term = dict(doc="experts of a layer", low=1)
TOP_K: Term = dict(doc="experts that see a token", low=1)
EXPERT_HIDDEN: Term = dict(doc="hidden units of each expert", low=1)
SHARED: Term = dict(
    doc="hidden units of the experts that see all tokens, all together; 0 has none", low=0
)
DENSE_DEPTH: Term = dict(doc="layers at the start whose MLP is dense", low=0)
GROUPS: Term = dict(doc="groups of consecutive experts, all as large", low=1)
TOP_GROUPS: Term = dict(doc="groups in which all experts of a token are", low=1)
ROUTER: Term = dict(doc="how the router's logits become scores")
NORMALISED: Term = dict(
    doc="the scores of a token's experts are divided by their sum before they weigh"
)
EXPERT_SCALE: Term = dict(doc="what the weights of a token's experts are multiplied by", above=0)
BALANCE_LOSS: Term = dict(
    doc="coefficient of the loss that spreads tokens over experts, in each layer; a mean over all tokens, trained on or not",
    low=0,
)
