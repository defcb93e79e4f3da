"""Requests and responses in the form of OpenAI's completions and chat completions."""

import dataclasses
import functools
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from jaxlm.core.errors import JaxlmError
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.data.conversations import ROLES
from jaxlm.data.corrupt.fim import FimIds, fim_ids
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.generate.grammar import Grammar, GrammarCompiler, GrammarRefused, GrammarSource, Kind
from jaxlm.generate.requests import Delta, Request, Ticket, TokenScore
from jaxlm.generate.rows import Sampling
from jaxlm.serve.fields import Fields, RefusedRequest

MAX_CHOICES = 128  # of all prompts of a request
MAX_STOPS, MAX_STOP_BYTES = 16, 256
MAX_BIASES = 1024
MAX_MESSAGES = 1024
MAX_TOP = 20
# Fields of OpenAI that change no text.
IGNORED = ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
# Fields of `structured_outputs`, as in vLLM, and the kind of grammar of each.
GRAMMARS: dict[str, Kind] = {
    "json": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
}
ANY_OBJECT = GrammarSource("json", '{"type":"object"}')
REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop", "deadline": "length"}


@dataclasses.dataclass(frozen=True)
class Served:
    """The model that is served.

    Args:
      name: its name in `/v1/models`.
      digest: digest of the weights.
      step: the step of the run.
      tokenizer: its tokenizer.
      chat: the tokenizer of conversations, if the run has a template.
      is_infilling: the model was trained to fill in the middle.
      vocab: number of ids of the model.
      context: largest number of tokens of a request.
      grammars: compiles the grammars of requests.
    """

    name: str
    digest: str
    step: int
    tokenizer: Tokenizer
    chat: ChatTokenizer | None
    is_infilling: bool
    vocab: int
    context: int
    grammars: GrammarCompiler

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """Names of the ids without text."""
        return {number: name for name, number in self.tokenizer.specials.items()}


@dataclasses.dataclass(frozen=True)
class Call:
    """A request of a client, as requests of the engine.

    Args:
      requests: one for each choice.
      is_chat: the response has messages.
      is_streamed: the response is a stream of events.
      has_usage: a stream ends with the usage.
      is_echoed: the text begins with the prompt.
      has_scores: log-probabilities are returned.
      copies: choices of each prompt.
    """

    requests: tuple[Request, ...]
    is_chat: bool
    is_streamed: bool
    has_usage: bool
    is_echoed: bool
    has_scores: bool
    copies: int


def completion(fields: Fields, served: Served) -> Call:
    """Return the call of `/v1/completions`. Raises RefusedRequest."""
    _check_model(fields, served)
    rows = _prompts(fields, served)
    top = fields.integer("logprobs", None, low=0, high=MAX_TOP)
    is_echoed = fields.switch("echo")
    max_tokens = fields.integer("max_tokens", 16, low=0)
    if max_tokens == 0 and not is_echoed:
        raise RefusedRequest(422, "max_tokens=0 writes nothing without echo", "max_tokens")
    ends = served.tokenizer.ends
    return _call(fields, served, rows, max_tokens, top, ends, is_echoed=is_echoed, is_chat=False)


def chat_completion(fields: Fields, served: Served) -> Call:
    """Return the call of `/v1/chat/completions`. Raises RefusedRequest."""
    _check_model(fields, served)
    if served.chat is None:
        raise RefusedRequest(400, "this run has no chat template; /v1/completions continues text")
    ids = tuple(served.chat.encode_chats([_messages(fields)])[0])
    room = served.context - len(ids)
    longer = fields.integer("max_tokens", None, low=1)
    max_tokens = fields.integer("max_completion_tokens", longer or max(room, 1), low=1)
    top = fields.integer("top_logprobs", 0, low=0, high=MAX_TOP)
    if not fields.switch("logprobs"):
        if top:
            raise RefusedRequest(422, "top_logprobs needs logprobs: true", "top_logprobs")
        top = None
    _check_room([ids], max_tokens, served)
    ends = served.chat.ends
    return _call(fields, served, [ids], max_tokens, top, ends, is_echoed=False, is_chat=True)


