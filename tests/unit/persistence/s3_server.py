"""A real S3 server on loopback, whose moods a test can choose."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import boto3
import pytest
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import BaseWSGIServer, make_server
from werkzeug.test import run_wsgi_app

BUCKET = "runs-in-a-bucket"

_SLOW_DOWN = (
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


class S3Server:
    """moto's server, which keeps its objects while it is stopped.

    Attributes:
        requests: Method and object's name (or ``?`` for a listing) of every request so far.
        throttled: Called with each; where it says so, the answer is 503 SlowDown.
        refused: The same for 403 AccessDenied.
        lost: Where it says so, the request is carried out, and then answered like that.
        delay_seconds: Waited before each answer.
        requested: Called with each before it is answered.
    """

    def __init__(self, environment: pytest.MonkeyPatch) -> None:
        self.requests: list[tuple[str, str]] = []
        self.throttled: Callable[[str, str], bool]
        self.refused: Callable[[str, str], bool]
        self.lost: Callable[[str, str], bool]
        self.requested: Callable[[str, str], None]
        self.delay_seconds: float
        self.forget()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._port = 0
        self._server: BaseWSGIServer | None = None
        self.start()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }
        for name, value in self.environment.items():
            environment.setenv(name, value)
        self.client = boto3.client(
            "s3",
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket=BUCKET)

    def start(self) -> None:
        """Listen, on the same port as before."""
        self._server = make_server(
            "127.0.0.1", self._port, self._answer, threaded=True, request_handler=_Quiet
        )
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def forget(self) -> None:
        """Its moods, and what was asked."""
        self.throttled = self.refused = self.lost = lambda method, name: False
        self.requested = lambda method, name: None
        self.delay_seconds = 0.0
        self.requests.clear()

    def url(self, prefix: str) -> str:
        """URL of a prefix in the bucket."""
        return f"s3://{BUCKET}/{prefix}"

    def names(self, prefix: str) -> list[str]:
        """Names of the objects under a prefix."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=BUCKET, Prefix=prefix + "/"
        )
        return [
            item["Key"].removeprefix(prefix + "/")
            for page in pages
            for item in page.get("Contents", ())
        ]

    def asked(self, method: str) -> list[str]:
        """Names of the objects that were asked for with a method, in order."""
        return [name for how, name in self.requests if how == method]

    @contextmanager
    def away(self) -> Iterator[None]:
        """Gone, and back afterwards."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        _, _, key = unquote(environ["PATH_INFO"]).lstrip("/").partition("/")
        name = "/".join(key.split("/")[-3:]) or "?"
        self.requests.append((method, name))
        self.requested(method, name)
        time.sleep(self.delay_seconds)
        for asked, status, code in (
            (self.throttled, "503 Slow Down", "SlowDown"),
            (self.refused, "403 Forbidden", "AccessDenied"),
        ):
            if asked(method, name):
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response(status, [("Content-Type", "application/xml")])
                return [f"<Error><Code>{code}</Code></Error>".encode()]
        if self.lost(method, name):
            run_wsgi_app(self._app, environ)
            start_response("503 Slow Down", [])
            return []
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer


class _Quiet(MotoRequestHandler):
    def log_request(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def running_server() -> Iterator[S3Server]:
    """A server, and the environment that leads to it, for the tests of one module."""
    with pytest.MonkeyPatch.context() as environment:
        made = S3Server(environment)
        yield made
        made.stop()
