"""Pre-tokenization of byte-level tokenizers: the regular expressions in use."""

from typing import Any, Literal

Pattern = Literal["gpt2", "gpt2, digits apart", "cl100k", "cl100k, digits apart"]

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
REGEX: dict[Pattern, str] = {
    "cl100k": _WORDS.format(digits="{1,3}"),  # tiktoken's, and Llama 3's
    "cl100k, digits apart": _WORDS.format(digits=""),  # Qwen's
}


def cutter(pattern: Pattern) -> Any:
    """Return a pre-tokenizer that splits by the pattern and spells bytes as characters."""
    import tokenizers
    from tokenizers import pre_tokenizers

    if pattern in REGEX:
        words = pre_tokenizers.Split(tokenizers.Regex(REGEX[pattern]), "isolated")
        spelt = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([words, spelt])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern == "gpt2":
        return gpt2
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
