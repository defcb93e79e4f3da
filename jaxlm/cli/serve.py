"""Serve the model of a run over HTTP, with OpenAI's API for completions and chat.

jaxlm serve --workdir=runs/a                                   on http://127.0.0.1:8000
jaxlm serve --workdir=runs/a --slots=16 --context=2048         16 requests at once
jaxlm serve --workdir=runs/a --host=0.0.0.0 --keys=keys.txt    for other machines

The server listens on this machine alone, unless --keys names a file of keys. `jaxlm serve
--keys=FILE --add_key` adds a key to the file and prints it. A SIGTERM ends the server after the
requests that it has accepted.
"""

from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import ADAPTER, Parser, add_flag, needed_run, selection
from jaxlm.cli.output import Output
from jaxlm.core.errors import CommandError

LIMITS = ("key_calls", "key_running", "key_tokens")
MAX_PORT = 2**16 - 1


def add_arguments(parser: Parser) -> None:
    add_flag(parser, "--host", "ADDRESS", "127.0.0.1", "address to listen on; others need --keys")
    add_flag(parser, "--port", "N", 8000, "port to listen on; 0 for any that is free", least=0)
    add_flag(parser, "--keys", "FILE", str, "file with digests of the keys of clients")
    parser.add_switch("--add_key", "add a key to the file of --keys, print it and end")
    add_flag(parser, "--key_calls", "N", 0, "calls a minute of each key; 0 for any number", least=0)
    add_flag(
        parser, "--key_running", "N", 0, "calls of each key at once; 0 for any number", least=0
    )
    add_flag(
        parser, "--key_tokens", "N", 0, "tokens a minute of each key; 0 for any number", least=0
    )
    add_flag(parser, "--slots", "N", 8, "requests that run at once", least=1)
    add_flag(
        parser,
        "--context",
        "TOKENS",
        int,
        "largest request, with its prompt (the run's rows)",
        least=2,
    )
    add_flag(
        parser, "--chunk", "TOKENS", 64, "tokens of a prompt that are read in one pass", least=1
    )
    add_flag(
        parser, "--max_waiting", "TOKENS", 2**17, "tokens of requests that wait for a slot", least=1
    )
    add_flag(
        parser,
        "--prefix_mib",
        "MIB",
        256,
        "memory for beginnings of prompts; 0 keeps none",
        least=0,
    )
    add_flag(
        parser, "--drain_seconds", "X", 30.0, "time for running requests after a SIGTERM", least=0
    )
    add_flag(
        parser,
        "--stall_seconds",
        "X",
        300.0,
        "time limit of a pass; then the process ends",
        least=1,
    )
    add_flag(parser, "--kv_cache_dtype", ["auto", "int8"], "auto", "dtype of the KV cache")
    add_flag(
        parser, "--draft", "lookup|heads|RUN", str, "what guesses tokens; no text depends on it"
    )
    add_flag(parser, "--price", "X", float, "price per device-hour, to compute the cost of tokens")
    parser.add_run_selection()
    add_flag(parser, *ADAPTER)


def run(args: Any, out: Output) -> int:
    if args.price is not None and not args.price > 0:
        what, why = f"a price of {args.price:g} is not allowed", "it must be above 0"
        raise CommandError(what, where=f"--price={args.price:g}", why=why, fix="jaxlm serve --help")
    if args.port > MAX_PORT:
        what, why = "there is no such port", f"the largest one is {MAX_PORT}"
        raise CommandError(what, where=f"--port={args.port}", why=why, fix="jaxlm serve --help")
    if args.add_key:
        if args.keys is None:
            what, why = "--add_key needs the file of --keys", "the file has the digest of the key"
            fix = "jaxlm serve --keys=keys.txt --add_key"
            raise CommandError(what, where="--add_key", why=why, fix=fix)
        from jaxlm.serve.keys import add_key

        key = add_key(Path(args.keys))
        return out.result({"key": key, "file": args.keys}, key)
    flag = next((name for name in LIMITS if getattr(args, name)), None)
    if flag is not None and args.keys is None:
        what, why = f"--{flag} needs the file of --keys", "without keys all clients are one"
        fix = f"jaxlm serve --keys=keys.txt --{flag}={getattr(args, flag)}"
        raise CommandError(what, where=f"--{flag}={getattr(args, flag)}", why=why, fix=fix)
    workdir = Path(needed_run(args))

    from jaxlm.serve.quotas import KeyLimits
    from jaxlm.serve.server import ServeOptions, serve

    names = (
        "host",
        "port",
        "slots",
        "context",
        "chunk",
        "max_waiting",
        "prefix_mib",
        "drain_seconds",
        "stall_seconds",
    )
    options = ServeOptions(
        **{name: getattr(args, name) for name in names},
        keys=args.keys and Path(args.keys),
        limits=KeyLimits(calls=args.key_calls, running=args.key_running, tokens=args.key_tokens),
        kv_cache_dtype=args.kv_cache_dtype,
        adapter=args.adapter,
        price=args.price,
        draft=args.draft,
    )
    return serve(workdir, options, out.log, **selection(args))