def _call(
    fields: Fields,
    served: Served,
    rows: Sequence[tuple[int, ...]],
    max_tokens: int,
    top: int | None,
    ends: tuple[int, ...],
    *,
    is_echoed: bool,
    is_chat: bool,
) -> Call:
    copies = fields.integer("n", 1, low=1, high=MAX_CHOICES)
    if fields.integer("best_of", copies, low=1) != copies:
        raise RefusedRequest(422, "best_of must equal n: no text is ranked", "best_of")
    if len(rows) * copies > MAX_CHOICES:
        message = f"{len(rows)} prompts with n={copies} are more than {MAX_CHOICES} choices"
        raise RefusedRequest(422, message, "n")
    seed = fields.integer("seed", secrets.randbits(32), low=0, high=2**32 - 1)
    stop = tuple(text.encode() for text in fields.texts("stop"))
    if len(stop) > MAX_STOPS or any(not 0 < len(each) <= MAX_STOP_BYTES for each in stop):
        message = f"at most {MAX_STOPS} stops of 1 to {MAX_STOP_BYTES} bytes"
        raise RefusedRequest(422, message, "stop")
    is_streamed = fields.switch("stream")
    options = fields.inner("stream_options")
    has_usage = options.switch("include_usage")
    options.check_all_used(())
    deadline = fields.number("timeout", 600.0, low=0, high=86400.0, above=True)
    grammar = _grammar(fields, served, ends)
    if fields.switch("ignore_eos"):
        if grammar is not None:
            message = "a text with a grammar ends with an end token"
            raise RefusedRequest(422, message, "ignore_eos")
        ends = ()
    sampling = Sampling(
        temperature=fields.number("temperature", 1.0, low=0, high=100),
        top_k=fields.integer("top_k", None, low=1),
        top_p=fields.number("top_p", 1.0, low=0, high=1, above=True),
        min_p=fields.number("min_p", 0.0, low=0, high=1),
        repetition=fields.number("repetition_penalty", 1.0, low=0, high=100, above=True),
        presence=fields.number("presence_penalty", 0.0, low=-100, high=100),
        frequency=fields.number("frequency_penalty", 0.0, low=-100, high=100),
        bias=_bias(fields),
    )
    requests = tuple(
        Request(
            ids=ids,
            max_tokens=max_tokens,
            sampling=sampling,
            seed=(seed + copy) % 2**32,
            ends=ends,
            stop=stop,
            top=top,
            is_prompt_scored=is_echoed and top is not None,
            deadline=deadline,
            grammar=grammar,
        )
        for ids in rows
        for copy in range(copies)
    )
    fields.check_all_used(IGNORED)
    return Call(requests, is_chat, is_streamed, has_usage, is_echoed, top is not None, copies)


def _grammar(fields: Fields, served: Served, ends: tuple[int, ...]) -> Grammar | None:
    """Return the grammar of the text; None without one."""
    sources = {
        "response_format": _response_format(fields),
        "structured_outputs": _structured_outputs(fields),
    }
    named = [(name, source) for name, source in sources.items() if source is not None]
    if not named:
        return None
    if len(named) > 1:
        message = "response_format and structured_outputs are two grammars of one text"
        raise RefusedRequest(422, message, "structured_outputs")
    (field, source), *_ = named
    try:
        return served.grammars.compile(source, ends)
    except GrammarRefused as error:
        raise RefusedRequest(400, f"the grammar is refused: {error}", field) from None


def _response_format(fields: Fields) -> GrammarSource | None:
    form = fields.inner("response_format")
    kind = form.text("type")
    if kind not in (None, "text", "json_object", "json_schema"):
        message = "the type of response_format is text, json_object or json_schema"
        raise RefusedRequest(422, message, "response_format")
    inner = form.inner("json_schema")
    form.check_all_used(())
    if kind != "json_schema":
        return ANY_OBJECT if kind == "json_object" else None
    schema = inner.value("schema")
    inner.check_all_used(("name", "description", "strict"))
    if not isinstance(schema, dict):
        raise RefusedRequest(422, "json_schema needs an object schema", "response_format")
    return GrammarSource("json", json.dumps(schema))


