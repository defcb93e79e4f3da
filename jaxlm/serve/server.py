"""`jaxlm serve`: the model of a run behind OpenAI's HTTP API."""

import asyncio
import contextlib
import dataclasses
import gc
import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, ConfigError, not_installed
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.evals.tasks import scoring
from jaxlm.generate.engine import Engine, EngineSettings
from jaxlm.generate.grammar import GrammarCompiler
from jaxlm.generate.requests import Counters
from jaxlm.objectives.config import FIM, Mixture
from jaxlm.recipes.plan import oom
from jaxlm.recipes.use import adapter as adapters
from jaxlm.recipes.use import drafts, generate, load
from jaxlm.recipes.use.load import InitSource, LoadedRun
from jaxlm.serve.api import Served
from jaxlm.serve.keys import ApiKeys
from jaxlm.serve.quotas import KeyLimits
from jaxlm.serve.watchdog import watch

LOOPBACK = ("127.0.0.1", "::1", "localhost")
PACKAGES = ("starlette", "uvicorn", "prometheus_client", "llguidance")
GARBAGE = (2_000, 10, 10)  # Python's own thresholds of a collection
CLOSE_SECONDS = 5  # for open responses after the engine has ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of the server.

    Args:
      host: address to listen on; others than loopback need keys.
      port: port to listen on; 0 for any that is free.
      keys: file of digests of keys; None accepts every request.
      limits: limits of each key.
      slots: requests that run at once.
      context: largest number of tokens of a request; None for the run's own.
      chunk: tokens of a prompt that are read in one pass.
      max_waiting: tokens of requests that may wait for a slot.
      prefix_mib: MiB of beginnings of prompts that are kept for later requests; 0 keeps none.
      stall_seconds: time limit of a tick of the engine, after which the process ends.
      drain_seconds: time in which running requests may end after a SIGTERM.
      kv_cache_dtype: as in `GenerateConfig`.
      adapter: a folder of PEFT or RUN[@STEP], whose adapter changes the model.
      price: price of the device for an hour, for the cost of tokens; None prints no cost.
      draft: `lookup` guesses tokens from the text so far, `heads` those of the model's heads of
        multi-token prediction, a run those that it draws itself; None guesses none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Path | None = None
    limits: KeyLimits = dataclasses.field(default_factory=KeyLimits)
    slots: int = 8
    context: int | None = None
    chunk: int = 64
    max_waiting: int = 2**17
    prefix_mib: int = 256
    stall_seconds: float = 300.0
    drain_seconds: float = 30.0
    kv_cache_dtype: str = "auto"
    adapter: str | None = None
    price: float | None = None
    draft: str | None = None


def serve(workdir: Path, options: ServeOptions, say: Log, **selection: Any) -> int:
    """Serve the model of a run until a SIGTERM or a SIGINT; return the exit code.

    The port is open at once, and `/ready` answers 200 when all programs are compiled.

    Args:
      workdir: the run.
      options: options of the server.
      `say`: receives log lines; an OSError or a ValueError of it drops the line.
      selection: `step`, `best`, `weights` and `cpu_devices` of `load.load_run`.

    Raises:
      InputMissing: without the run, its step, the file of keys, or the extra `serve`.
      CommandError: if the address is in use or needs keys.
      ConfigError: if the engine does not support the model.
    """
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise not_installed("jaxlm serve", name, "serve", where="jaxlm serve")
    say = _log_that_may_fail(say)
    keys = ApiKeys(options.keys, say)
    is_local = options.host in LOOPBACK
    if not is_local and not keys:
        raise CommandError(
            "a server for other machines needs keys",
            where=f"--host={options.host}",
            why="without keys every program that reaches the port can use the model",
            fix="jaxlm serve --keys=keys.txt --add_key    # then add --keys=keys.txt",
        )
    load.read_config(workdir)
    with _listening(options) as listener:
        web = _http(listener, keys, say, options, is_local=is_local)
        with web as (bridge, server):
            with _signals(bridge, options.drain_seconds, say):
                opened = open_run(workdir, options, say, **selection)
                with jax.set_mesh(opened.model.mesh):
                    is_of_step = (options.adapter, selection.get("weights", "raw")) == (None, "raw")
                    digest = digest_of(opened, is_of_step=is_of_step)
                    say("compiling the programs of the server ...")
                    engine = build_engine(opened, options, say)
                    bridge.engine = engine
                    server.served = describe(opened, engine, options, digest, say)
                    host, port = listener.getsockname()[:2]
                    place = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
                    say(f"serving {server.served.name}, step {opened.step}, at {place}")
                    watched = watch(bridge, options.stall_seconds, workdir)
                    with server.served.grammars, watched, _collecting_garbage():
                        bridge.run()
    drafts.log_guesses(engine, say)
    say(f"stopped{_cost(engine.counters, options.price)}")
    return 0


