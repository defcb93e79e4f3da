"""Prompts of a chat: each text as a user's turn, with the ids that a conversation is trained on."""

from collections.abc import Sequence

from jaxlm.data.assistant_mask import MaskRenderer
from jaxlm.data.chat import ChatTemplate, Message, render_chat
from jaxlm.data.control_tokens import ControlTokens
from jaxlm.data.conversations import map_strings
from jaxlm.data.tokenizer import Tokenizer


class ChatTokenizer(Tokenizer):
    """A tokenizer that encodes each text as a user's turn, up to the start of the answer.

    Control tokens of the template become special ids; those that a text spells stay text. The token
    by which the template ends a turn ends an answer.
    """

    before: tuple[int, ...] = ()  # the template begins the conversation

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        super().__init__(tokenizer.table)
        self._tokenizer, self._template = tokenizer, template
        self._control = ControlTokens(tokenizer)
        self.pad, self.eos, self.unk = tokenizer.pad, tokenizer.eos, tokenizer.unk
        self.specials, self.reserved = tokenizer.specials, tokenizer.reserved
        self.after, self.ends = tokenizer.after, ends(tokenizer, template)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of a conversation that begins with each text."""
        return self.encode_chats([[{"role": "user", "content": text}] for text in texts])

    def encode_chats(self, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Return the ids of each conversation. Raise DataError if the template refuses one."""
        guarded = map_strings(conversations, self._control.guarded)
        texts = render_chat(guarded, self._template)
        encoded = self._control.encode([(text, ()) for text in texts])
        return [each.ids.tolist() for each in encoded]

    def serialize(self) -> bytes:
        """Return the bytes of the underlying tokenizer."""
        return self._tokenizer.serialize()


def ends(tokenizer: Tokenizer, template: ChatTemplate) -> tuple[int, ...]:
    """Return the ids that end an answer: the tokenizer's, and the one that ends a turn."""
    with MaskRenderer(template, ControlTokens(tokenizer)) as renderer:
        name = renderer.ending
    more = () if name is None else (tokenizer.specials[name],)
    return tuple(dict.fromkeys((*tokenizer.ends, *more)))