def _structured_outputs(fields: Fields) -> GrammarSource | None:
    form = fields.inner("structured_outputs")
    values = {name: form.value(name) for name in GRAMMARS}
    if form.switch("json_object"):
        values["json_object"] = True
    form.check_all_used(())
    named = [name for name, value in values.items() if value is not None]
    if len(named) > 1:
        message = f"structured_outputs has {named[0]} and {named[1]}; it takes one of them"
        raise RefusedRequest(422, message, "structured_outputs")
    if not named:
        return None
    (name,) = named
    if name == "json_object":
        return ANY_OBJECT
    value = values[name]
    if name == "json" and isinstance(value, dict):
        value = json.dumps(value)
    if name == "choice":
        choices = Fields({name: value}).texts(name)
        if not all(choices) or not choices:
            message = "choice must be a list of texts that are not empty"
            raise RefusedRequest(422, message, "structured_outputs")
        value = json.dumps(choices)
    if not isinstance(value, str):
        raise RefusedRequest(422, f"{name} must be a text", "structured_outputs")
    return GrammarSource(GRAMMARS[name], value)


def _check_model(fields: Fields, served: Served) -> None:
    name = fields.text("model")
    if name not in (None, served.name):
        message = f"there is no model {str(name)[:80]!r}; this one is {served.name!r}"
        raise RefusedRequest(404, message, "model")


def _prompts(fields: Fields, served: Served) -> list[tuple[int, ...]]:
    """Return the ids of each prompt, which fit the context."""
    raw, suffix = fields.value("prompt", ""), fields.text("suffix")
    is_one = isinstance(raw, str) or (isinstance(raw, list) and _is_ids(raw))
    prompts = [raw] if is_one else raw
    if not isinstance(prompts, list) or not 0 < len(prompts) <= MAX_CHOICES:
        message = f"prompt must be a text, ids, or a list of up to {MAX_CHOICES} of them"
        raise RefusedRequest(422, message, "prompt")
    rows = []
    for each in prompts:
        if isinstance(each, str):
            rows.append(text_row(each, served, suffix))
        elif isinstance(each, list) and _is_ids(each):
            if not all(0 <= token < served.vocab for token in each):
                message = f"an id of the prompt is not from 0 to {served.vocab - 1}"
                raise RefusedRequest(422, message, "prompt")
            if suffix is not None:
                raise RefusedRequest(422, "a suffix needs a prompt of text", "suffix")
            rows.append(tuple(each))
        else:
            raise RefusedRequest(422, "a prompt must be a text or a list of ids", "prompt")
    _check_room(rows, fields.integer("max_tokens", 16, low=0), served)
    return rows


def _is_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(token) is int for token in value)


def check_length(text: str, served: Served, field: str) -> None:
    """Raise RefusedRequest if a text is too long for the context with any ids."""
    size = len(text.encode())
    longest = max(map(len, served.tokenizer.table))
    if size > longest * served.context:
        message = f"{size} bytes cannot fit a context of {served.context} tokens"
        raise RefusedRequest(422, message, field)


def text_row(text: str, served: Served, suffix: str | None = None) -> tuple[int, ...]:
    """Return the ids of a prompt, with those that begin a document."""
    tokenizer = served.tokenizer
    check_length(text, served, "prompt")
    ids = tokenizer.encode(text)
    if suffix is not None:
        check_length(suffix, served, "suffix")
        marks = _fim_ids(served)
        ids = [marks.prefix, *ids, marks.suffix, *_inner_ids(suffix, tokenizer), marks.middle]
    first = tokenizer.before
    return (*(first if first or ids else tokenizer.after), *ids)


def _fim_ids(served: Served) -> FimIds:
    """Return the ids before prefix, middle and suffix, as in training."""
    if not served.is_infilling:
        message = "this model was not trained to fill in the middle (objective.name=fim)"
        raise RefusedRequest(400, message, "suffix")
    marks = fim_ids(served.tokenizer)
    if marks is None:
        raise RefusedRequest(400, "the tokenizer has no ids for a suffix", "suffix")
    return marks


