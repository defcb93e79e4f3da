"""A server of our own that answers as the Hugging Face Hub does, for the real huggingface_hub."""

import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse
from pathlib import Path

import huggingface_hub.constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"

CONVERTED = "refs/convert/parquet"


class Hub(http.server.BaseHTTPRequestHandler):
    """Models in folders `root/org/name`, each of one commit, on the branch main and as the tag v1.

    Data sets are in `root/datasets/org/name`; their large files have a sha256, as LFS keeps them.
    What they are on the branch refs/convert/parquet is in `root/datasets/org/name.converted`.
    """

    root = Path()
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.asked.append(self.path)
        self._answer(self._found())

    def do_HEAD(self):
        self._answer(self._found())

    def _found(self):
        """Status, headers and content."""
        path = urllib.parse.unquote(self.path.partition("?")[0])
        is_converted = CONVERTED in path
        parts = path.replace(CONVERTED, "main").strip("/").split("/")
        is_api = parts[0] == "api"
        parts = [part for part in parts[is_api:] if part != "models"]
        is_dataset = parts[0] == "datasets"
        if len(parts) < 2 + is_dataset:
            return 404, {}, b"Not found"
        org, name, *rest = parts[is_dataset:]
        place = self.server.root / ("datasets" if is_dataset else "") / org
        folder = place / (f"{name}.converted" if is_converted else name)
        if not folder.is_dir():
            return 404, {"X-Error-Code": "RepoNotFound"}, b"Repository not found"
        if rest and rest[1] not in ("main", "v1", self.server.commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"Invalid rev id"
        if is_api:
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            listed = [self._listed(path, folder, is_dataset) for path in files]
            said = {"id": f"{org}/{name}", "sha": self.server.commit, "siblings": listed}
            if is_dataset:
                said["cardData"] = self.server.card
            return 200, {"Content-Type": "application/json"}, json.dumps(said).encode()
        if (folder / "GATED").exists():
            return 403, {"X-Error-Code": "GatedRepo"}, b"Access to model is restricted"
        both = (folder.joinpath(*rest[2:]), (place / f"{name}.converted").joinpath(*rest[2:]))
        path = next((each for each in both if each.is_file()), folder / "none")
        if not path.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b"Entry not found"
        content = path.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": self.server.commit}, content

    def _listed(self, path, folder, is_dataset):
        size = path.stat().st_size
        row = {"rfilename": str(path.relative_to(folder)), "size": size}
        if is_dataset and path.suffix == ".parquet":
            digest = (
                self.server.digests.get(path.name) or hashlib.sha256(path.read_bytes()).hexdigest()
            )
            row["lfs"] = {"size": size, "sha256": digest, "pointerSize": 134}
        return row

    def _answer(self, answer):
        status, headers, content = answer
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@contextlib.contextmanager
def serving(tmp_path, monkeypatch):
    """A server with no model yet, which huggingface_hub takes for the hub, and an empty cache."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.root, server.asked = tmp_path / "hub", []
        server.commit, server.card, server.digests = COMMIT, {}, {}
        server.url = f"http://127.0.0.1:{server.server_port}"
        server.cache = tmp_path / "cache"
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(server.cache))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
        huggingface_hub.close_session()