@contextlib.contextmanager
def _collecting_garbage() -> Iterator[None]:
    """Collect the garbage of calls often, without a look at the objects of the start.

    A call leaves about 30 objects in cycles. The thresholds of a command would keep those of
    thousands of calls, and the objects of the start are many and stay.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _log_that_may_fail(say: Log) -> Log:
    """Return a log whose lines are dropped while it is full or closed."""

    def log(line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            say(line)

    return log


def _cost(counters: Counters, price: float | None) -> str:
    """Return the cost of the tokens since the start, for the last line; empty without a price."""
    from jaxlm.serve.metrics import cost_per_million

    cost = None if price is None else cost_per_million(counters, price)
    if cost is None:
        return ""
    return f"; {counters.seconds:.1f} s of the device, {cost:.4g} per million tokens"


def open_run(workdir: Path, options: ServeOptions, say: Log, **selection: Any) -> LoadedRun:
    """Return the run. Raises ConfigError if its model cannot continue text in chunks."""
    reader = adapters.reader(options.adapter, say)
    opened = load.load_run(workdir, adapter=reader, say=say, **selection)
    load.check_left_to_right(opened, "serve")
    return opened


def build_engine(opened: LoadedRun, options: ServeOptions, say: Log = lambda _: None) -> Engine:
    """Return the engine with all programs compiled. It owns the parameters of `opened`.

    Raises ConfigError for a context too long, OutOfMemory with slots and a context that fit.
    """
    limit = opened.model.blueprint.text_positions
    context = options.context or min(opened.run.data.sequence, limit or 2**31)
    if limit is not None and context > limit:
        raise ConfigError(
            f"a context of {context} tokens exceeds the positions of the model",
            where=f"--context={options.context}",
            why=f"the model has {limit} positions for text",
            fix=f"at most {limit} for --context",
        )
    positions = opened.run.model.max_positions
    if options.context is not None and context > positions:
        say(f"caution: --context={context} exceeds model.max_positions = {positions}")
    drafting = drafts.read_draft(options.draft)
    settings = EngineSettings(
        rows=options.slots,
        context=context,
        chunk=options.chunk,
        is_int8=options.kv_cache_dtype == "int8",
        max_waiting=options.max_waiting,
        prefix_bytes=options.prefix_mib * 2**20,
        keeps_params=False,
    )
    blueprint = opened.model.blueprint
    with oom.explain_engine_oom(
        opened.run, blueprint.config, settings, drafting, oom.serving_error
    ):
        draft = drafts.open_draft(opened, options.draft, context, say)
        engine = Engine(blueprint, opened.params, opened.tokenizer, settings, draft=draft)
        engine.warm_up()
    if engine.has_few_slots and not engine.draws_few:
        say(f"each token computes all {engine.rows} slots: fewer have other bits on this machine")
    return engine


def digest_of(opened: LoadedRun, *, is_of_step: bool) -> str:
    """Return the digest of the weights: of the files of the step if they are those, else of all.

    Weights with an adapter and averages are in no file of their own. Call it before the engine
    takes the parameters.
    """
    if not is_of_step:
        return scoring.weights_digest(opened.params)
    store = Store(opened.workdir / "checkpoints", CheckpointConfig(), read_only=True)
    return InitSource(opened.run, store, opened.step).digest


def describe(
    opened: LoadedRun, engine: Engine, options: ServeOptions, digest: str, say: Log
) -> Served:
    """Return the facts of the model that the routes need.

    Args:
      opened: the run.
      engine: its engine.
      options: options of the server.
      digest: digest of the weights.
      `say`: receives log lines.
    """
    chat = None
    with contextlib.suppress(ConfigError):  # a run without a template continues text only
        folder = adapters.template_folder(options.adapter)
        template = generate.template_of(opened.workdir, folder, say)
        chat = ChatTokenizer(opened.tokenizer, template)
    objective = opened.run.objective
    parts = [each for each, _ in objective.parts] if isinstance(objective, Mixture) else [objective]
    return Served(
        name=opened.workdir.resolve().name,
        digest=digest,
        step=opened.step,
        tokenizer=opened.tokenizer,
        chat=chat,
        is_infilling=any(isinstance(each, FIM) for each in parts),
        vocab=engine.vocab,
        context=engine.context,
        grammars=GrammarCompiler(opened.tokenizer, engine.vocab),
    )


@contextlib.contextmanager
def _listening(options: ServeOptions) -> Iterator[socket.socket]:
    """Open the port before expensive work."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listener = socket.create_server((options.host, options.port), family=family, backlog=1024)
    except OSError as error:
        raise CommandError(
            "the address cannot be listened on",
            where=f"--host={options.host} --port={options.port}",
            why=f"{type(error).__name__}: {error.strerror}",
            fix="--port=0    # takes a free one",
        ) from error
    with listener:
        yield listener