def _inner_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text that does not begin its document, without `Tokenizer.lead`."""
    before = tokenizer.encode("\n")
    ids = tokenizer.encode(f"\n{text}")
    is_apart = tokenizer.lead and ids[: len(before)] == before
    return ids[len(before) :] if is_apart else tokenizer.encode(text)


def _check_room(rows: Sequence[tuple[int, ...]], max_tokens: int, served: Served) -> None:
    longest = max(map(len, rows))
    if longest + max_tokens > served.context:
        message = (
            f"{longest} prompt tokens and {max_tokens} new ones exceed the context of "
            f"{served.context}"
        )
        raise RefusedRequest(422, message, "max_tokens")


def _messages(fields: Fields) -> list[dict[str, str]]:
    """Return the messages of a conversation, with their texts joined."""
    raw = fields.value("messages")
    if not isinstance(raw, list) or not 0 < len(raw) <= MAX_MESSAGES:
        message = f"messages must be a list of 1 to {MAX_MESSAGES}"
        raise RefusedRequest(422, message, "messages")
    messages = []
    for each in raw:
        if not isinstance(each, dict) or set(each) - {"role", "content", "name"}:
            message = "a message has other fields than role, content and name"
            raise RefusedRequest(422, message, "messages")
        content = each.get("content")
        if isinstance(content, list):
            parts = [
                part.get("text")
                for part in content
                if isinstance(part, dict) and part.get("type") == "text"
            ]
            whole = len(parts) == len(content) and all(isinstance(part, str) for part in parts)
            content = "".join(map(str, parts)) if whole else None
        if not isinstance(each.get("role"), str) or not isinstance(content, str):
            message = "a message needs a role and a content of text"
            raise RefusedRequest(422, message, "messages")
        if each["role"] not in ROLES:
            message = f"a role is one of {', '.join(ROLES)}, not {each['role'][:20]!r}"
            raise RefusedRequest(422, message, "messages")
        messages.append(each | {"content": content})
    return messages


def _bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    raw = fields.value("logit_bias", {})
    if not isinstance(raw, dict) or len(raw) > MAX_BIASES:
        message = f"logit_bias must be an object of at most {MAX_BIASES} ids"
        raise RefusedRequest(422, message, "logit_bias")
    values = Fields(raw)
    pairs = []
    for name in raw:
        if not name.isascii() or not name.isdigit() or len(name) > len(str(2**31)):
            raise RefusedRequest(422, f"{name[:20]!r} is no id", "logit_bias")
        pairs.append((int(name), values.number(name, 0.0, low=-100, high=100)))
    return tuple(pairs)


def with_salt(call: Call, salt: str) -> Call:
    """Return the call with requests that share prompts with those of the same salt alone."""
    requests = [dataclasses.replace(each, salt=salt) for each in call.requests]
    return dataclasses.replace(call, requests=tuple(requests))


def check_ids(call: Call, served: Served) -> None:
    """Raise RefusedRequest for a bias of an id that the model does not have."""
    if any(token >= served.vocab for token, _ in call.requests[0].sampling.bias):
        message = f"an id is not from 0 to {served.vocab - 1}"
        raise RefusedRequest(422, message, "logit_bias")


def token_text(token: int, served: Served) -> str:
    """Return the text of an id, in OpenAI's form if it is a part of a character.

    Ids without text have names.
    """
    raw = bytes_of(token, served)
    if not raw:
        return served.names.get(token, f"<|{token}|>")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{value:02x}" for value in raw)


def bytes_of(token: int, served: Served) -> bytes:
    """Return the bytes of an id; none for padding of the vocabulary."""
    table = served.tokenizer.table
    return table[token] if token < len(table) else b""


class Response:
    """The response of a call: whole, or in chunks of a stream."""

    def __init__(self, call: Call, served: Served):
        self._call, self._served = call, served
        kind = "chatcmpl" if call.is_chat else "cmpl"
        self._head: dict[str, Any] = {
            "id": f"{kind}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": served.name,
            "system_fingerprint": f"{served.digest[:12]}@{served.step}",
        }
        self._drawn = [0] * len(call.requests)
        self._offset = [0] * len(call.requests)
        self._begun = [False] * len(call.requests)
        self.tickets: Sequence[Ticket] = ()

    @property
    def usage(self) -> dict[str, Any]:
        """Number of tokens: each prompt once, and the ids of the text, without end tokens."""
        prompt = sum(len(each.ids) for each in self._call.requests[:: self._call.copies])
        drawn = sum(self._drawn)
        counts = {"prompt_tokens": prompt, "completion_tokens": drawn}
        cached = sum(ticket.cached for ticket in self.tickets[:: self._call.copies])
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return counts | {"total_tokens": prompt + drawn} | details

    def _add(self, number: int, delta: Delta) -> tuple[str, dict[str, Any] | None]:
        """Return the text and log-probabilities of a delta."""
        request, call = self._call.requests[number], self._call
        self._drawn[number] += len(delta.ids)
        text, entries = delta.text, [*delta.scores]
        ids, has_first = [*delta.ids], False
        if call.is_echoed and not self._begun[number]:
            raw = b"".join(bytes_of(token, self._served) for token in request.ids)
            text = raw.decode("utf-8", "replace") + text
            ids, has_first = [*request.ids, *ids], True
            entries = [*delta.prompt_scores, *entries]
        self._begun[number] = True
        if not call.has_scores:
            return text, None
        if call.is_chat:
            return text, {"content": [self._chat_entry(each) for each in entries], "refusal": None}
        return text, self._entries(number, ids, entries, has_first)

    def _chat_entry(self, score: TokenScore) -> dict[str, Any]:
        def entry(token: int, value: float) -> dict[str, Any]:
            raw = bytes_of(token, self._served)
            text = raw.decode("utf-8", "replace")
            return {"token": text, "logprob": value, "bytes": [*raw]}

        top = [entry(token, value) for token, value in score.top]
        return entry(score.id, score.log_probability) | {"top_logprobs": top}

    def _entries(
        self, number: int, ids: list[int], scores: list[TokenScore], has_first: bool
    ) -> dict[str, Any]:
        """Return the lists of the completions API; the first id of a prompt has no score."""
        values: list[float | None] = [each.log_probability for each in scores]
        tops: list[dict[str, float] | None] = [
            {token_text(token, self._served): value for token, value in reversed(each.top)}
            for each in scores
        ]
        if has_first:
            values, tops = [None, *values], [None, *tops]
        offsets = []
        for token in ids:
            offsets.append(self._offset[number])
            self._offset[number] += len(bytes_of(token, self._served).decode("utf-8", "replace"))
        names = [token_text(token, self._served) for token in ids]
        answer: dict[str, Any] = {"tokens": names, "token_logprobs": values}
        return answer | {"top_logprobs": tops, "text_offset": offsets}

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """Return the response of complete results."""
        choices = []
        for number, parts in enumerate(deltas):
            joined = Delta(
                text="".join(each.text for each in parts),
                ids=tuple(token for each in parts for token in each.ids),
                scores=tuple(score for each in parts for score in each.scores),
                prompt_scores=tuple(score for each in parts for score in each.prompt_scores),
            )
            text, scores = self._add(number, joined)
            shared: dict[str, Any] = {"index": number, "logprobs": scores}
            shared["finish_reason"] = REASONS.get(parts[-1].reason or "", "stop")
            content: dict[str, Any] = {"text": text}
            if self._call.is_chat:
                message = {"role": "assistant", "content": text, "refusal": None}
                content = {"message": message}
            choices.append(shared | content)
        kind = "chat.completion" if self._call.is_chat else "text_completion"
        return self._head | {"object": kind, "choices": choices, "usage": self.usage}

    def chunk(self, number: int, delta: Delta) -> bytes:
        """Return the event of a part of a result."""
        is_first = not self._begun[number]
        text, scores = self._add(number, delta)
        reason = None if delta.reason is None else REASONS.get(delta.reason, "stop")
        choice: dict[str, Any] = {"index": number, "logprobs": scores, "finish_reason": reason}
        if self._call.is_chat:
            role = {"role": "assistant"} if is_first else {}
            choice["delta"] = role | ({"content": text} if text or is_first else {})
        else:
            choice["text"] = text
        return self._event([choice], None)

    def last(self) -> bytes:
        """Return the events after the last part."""
        usage = self._event([], self.usage) if self._call.has_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        kind = "chat.completion.chunk" if self._call.is_chat else "text_completion"
        value = self._head | {"object": kind, "choices": choices}
        if self._call.has_usage:
            value["usage"] = usage
        return event(value)


def event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def refused_by_template(error: JaxlmError) -> RefusedRequest:
    """Return the error of a conversation that the template refuses."""
    return RefusedRequest(422, f"{error.what}: {error.why}"[:1000], "messages")
