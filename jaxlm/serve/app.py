"""Routes of the server."""

import asyncio
import contextlib
import datetime
import functools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import JaxlmError
from jaxlm.core.nearest import nearest_word
from jaxlm.core.quoting import safe
from jaxlm.generate.requests import Delta
from jaxlm.serve import api, guard, page
from jaxlm.serve.api import Call, Served
from jaxlm.serve.bridge import Bridge, Results
from jaxlm.serve.fields import Fields, RefusedRequest, parse
from jaxlm.serve.guard import MAX_HEADER_BYTES, MAX_HEADERS, MAX_PATH_BYTES, Message, Receive, Send
from jaxlm.serve.keys import ApiKeys
from jaxlm.serve.metrics import Metrics
from jaxlm.serve.quotas import KeyLimits, Quotas

OPEN = ("/health",)  # routes without keys
SECURITY = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
NO_LIMITS = KeyLimits()
# Errors of requests that the engine has ended, by reason.
FAILURES: dict[str, RefusedRequest] = {
    "error": RefusedRequest(500, "the model's numbers are not finite, or its pass failed"),
    "grammar": RefusedRequest(400, "the grammar became too complex while its text was drawn"),
    "cancelled": RefusedRequest(503, "the server is stopping", retry_after="5"),
}
LOCAL = ("localhost", "127.0.0.1", "[::1]")
Handler = Callable[[HttpRequest], Awaitable[Response]]


