"""Processes that encode batches of conversations, and the program that they run.

A process reads pickled objects from its standard input, the settings first and then batches, and
writes a pickled answer to each on its standard output. It is not of `multiprocessing`, which would
run a script that calls `jaxlm.train` without `if __name__ == "__main__"` once more.
"""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from jaxlm.core.errors import JaxlmError, PeerLost
from jaxlm.data import tokenizer_file
from jaxlm.data.chat_encoder import BatchEncoder, ChatEncoder, EncodedBatch, Item

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
        """Yield each batch and its result, in order. The documents of results have no text.

        Raises:
          JaxlmError: that of `BatchEncoder.encode`, once the batches before were yielded.
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
        fields = vars(encoder) | {"tokenizer": encoder.tokenizer.serialize()}
        self._head = pickle.dumps(fields)

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
        # The texts of documents are those of their conversations.
        light = [(d._replace(text="", conversation=None), each) for d, each in batch]
        try:
            self._process.stdin.write(self._head + pickle.dumps(light))
            self._process.stdin.flush()
            self._head = b""
            answer = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            raise PeerLost(
                "a process that encodes conversations ended",
                where="data.train",
                why=f"its exit code is {self._process.wait()}, without an answer; -9 means that it "
                "was killed, for example for lack of memory",
                fix="run the same command again once more memory is free",
            ) from None
        if isinstance(answer, JaxlmError):
            raise answer
        if isinstance(answer, str):
            raise RuntimeError(f"a process that encodes conversations failed:\n{answer}")
        return answer


def main() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    fields = pickle.load(requests)
    tokenizer = tokenizer_file.load(fields.pop("tokenizer"), "tokenizer")
    with BatchEncoder(ChatEncoder(tokenizer, **fields)) as encoder:
        while True:
            try:
                batch = pickle.load(requests)
            except EOFError:
                return
            pickle.dump(_answer(encoder, batch), answers)
            answers.flush()


def _answer(encoder: BatchEncoder, batch: Sequence[Item]) -> Any:
    """Return the result of a batch, its error, or the traceback of a bug."""
    try:
        return encoder.encode(batch)
    except JaxlmError as error:
        return error
    except Exception:
        return traceback.format_exc()


if __name__ == "__main__":
    main()
