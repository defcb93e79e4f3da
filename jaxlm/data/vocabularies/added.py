"""Tokens beside a vocabulary: special ones, and others that text is cut at first."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxlm.core.errors import DataError
from jaxlm.data.hub_tokenizer import rust_errors


class Added(NamedTuple):
    """One of them. A special one never comes of text."""

    text: str
    number: int
    is_special: bool


def with_added(content: bytes, added: Iterable[Added], where: str) -> bytes:
    """The content of a tokenizer.json with these tokens too. Raises DataError where one would get another id than it has."""
    import tokenizers

    with rust_errors("the tokens beside a vocabulary cannot be added", where):
        built = tokenizers.Tokenizer.from_buffer(content)
        for token in sorted(added, key=lambda token: token.number):
            entry = tokenizers.AddedToken(token.text, normalized=False, special=token.is_special)
            built.add_tokens([entry])
            if (number := built.token_to_id(token.text)) != token.number:
                raise DataError(
                    "a token would get another id than the model knows it by",
                    where=where,
                    why=f"{token.text!r:.60} has id {token.number:,}, and would get {number}",
                    fix="a folder with tokenizer.json, as transformers writes it, is read as it is",
                )
        return built.to_str().encode()


def put_in_front(built: Any, name: str) -> None:
    """Has a tokenizer of the library begin every text with a special token of its own."""
    from tokenizers import processors

    built.post_processor = processors.TemplateProcessing(
        single=f"{name} $A",
        pair=f"{name} $A {name} $B",
        special_tokens=[(name, built.token_to_id(name))],
    )