class EventStream(Response):
    """A response of server-sent events.

    Args:
      events: its body.
      cancel: called if the client leaves.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], cancel: Callable[[], None]):
        super().__init__(headers=SECURITY)
        del self.headers["content-length"]
        self._events, self._cancel = events, cancel
        self.on_end: Callable[[], None] = lambda: None  # called after the last event

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the events until they end or the client leaves."""
        try:
            await self._send(receive, send)
        finally:
            self.on_end()

    async def _send(self, receive: Any, send: Any) -> None:
        async with (
            contextlib.aclosing(self._events) as events,
            _cancelled_on_disconnect(receive, self._cancel),
        ):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for part in events:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            except BaseException:
                self._cancel()
                raise
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.asynccontextmanager
async def _cancelled_on_disconnect(
    receive: Receive, cancel: Callable[[], None]
) -> AsyncIterator[None]:
    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class Server:
    """The state of the server, and its handlers.

    `served` is None until the model is loaded.

    Args:
      bridge: the engine.
      keys: accepted keys.
      log: receives a line for each call.
      hosts: accepted names of the Host header; an empty tuple accepts all.
      limits: limits of each key.
      price: price of the device for an hour, for a metric of cost; None has none.
    """

    def __init__(
        self,
        bridge: Bridge,
        keys: ApiKeys,
        log: Log,
        hosts: tuple[str, ...] = LOCAL,
        limits: KeyLimits = NO_LIMITS,
        price: float | None = None,
    ):
        self.served: Served | None = None
        self.quotas = Quotas(limits)
        self.bridge, self.metrics = bridge, Metrics(bridge, price)
        self._keys, self._log, self._hosts = keys, log, hosts

    def app(self) -> guard.App:
        """Return the ASGI application."""
        table: dict[str, tuple[str, Handler]] = {
            "/": ("GET", self.page),
            "/health": ("GET", self.health),
            "/ready": ("GET", self.ready),
            "/metrics": ("GET", self.show_metrics),
            "/v1/models": ("GET", self.models),
            "/v1/completions": ("POST", self.completions),
            "/v1/chat/completions": ("POST", self.chat_completions),
            "/tokenize": ("POST", self.tokenize),
            "/detokenize": ("POST", self.detokenize),
            "/tokenizer_info": ("GET", self.tokenizer_info),
        }
        routes = [
            Route(path, self._guarded(handler), methods=[method])
            for path, (method, handler) in table.items()
        ]
        methods = {path: method for path, (method, _) in table.items()}

        async def refuse(request: HttpRequest, error: Exception) -> Response:
            refused = _unrouted(request, methods)
            self.metrics.count_rejected(refused.status)
            return _error(refused)  # without a line in the log, as the path is the client's

        handlers: Any = {404: refuse, 405: refuse}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False  # to an address that the client gives
        return guard.with_write_deadline(self._checked(app))

    def _checked(self, app: Any) -> guard.App:
        """Return the app behind the checks of every route: host, number of headers, key."""

        async def checked(scope: Message, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and (refused := self._refusal(scope)):
                self.metrics.count_rejected(refused.status)
                await _error(refused)(scope, receive, send)
                return
            await app(scope, receive, send)

        return checked

    def _refusal(self, scope: Message) -> RefusedRequest | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if len(scope["headers"]) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            message = f"more than {MAX_HEADERS} headers, or {MAX_HEADER_BYTES} bytes of them"
            return RefusedRequest(431, message, connection="close")
        if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_PATH_BYTES:
            return RefusedRequest(414, "the path is too long", connection="close")
        if b"content-length" in headers and b"transfer-encoding" in headers:
            message = "two headers give the length of the body"  # request smuggling
            return RefusedRequest(400, message, connection="close")
        host = headers.get(b"host", "").rsplit(":", 1)[0]
        host = headers.get(b"host", "") if headers.get(b"host", "").endswith("]") else host
        if self._hosts and host not in self._hosts:
            return RefusedRequest(421, "the Host header is not one of this server")
        if not self._keys or scope["path"] in OPEN:
            return None
        name = self._keys.name_of(headers.get(b"authorization", ""))
        if name is not None:
            scope.setdefault("state", {})["key"] = name  # `request.state.key` of the handlers
            return None
        message = "the key is missing or wrong: Authorization: Bearer KEY"
        return RefusedRequest(401, message, www_authenticate="Bearer")

    def _guarded(self, handler: Handler) -> Handler:
        """Return the handler with errors as responses, and a line in the log."""

        async def handle(request: HttpRequest) -> Response:
            begun = time.monotonic()
            refused = None
            try:
                response = await handler(request)
            except RefusedRequest as error:
                refused = error
            except JaxlmError as error:  # a template refuses a conversation
                refused = api.refused_by_template(error)
            if refused is not None:
                self.metrics.count_rejected(refused.status)
                response = _error(refused)
            is_probe = request.url.path in ("/health", "/ready", "/metrics")
            if request.method == "POST" or (response.status_code >= 400 and not is_probe):
                log = functools.partial(self._log_call, request, response.status_code, begun)
                if isinstance(response, EventStream):
                    response.on_end = log
                else:
                    log()
            return response

        return handle

    def _log_call(self, request: HttpRequest, status: int, begun: float) -> None:
        """Write the line of a call that has ended, with its numbers of tokens if it drew any."""
        line = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "method": request.method,
            "path": request.url.path,
            "status": status,
            "seconds": round(time.monotonic() - begun, 4),
        }
        if (name := getattr(request.state, "key", None)) is not None:
            line["key"] = name
        response: api.Response | None = getattr(request.state, "response", None)
        if response is not None:
            names = ("prompt_tokens", "completion_tokens")
            line |= {name: response.usage[name] for name in names}
        self._log(safe(json.dumps(line)))

    def _model(self) -> Served:
        if self.served is None:
            raise RefusedRequest(503, "the model is not ready", retry_after="5")
        return self.served

    async def page(self, request: HttpRequest) -> Response:
        """Return the page for a browser on this machine."""
        policy = {"content-security-policy": page.POLICY, "referrer-policy": "no-referrer"}
        return HTMLResponse(page.PAGE, headers=SECURITY | policy)

    async def health(self, request: HttpRequest) -> Response:
        """Answer 200 while the process can serve at all."""
        is_well = not (self.bridge.is_failed or self.bridge.is_stuck)
        answer: dict[str, Any] = {"status": "ok" if is_well else "failed"}
        engine = self.bridge.engine
        if engine is not None and (drafting := engine.drafting) is not None:
            counters = engine.counters
            share = counters.accepted_tokens / max(counters.guessed_tokens, 1)
            facts = {"is_on": drafting.is_on, "accepted": round(share, 4)}
            answer["draft"] = {"name": drafting.draft.name} | facts
        return JSONResponse(answer, 200 if is_well else 500)

    async def ready(self, request: HttpRequest) -> Response:
        """Answer 200 if requests are accepted."""
        is_ready = self.bridge.is_ready and self.served is not None
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def show_metrics(self, request: HttpRequest) -> Response:
        """Return the metrics in the text form of Prometheus."""
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: HttpRequest) -> Response:
        """Return the model that is served."""
        served = self._model()
        facts: dict[str, Any] = {"has_chat": served.chat is not None}
        facts |= {"step": served.step, "digest": served.digest, "max_model_len": served.context}
        model = {"id": served.name, "object": "model", "created": 0, "owned_by": "jaxlm"}
        return JSONResponse({"object": "list", "data": [model | facts]})

    async def completions(self, request: HttpRequest) -> Response:
        """Continue texts."""
        return await self._answer(request, api.completion)

    async def chat_completions(self, request: HttpRequest) -> Response:
        """Answer a conversation."""
        return await self._answer(request, api.chat_completion)

    async def _answer(
        self, request: HttpRequest, read: Callable[[Fields, Served], Call]
    ) -> Response:
        served = self._model()
        fields = await self._fields(request)
        call = await asyncio.to_thread(read, fields, served)
        api.check_ids(call, served)
        begun = time.monotonic()
        results = self._submitted(request, call)
        response = api.Response(call, served)
        response.tickets = results.tickets
        if call.is_streamed:
            request.state.response = response
            return EventStream(self._events(results, response, begun), results.cancel)
        deltas: list[list[Delta]] = [[] for _ in call.requests]
        async with _cancelled_on_disconnect(request.receive, results.cancel):
            async for number, delta in results.parts():
                deltas[number].append(delta)
        reasons = [parts[-1].reason for parts in deltas]
        answer = response.whole(deltas)  # counts the tokens of the usage
        request.state.response = response
        self.metrics.finish(response.usage, reasons, time.monotonic() - begun)
        if results.is_cancelled:
            raise guard.CLIENT_LEFT
        for reason, failure in FAILURES.items():
            if reason in reasons:
                raise failure
        return JSONResponse(answer, headers=SECURITY)

    def _submitted(self, request: HttpRequest, call: Call) -> Results:
        """Queue a call within the limits of its key."""
        if not self._keys:
            return self.bridge.submit(call.requests)
        name = request.state.key
        # With one salt, the time to the first token would show prompts of other clients.
        call = api.with_salt(call, name)
        tokens = sum(each.size for each in call.requests)
        self.quotas.begin(name, tokens)
        try:
            results = self.bridge.submit(call.requests)
        except RefusedRequest:
            self.quotas.withdraw(name, tokens)
            raise
        results.on_end = functools.partial(self.quotas.end, name)
        return results

    async def _events(
        self, results: Results, response: api.Response, begun: float
    ) -> AsyncGenerator[bytes, None]:
        reasons, last = ["cancelled"] * len(results.tickets), None
        try:
            async for number, delta in results.parts():
                reasons[number] = delta.reason or reasons[number]
                if delta.reason not in FAILURES:
                    now = time.monotonic()
                    self.metrics.observe_delta(now - (last or begun), is_first=last is None)
                    last = now
                    yield response.chunk(number, delta)
                elif not results.is_cancelled:  # the other choices end with the first that fails
                    yield api.event(FAILURES[delta.reason].as_json())
                    results.cancel()
        finally:  # also if the client does not read
            self.metrics.finish(response.usage, reasons, time.monotonic() - begun)
        yield response.last()

    async def _fields(self, request: HttpRequest) -> Fields:
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind != "application/json":  # a form of another site cannot have this type
            message = "the content-type must be application/json"
            raise RefusedRequest(415, message, connection="close")
        return Fields(parse(await guard.read_body(request.headers, request.receive)))

    async def tokenize(self, request: HttpRequest) -> Response:
        """Return the ids of a text, in the form of vLLM."""
        served, fields = self._model(), await self._fields(request)
        fields.text("model")
        text = fields.text("prompt")
        if text is None:
            raise RefusedRequest(422, "prompt is missing", "prompt")
        has_start = fields.value("add_special_tokens", True) is not False
        fields.value("return_token_strs")
        fields.check_all_used(())
        api.check_length(text, served, "prompt")
        ids = await asyncio.to_thread(served.tokenizer.encode, text)
        ids = [*(served.tokenizer.before if has_start else ()), *ids]
        strings = [api.token_text(token, served) for token in ids]
        answer = {"count": len(ids), "max_model_len": served.context, "tokens": ids}
        return JSONResponse(answer | {"token_strs": strings})

    async def detokenize(self, request: HttpRequest) -> Response:
        """Return the text of ids, in the form of vLLM."""
        served, fields = self._model(), await self._fields(request)
        fields.text("model")
        ids = fields.value("tokens", [])
        fields.check_all_used(())
        size = served.tokenizer.size
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
            raise RefusedRequest(422, f"tokens must be ids from 0 to {size - 1}", "tokens")
        return JSONResponse({"prompt": served.tokenizer.decode(ids)})

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        """Return facts of the tokenizer, in the form of vLLM."""
        served = self._model()
        tokenizer = served.tokenizer
        names = served.names
        bos = tokenizer.before[0] if tokenizer.before else None
        answer = {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": tokenizer.size,
            "model_max_length": served.context,
            "bos_token": names.get(bos) if bos is not None else None,
            "eos_token": names.get(tokenizer.eos),
            "pad_token": names.get(tokenizer.pad),
            "unk_token": names.get(tokenizer.unk),
            "chat_template": None,
        }
        return JSONResponse(answer)


def _unrouted(request: HttpRequest, methods: Mapping[str, str]) -> RefusedRequest:
    """Return the refusal of a path that is no route, or that takes another method."""
    path = request.url.path
    if method := methods.get(path):
        return RefusedRequest(405, f"{path} takes {method}, not {request.method}", allow=method)
    near = nearest_word(path, methods)
    hint = f"the nearest is {near}" if near else f"the routes are {', '.join(methods)}"
    return RefusedRequest(404, f"there is no route {path!r}; {hint}")


def _error(refused: RefusedRequest) -> JSONResponse:
    headers = {name.replace("_", "-"): value for name, value in refused.headers.items()}
    return JSONResponse(refused.as_json(), refused.status, headers=SECURITY | headers)