@contextlib.contextmanager
def _http(
    listener: socket.socket, keys: ApiKeys, say: Log, options: ServeOptions, *, is_local: bool
) -> Iterator[Any]:
    """Run the event loop of the server in a thread of its own; the engine has this one.

    Args:
      listener: the open port.
      keys: accepted keys.
      `say`: receives log lines.
      options: limits of each key, and the price.
      is_local: accept this machine's names alone as Host header.
    """
    import uvicorn

    from jaxlm.serve.app import LOCAL, Server
    from jaxlm.serve.bridge import Bridge
    from jaxlm.serve.guard import MAX_HEADER_BYTES, GuardedProtocol

    loop = asyncio.new_event_loop()
    bridge = Bridge(loop)
    hosts = LOCAL if is_local else ()
    server = Server(bridge, keys, say, hosts, options.limits, options.price)
    config = uvicorn.Config(
        server.app(),  # type: ignore[arg-type]
        http=GuardedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    http = uvicorn.Server(config)

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(http.serve(sockets=[listener]))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=run, name="http", daemon=True)
    thread.start()
    try:
        yield bridge, server
    finally:
        http.should_exit = True
        thread.join(2 * CLOSE_SECONDS)
        if bridge.engine is not None:
            bridge.engine.close()


@contextlib.contextmanager
def _signals(bridge: Any, drain_seconds: float, say: Log) -> Iterator[None]:
    """Drain at the first SIGTERM or SIGINT; end at once at the second."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    timer = threading.Timer(drain_seconds, bridge.stop)
    timer.daemon = True

    def handle(number: int, frame: FrameType | None) -> None:
        if bridge.is_draining:
            os._exit(130)
        bridge.is_draining = True
        if bridge.engine is None:  # no request was accepted
            raise SystemExit(0)
        say(f"{signal.Signals(number).name}: no new requests, {drain_seconds:g} s for running ones")
        timer.start()

    before = {each: signal.signal(each, handle) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        timer.cancel()
        for each, handler in before.items():
            signal.signal(each, handler)
