"""Stores of files for tests: one in memory, and a local web server that breaks connections."""

import contextlib
import functools
import http.server
import threading

import fsspec


@contextlib.contextmanager
def in_memory():
    """A store in memory, empty before and after."""
    store = fsspec.filesystem("memory")
    yield store
    store.store.clear()
    store.pseudo_dirs[:] = [""]


class Flaky(http.server.SimpleHTTPRequestHandler):
    """Breaks the connection in the middle of a file, `breaks` times."""

    breaks = 0

    def log_message(self, *_):
        pass

    def copyfile(self, source, outputfile):
        data = source.read()
        if Flaky.breaks > 0:
            Flaky.breaks -= 1
            outputfile.write(data[: len(data) // 2])
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(2)
            return
        outputfile.write(data)


@contextlib.contextmanager
def serving(folder):
    """The URL of a server over a folder, which is made."""
    folder.mkdir()
    handler = functools.partial(Flaky, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
