"""A server of a tiny run, in a thread of this process."""

import re
import shutil
import threading
import time
import urllib.error
import urllib.request

import pytest

from jaxlm.serve import server as servers
from tests.faults import harness


@pytest.fixture(scope="session")
def trained_once():
    """The folder of the run of `trained`, by its name, once a module has made it."""
    return {}


@pytest.fixture(scope="module")
def trained(trained_once, tmp_path_factory, one_device, without_plots):
    """A run of a few steps on conversations, whose template it stores: a copy for each module."""
    from tests.recipes.test_chat import chat_config

    if not trained_once:
        folder = tmp_path_factory.mktemp("served")
        config = chat_config(folder, 128, **{"train.steps": 2})
        trained_once["run"] = harness.trained(config, folder / "run")
    return shutil.copytree(trained_once["run"], tmp_path_factory.mktemp("served") / "run")


class Running:
    """A server in a thread: its address, and the bridge to its engine."""

    def __init__(self, workdir, patch, **options):
        made = []
        inner = servers.build_engine

        def build(opened, chosen, say=print):
            made.append(inner(opened, chosen, say))
            return made[-1]  # `inner` may be that of another server

        bridges, apps = [], []
        http = servers._http

        def watched(*args, **more):
            context = http(*args, **more)

            class Watched:
                def __enter__(self):
                    entered = context.__enter__()
                    bridges.append(entered[0])
                    apps.append(entered[1])
                    return entered

                def __exit__(self, *failure):
                    return context.__exit__(*failure)

            return Watched()

        patch.setattr(servers, "build_engine", build)
        patch.setattr(servers, "_http", watched)
        self.lines = []
        self.log = self.lines.append
        chosen = servers.ServeOptions(port=0, slots=3, chunk=16, **options)
        self.code = None

        def run():
            self.code = servers.serve(workdir, chosen, lambda line: self.log(line))

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        while self.thread.is_alive() and not any(each.startswith("serving") for each in self.lines):
            time.sleep(0.05)
        (line,) = (each for each in self.lines if each.startswith("serving"))
        self.base = line.rpartition(" ")[2]
        self.root = self.base.removesuffix("/v1")
        self.port = int(self.root.rpartition(":")[2])
        self.bridge, self.engine, self.server = bridges[-1], made[-1], apps[-1]

    def get(self, path, **headers):
        request = urllib.request.Request(self.root + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def close(self):
        self.bridge.stop()
        self.thread.join(60)


@pytest.fixture(scope="module")
def running(trained):
    with pytest.MonkeyPatch.context() as patch:
        server = Running(trained, patch, price=2.0)
        yield server
        server.close()
        assert server.code == 0
        cost = r"; [\d.]+ s of the device, \S+ per million tokens"
        cost = cost if server.engine.counters.drawn_tokens else ""
        assert re.fullmatch(f"stopped{cost}", server.lines[-1])
