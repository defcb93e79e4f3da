"""scripts/launch/serve.yaml, nginx.conf and ray_serve.py: many servers of one run."""

import ast
import http.client
import http.server
import importlib
import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from jaxlm.cli import serve
from jaxlm.cli.main import main
from jaxlm.serve.fields import MAX_BODY
from jaxlm.serve.guard import BODY_SECONDS, HEADER_SECONDS, WRITE_SECONDS
from jaxlm.serve.keys import ApiKeys, add_key
from jaxlm.training.launch import free_port

LAUNCH = Path(__file__).parents[2] / "scripts/launch"
NGINX = shutil.which("nginx")


def documents():
    return list(yaml.safe_load_all((LAUNCH / "serve.yaml").read_text()))


def container_of(deployment):
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container


def test_the_deployment_has_the_schema_of_kubernetes_and_the_flags_of_the_command(monkeypatch):
    deployment, service = documents()
    for each in (deployment, service):
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    pod, container = deployment["spec"]["template"]["spec"], container_of(deployment)
    assert container["command"] == ["python3", "-m", "jaxlm", "serve"]
    taken = []
    monkeypatch.setattr(serve, "run", lambda args, out: taken.append(args) or 0)
    assert main(["serve", *container["args"]]) == 0
    (args,) = taken
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pause + args.drain_seconds < pod["terminationGracePeriodSeconds"]
    (port,) = container["ports"]
    assert args.port == port["containerPort"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in pod["volumes"]}
    assert Path(args.keys).parent == Path(mounts["keys"])
    (secret,) = (each["secret"] for each in pod["volumes"] if "secret" in each)
    assert secret["defaultMode"] & 0o077 == 0
    liveness = container["livenessProbe"]
    assert liveness["httpGet"]["path"] == "/health"
    assert liveness["periodSeconds"] * liveness["failureThreshold"] < args.stall_seconds / 2


@pytest.mark.parametrize("is_good", [True, False])
def test_the_probe_of_the_deployment_asks_with_the_key(running, tmp_path, monkeypatch, is_good):
    deployment, _ = documents()
    container = container_of(deployment)
    assert container["readinessProbe"]["exec"] == container["startupProbe"]["exec"]
    _, option, program = container["readinessProbe"]["exec"]["command"]
    key = add_key(tmp_path / "keys.txt")
    monkeypatch.setattr(running.server, "_keys", ApiKeys(tmp_path / "keys.txt"))
    (tmp_path / "probe").write_text(f"{key if is_good else 'wrong'}\n")
    program = program.replace("/keys/probe", str(tmp_path / "probe"))
    program = program.replace("127.0.0.1:8000", f"127.0.0.1:{running.port}")
    done = subprocess.run([sys.executable, option, program], capture_output=True, text=True)
    assert done.returncode == (0 if is_good else 1)
    assert is_good or "401" in done.stderr


class Draining(http.server.BaseHTTPRequestHandler):
    """A server that answers 503."""

    asked = 0

    def do_POST(self):
        type(self).asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words):
        pass


@pytest.fixture
def proxied(running, tmp_path):
    """The address of nginx before a server that drains and the running one."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    names = ["-subj", "/CN=localhost", "-keyout", "key.pem", "-out", "certificate.pem"]
    subprocess.run([*command, *names], cwd=tmp_path, check=True, capture_output=True)
    draining = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Draining)
    threading.Thread(target=draining.serve_forever).start()
    port = free_port()
    text = (LAUNCH / "nginx.conf").read_text()
    for name, value in (
        ("127.0.0.1:8001", f"127.0.0.1:{draining.server_port}"),
        ("127.0.0.1:8002", f"127.0.0.1:{running.port}"),
        ("listen 8443", f"listen 127.0.0.1:{port}"),
    ):
        assert name in text
        text = text.replace(name, value)
    (tmp_path / "nginx.conf").write_text(text)
    nginx = subprocess.Popen([NGINX, "-p", tmp_path, "-c", "nginx.conf", "-g", "daemon off;"])
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        with socket.socket() as link:
            if link.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"127.0.0.1:{port}"
    nginx.terminate()
    nginx.wait(30)
    draining.shutdown()
    draining.server_close()


def post(address, body):
    """Return status and body; the certificate is the server's own."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    link = http.client.HTTPSConnection(address, context=context, timeout=60)
    link.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = link.getresponse()
    text = answer.read().decode()
    link.close()
    return answer.status, text


@pytest.mark.skipif(not NGINX, reason="needs nginx")
def test_nginx_streams_passes_over_a_server_that_drains_and_keeps_the_limits(proxied):
    Draining.asked = 0
    settings = {"model": "run", "prompt": "1+2?", "max_tokens": 20, "seed": 1, "ignore_eos": True}
    answers = [post(proxied, json.dumps(settings)) for _ in range(4)]
    assert {status for status, _ in answers} == {200}
    texts = {json.loads(text)["choices"][0]["text"] for _, text in answers}
    assert len(texts) == 1
    assert Draining.asked == 1  # left out after its first 503
    _, stream = post(proxied, json.dumps(settings | {"stream": True}))
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert {"".join(each["choices"][0]["text"] for each in events)} == texts
    assert len(events) > 5
    assert post(proxied, b" " * (MAX_BODY + 1))[0] == 413


def test_the_limits_of_nginx_are_those_of_the_server():
    text = (LAUNCH / "nginx.conf").read_text()
    assert f"client_max_body_size {MAX_BODY // 2**20}m;" in text
    assert f"client_header_timeout {HEADER_SECONDS:g}s;" in text
    assert f"client_body_timeout {BODY_SECONDS:g}s;" in text
    assert f"send_timeout {WRITE_SECONDS:g}s;" in text


def test_the_application_of_ray_has_the_flags_and_routes_of_the_server(running, monkeypatch):
    """Without Ray, which no extra installs; `scripts/LOG.md` has a run of it."""
    module = ast.parse((LAUNCH / "ray_serve.py").read_text())
    (words,) = re.findall(r"ray_serve:app (.+)", ast.get_docstring(module))
    arguments = dict(word.split("=") for word in words.split())
    assert int(arguments.pop("replicas")) == 2
    taken = []
    monkeypatch.setattr(serve, "run", lambda args, out: taken.append(args) or 0)
    assert main(["serve", "--port=0", *(f"--{k}={v}" for k, v in arguments.items())]) == 0
    assert taken[0].workdir == arguments["workdir"]
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("jaxlm"):
            assert all(hasattr(importlib.import_module(node.module), n.name) for n in node.names)
    routes = {
        each.value
        for each in ast.walk(module)
        if isinstance(each, ast.Constant) and re.fullmatch(r"/\w+", str(each.value))
    }
    assert routes == {"/ready", "/health"}
    assert {running.get(route)[0] for route in routes} == {200}
