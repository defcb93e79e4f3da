"""Added tokens of a tokenizer.json: special ones, and others at which text is cut first."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxlm.core.errors import DataError
from jaxlm.data.hub_tokenizer import rust_errors


class Added(NamedTuple):
    """An added token; a special one never results from text."""

    text: str
    number: int
    is_special: bool


def with_added(content: bytes, added: Iterable[Added], where: str) -> bytes:
    """Add tokens to a tokenizer.json. Raise DataError if one would get another id."""
    import tokenizers

    with rust_errors("a tokenizer.json failed to take added tokens", where):
        built = tokenizers.Tokenizer.from_buffer(content)
        for token in sorted(added, key=lambda token: token.number):
            entry = tokenizers.AddedToken(token.text, normalized=False, special=token.is_special)
            built.add_tokens([entry])
            if (number := built.token_to_id(token.text)) != token.number:
                raise DataError(
                    "an added token would get another id than in the model",
                    where=where,
                    why=f"{token.text!r:.60} has id {token.number:,}, and would get {number}",
                    fix="use a folder with tokenizer.json, as transformers writes it",
                )
        return built.to_str().encode()


def put_in_front(built: Any, name: str) -> None:
    """Make a library tokenizer begin every text with one of its special tokens."""
    from tokenizers import processors

    built.post_processor = processors.TemplateProcessing(
        single=f"{name} $A",
        pair=f"{name} $A {name} $B",
        special_tokens=[(name, built.token_to_id(name))],
    )
