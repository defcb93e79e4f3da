"""Load client for servers with OpenAI's completions API: `jaxlm serve`, vLLM, llama.cpp.

    python scripts/bench_serve.py --server=jaxlm=http://127.0.0.1:8000/v1 \\
        --server=vllm=http://127.0.0.1:8001/v1

The servers take turns. Each client sends one request after the other (closed loop), with prompts
that all servers get, and reads a stream. Tokens are those of `usage`. The first token is the first
event with text, and gaps are the times between such events. Client and server share the machine.
"""

import argparse
import concurrent.futures
import http.client
import itertools
import json
import random
import statistics
import time
import urllib.parse
from typing import Any, NamedTuple

PAUSE_SECONDS = 3  # some servers poll for a while after a request
WORDS = "the of and to in is for that with on as are by this from or at be an it".split()


class Answer(NamedTuple):
    """Times of a request in seconds since it was sent, and its number of tokens."""

    first: float
    whole: float
    gaps: list[float]
    tokens: int


def prompt(number: int, words: int, shared: int) -> str:
    """Return the text of a request; the first `shared` words are the same in all."""
    draw, same = random.Random(number), random.Random(-1)
    return " ".join(
        [same.choice(WORDS) for _ in range(shared)]
        + [draw.choice(WORDS) for _ in range(words - shared)]
    )


def ask(url: str, body: dict[str, Any], key: str) -> Answer:
    """Send a request and read its stream."""
    place = urllib.parse.urlsplit(url)
    link = http.client.HTTPConnection(place.hostname or "", place.port, timeout=600)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    begun = time.perf_counter()
    link.request("POST", f"{place.path}/completions", json.dumps(body), headers)
    answer = link.getresponse()
    if answer.status != 200:
        raise SystemExit(f"{url}: {answer.status} {answer.read(500)!r}")
    times, tokens = [], 0
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        if any(choice.get("text") for choice in event["choices"]):
            times.append(time.perf_counter() - begun)
    link.close()
    gaps = [after - before for before, after in itertools.pairwise(times)]
    whole = time.perf_counter() - begun
    return Answer(times[0] if times else whole, whole, gaps, tokens)


def load(url: str, args: argparse.Namespace, turn: int) -> dict[str, float]:
    """Return the figures of one turn of a server."""
    named = {"model": args.model} if args.model else {}
    bodies = [
        named
        | {
            "prompt": prompt(1000 * turn + number, args.words, args.shared),
            "max_tokens": args.new,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        for number in range(args.requests)
    ]
    begun = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
        answers = list(pool.map(lambda body: ask(url, body, args.key), bodies))
    seconds = time.perf_counter() - begun
    gaps = [gap for answer in answers for gap in answer.gaps]
    return {
        "tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
        "first_p50": percentile([answer.first for answer in answers], 50),
        "first_p99": percentile([answer.first for answer in answers], 99),
        "gap_p50": percentile(gaps, 50),
        "gap_p99": percentile(gaps, 99),
        "whole_p50": percentile([answer.whole for answer in answers], 50),
    }


def percentile(values: list[float], share: int) -> float:
    """Return the value below which a share of the values are, in percent."""
    ordered = sorted(values)
    return ordered[min(len(ordered) * share // 100, len(ordered) - 1)] if ordered else 0.0


def main() -> None:
    """Print the figures of each turn, then the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--model", help="name of the model, if the servers need one")
    parser.add_argument("--key", default="none")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--words", type=int, default=64, help="words of a prompt")
    parser.add_argument("--shared", type=int, default=0, help="words that all prompts begin with")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    servers = dict(each.split("=", 1) for each in args.server)
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    for turn in range(args.turns):
        for name, url in servers.items():
            time.sleep(PAUSE_SECONDS)
            figures[name].append(load(url, args, turn))
            shown = "  ".join(f"{key} {value:.4g}" for key, value in figures[name][-1].items())
            print(f"turn {turn + 1}  {name:<12} {shown}", flush=True)
    medians = {
        name: {key: statistics.median(each[key] for each in turns) for key in turns[0]}
        for name, turns in figures.items()
    }
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
