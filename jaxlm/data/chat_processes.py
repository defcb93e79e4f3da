"""Processes that encode batches of conversations, and the program that they run.

A process reads messages from its standard input, the settings first and then batches, and answers
each batch on its standard output. A message is a line of JSON and some bytes. The process is not of
`multiprocessing`, which would run a script that calls `jaxlm.train` without
`if __name__ == "__main__"` once more.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, Self

import numpy as np

from jaxlm.core.errors import DataError, PeerLost
from jaxlm.data import tokenizer_file
from jaxlm.data.chat import ChatTemplate
from jaxlm.data.chat_encoder import BatchEncoder, ChatEncoder, EncodedBatch, Item
from jaxlm.data.conversations import Conversation, Goal, LabeledStep
from jaxlm.data.records import Document

AHEAD = 2  # batches a process that are read before the first result is taken
# A process uses one processor: these libraries would start a thread for each.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}


class Pool(contextlib.ExitStack):
    """Processes that encode batches; a context manager, which ends them.

    Args:
      encoder: settings of the encoding.
      size: number of processes.
    """

    def __init__(self, encoder: ChatEncoder, size: int):
        super().__init__()
        self._encoder, self._size = encoder, size
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._threads = ThreadPoolExecutor(self._size)
            stack.callback(self._threads.shutdown, cancel_futures=True)  # after the processes
            for _ in range(self._size):
                self._idle.put(stack.enter_context(_Process(self._encoder)))
            self.push(stack.pop_all())
        return self

    def encode(
        self, batches: Iterable[Sequence[Item]]
    ) -> Iterator[tuple[Sequence[Item], EncodedBatch]]:
        """Yield each batch and its result, in order.

        Raises:
          DataError: that of `BatchEncoder.encode`, once the batches before were yielded.
          PeerLost: if a process ends, for example for lack of memory.
        """
        waiting: deque[tuple[Sequence[Item], Future[EncodedBatch]]] = deque()
        for batch in batches:
            waiting.append((batch, self._threads.submit(self._encoded, batch)))
            if len(waiting) > AHEAD * self._size:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()

    def _encoded(self, batch: Sequence[Item]) -> EncodedBatch:
        process = self._idle.get()
        try:
            return process.encode(batch)
        finally:
            self._idle.put(process)


class _Process:
    """A process that encodes; a context manager, which ends it."""

    def __init__(self, encoder: ChatEncoder):
        self._encoder, self._is_new = encoder, True

    def __enter__(self) -> Self:
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | ENVIRONMENT | paths,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._process:  # closes its pipes and waits
            pass

    def encode(self, batch: Sequence[Item]) -> EncodedBatch:
        """Return the result of a batch. Raises what `BatchEncoder.encode` raises, and PeerLost."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if self._is_new:
                self._is_new = False
                encoder = self._encoder
                settings = vars(encoder) | {"template": vars(encoder.template), "tokenizer": None}
                _send(self._process.stdin, settings, encoder.tokenizer.serialize())
            _send(self._process.stdin, [_as_json(each) for each in batch])
            answer, content = _receive(self._process.stdout)
        except (OSError, EOFError):
            raise PeerLost(
                "a process that encodes conversations ended",
                where="data.train",
                why=f"its exit code is {self._process.wait()}, without an answer; -9 means that it "
                "was killed, for example for lack of memory",
                fix="run the same command again once more memory is free",
            ) from None
        if "bug" in answer:
            raise RuntimeError(f"a process that encodes conversations failed:\n{answer['bug']}")
        if "raised" in answer:
            raise DataError(**answer["raised"])
        sizes = answer.pop("sizes")
        ids, weights = np.frombuffer(content, "<i4"), np.frombuffer(content, "<f4")
        stops = np.cumsum(sizes, dtype=np.int64)
        columns = (
            np.split(ids[: sum(sizes)], stops[:-1]),
            np.split(weights[sum(sizes) :], stops[:-1]),
        )
        error = answer.pop("error")
        return EncodedBatch(
            used=[*zip(answer.pop("numbers"), *columns, strict=False)],
            left_out=[(number, reason) for number, reason in answer.pop("left_out")],
            figures=Counter(answer.pop("figures")),
            error=error and DataError(**error),
            **answer,
        )


def _send(stream: IO[bytes], head: Any, content: bytes = b"") -> None:
    """Write a message."""
    stream.write(json.dumps([len(content), head]).encode() + b"\n" + content)
    stream.flush()


def _receive(stream: IO[bytes]) -> tuple[Any, bytes]:
    """Return the next message. Raise EOFError if the stream ends before it does."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    size, head = json.loads(line)
    content = stream.read(size)
    if len(content) < size:
        raise EOFError
    return head, content


def _as_json(item: Item) -> dict[str, Any]:
    """Return what an encoding depends on, and the place of the document for errors."""
    document, conversation = item
    fields = vars(conversation) | {"rejected": None, "goal": conversation.goal is not None}
    return fields | {"place": (document.file, document.record)}


def _from_json(fields: dict[str, Any]) -> Item:
    """Return an item without the text and the goal of its document."""
    place, steps = fields.pop("place"), fields.pop("steps")
    goal = Goal(None, None) if fields.pop("goal") else None
    steps = [LabeledStep(*step) for step in steps]
    return Document("", *place), Conversation(**fields, steps=steps, goal=goal)


def main() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    settings, content = _receive(requests)
    settings["tokenizer"] = tokenizer_file.load(content, "tokenizer")
    settings["template"] = ChatTemplate(**settings["template"])
    with BatchEncoder(ChatEncoder(**settings)) as encoder, contextlib.suppress(EOFError):
        while True:
            batch, _ = _receive(requests)
            _send(answers, *_answer(encoder, batch))


def _answer(encoder: BatchEncoder, batch: Sequence[dict[str, Any]]) -> tuple[Any, bytes]:
    """Return the result of a batch as a message, its error, or the traceback of a bug."""
    try:
        result = encoder.encode([_from_json(each) for each in batch])
    except DataError as error:
        return {"raised": error.parts}, b""
    except Exception:
        return {"bug": traceback.format_exc()}, b""
    numbers, ids, weights = zip(*result.used, strict=True) if result.used else ((), (), ())
    columns = [np.asarray(each, "<i4") for each in ids] + [np.asarray(w, "<f4") for w in weights]
    answer = result._asdict() | {
        "numbers": numbers,
        "sizes": [*map(len, ids)],
        "error": result.error and result.error.parts,
    }
    del answer["used"]
    return answer, b"".join(each.tobytes() for each in columns)


if __name__ == "__main__":
    main()
