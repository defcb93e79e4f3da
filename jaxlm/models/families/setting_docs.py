"""Meaning and range of the settings that families share; each family sets its own default."""

from collections.abc import Mapping
from typing import Any

Doc = Mapping[str, Any]  # arguments of `setting` besides the default

VOCAB: Doc = dict(doc="rows of the embedding; auto is the tokenizer's size", low=2)
MAX_POSITIONS: Doc = dict(
    doc="longest sequence that the model is meant for",
    unit="tokens",
    low=1,
    formerly="context",
)
POSITION_ROWS: Doc = dict(
    doc="longest sequence: rows of the position table",
    unit="tokens",
    low=1,
    formerly="context",
)
DEPTH: Doc = dict(doc="layers", low=1)
WIDTH: Doc = dict(doc="hidden size: features of the residual stream", low=2)
HEADS: Doc = dict(doc="attention heads", low=1)
KV_HEADS: Doc = dict(doc="key and value heads; auto is as many as heads", low=1)
PLAIN_HIDDEN: Doc = dict(doc="hidden units of the MLP; auto is 4 x width", low=1)
GATED_HIDDEN: Doc = dict(doc="hidden units of the MLP; auto is 8/3 width, rounded up to 64", low=1)
PLAIN_ACTIVATION: Doc = dict(doc="activation of the MLP")
GATED_ACTIVATION: Doc = dict(doc="activation of the MLP's gate")
LAYER_NORM_EPS: Doc = dict(doc="added to the variance in each norm", above=0.0)
RMS_NORM_EPS: Doc = dict(doc="added to the mean square in each norm", above=0.0)
TIED: Doc = dict(doc="tied embeddings: the unembedding is the embedding's transpose")
DROPOUT: Doc = dict(doc="dropout rate of embeddings, attention and outputs", low=0.0, below=1.0)
OUTPUT_DROPOUT: Doc = dict(doc="dropout rate of each part's output", low=0.0, below=1.0)
INIT: Doc = dict(
    doc="initial weights: normal(init_std), gpt2 (residual outputs scaled by 1/sqrt(2 depth)), "
    "xavier, he"
)
INIT_STD: Doc = dict(doc="standard deviation of the initial weights", above=0.0)

ROPE_THETA: Doc = dict(doc="base of the rotary frequencies", above=1.0)
ROTARY_FRACTION: Doc = dict(
    doc="fraction of each head that is rotated", above=0.0, high=1.0, formerly="rope_share"
)
ROPE_SCALING: Doc = dict(doc="scaling of rotary positions for long contexts")
WINDOW: Doc = dict(
    doc="sliding window: keys that a token sees, itself included; None sees all before it",
    unit="tokens",
    low=1,
)
LOCAL_WINDOW: Doc = dict(doc="window of local layers, with the token itself", unit="tokens", low=1)
GLOBAL_ROPE_THETA: Doc = dict(doc="base of the rotary frequencies in global layers", above=1.0)
LOCAL_ROPE_THETA: Doc = dict(doc="base of the rotary frequencies in local layers", above=1.0)
ATTENTION_SOFTCAP: Doc = dict(
    doc="softcap of scores s: cap x tanh(s / cap); None has no cap",
    above=0,
    formerly="attention_cap",
)
LOGIT_SOFTCAP: Doc = dict(
    doc="softcap of logits z: cap x tanh(z / cap); None has no cap", above=0, formerly="logit_cap"
)
TOKEN_TYPES: Doc = dict(doc="rows of the token-type table; training uses the first", low=1)

EXPERTS: Doc = dict(doc="experts of a layer", low=1)
TOP_K: Doc = dict(doc="experts that each token is routed to", low=1)
EXPERT_HIDDEN: Doc = dict(doc="hidden units of each expert", low=1)
SHARED: Doc = dict(doc="hidden units of all shared experts together; 0 has none", low=0)
DENSE_DEPTH: Doc = dict(doc="layers at the start whose MLP is dense", low=0)
GROUPS: Doc = dict(doc="groups of consecutive experts of equal size", low=1)
TOP_GROUPS: Doc = dict(doc="groups that the experts of a token are chosen from", low=1)
ROUTER: Doc = dict(doc="function from the router's logits to scores")
NORMALIZED: Doc = dict(
    doc="divide the scores of a token's experts by their sum", formerly="normalised"
)
EXPERT_SCALE: Doc = dict(doc="factor on the weights of a token's experts", above=0)
BALANCE_LOSS: Doc = dict(
    doc="coefficient of the load-balancing loss of each layer, a mean over all tokens but padding",
    low=0,
)
BALANCE_BIAS: Doc = dict(
    doc="step of the load-balancing bias on the scores, once per update (arXiv:2408.15664); "
    "0 has no bias, or in deepseek_v3 keeps it fixed",
    low=0,
)
