"""A server on this machine with the interface of S3; a test may replace its answers by errors."""

import contextlib
import logging
import threading
from collections.abc import Callable

import boto3
import moto.server
import werkzeug.serving

KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'


class S3:
    """The server: its address, what it was asked, and the answer to requests that fail."""

    def __init__(self):
        self._app = moto.server.DomainDispatcherApplication(moto.server.create_backend_app)
        self.requests: list[tuple[str, str]] = []  # method and path
        # Returns the status and code of an error for (method, path), or None.
        self.fault: Callable[[str, str], tuple[str, str] | None] = lambda method, path: None
        self._server = werkzeug.serving.make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.env = KEYS | {"AWS_ENDPOINT_URL": self.url}

    def _answer(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        if fault := self.fault(method, path):
            status, code = fault
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(status, [("Content-Type", "application/xml")])
            return [ERROR.format(code=code).encode() if method != "HEAD" else b""]
        return self._app(environ, start_response)

    def client(self):
        """A client of its own, for what the tests look at and damage."""
        keys = {
            "aws_access_key_id": "testing",
            "aws_secret_access_key": "testing",
            "region_name": "us-east-1",
        }
        return boto3.client("s3", endpoint_url=self.url, **keys)

    def bucket(self, name: str) -> str:
        """Makes a bucket, and returns its URL."""
        self.client().create_bucket(Bucket=name)
        return f"s3://{name}"


@contextlib.contextmanager
def serving():
    """A server on the loopback address."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    s3 = S3()
    thread = threading.Thread(
        target=s3._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    yield s3
    s3._server.shutdown()
    thread.join()
