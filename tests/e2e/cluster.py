"""The cluster as a user with kubectl has it, and as a program that reads plain JSON."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kubernetes import client, config

CALL_SECONDS = 60.0
Json = dict[str, Any]


class Refused(Exception):
    """What the API server, or what stands behind its proxy, did not like. `status` is HTTP's."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text


class Cluster:
    """Close it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = {**os.environ, **environment}
        self._client = config.new_client_from_config(environment["KUBECONFIG"])

    def close(self) -> None:
        self._client.close()

    def kubectl(self, *arguments: str | Path, text: str = "", seconds: float = CALL_SECONDS) -> str:
        """What kubectl prints. Fails the test with what it complains of."""
        command = [*shlex.split(self.environment["KUBECTL"]), *map(str, arguments)]
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=seconds, check=False, env=self.environment
        )
        assert done.returncode == 0, f"kubectl {' '.join(map(str, arguments))}: {done.stderr or done.stdout}"
        return done.stdout

    @contextmanager
    def forwarded(self, namespace: str, where: str, port: int) -> Iterator[str]:
        """An address on this machine that leads to `where` (service/NAME, pod/NAME)."""
        command = [*shlex.split(self.environment["KUBECTL"]), "-n", namespace, "port-forward", where, f":{port}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.environment)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()  # Forwarding from 127.0.0.1:41234 -> 9000
            assert line.startswith("Forwarding from "), line
            yield line.split()[2]
        finally:
            process.kill()
            process.wait()

    def request(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        """The JSON that stands at `path`. Raises Refused."""
        answer = self._ask(method, path, body, query)
        return json.loads(answer)

    def merge(self, path: str, body: Json) -> Json:
        """The object as a merge patch leaves it. Raises Refused."""
        found: Json = json.loads(self._ask("PATCH", path, body, {}, "application/merge-patch+json"))
        return found

    def text(self, path: str, **query: str) -> str:
        return self._ask("GET", path, None, query).decode(errors="replace")

    def items(self, path: str, selector: str = "") -> list[Json]:
        query = {"labelSelector": selector} if selector else {}
        found: list[Json] = self.request("GET", path, **query)["items"]
        return found

    def _ask(
        self, method: str, path: str, body: Any, query: Mapping[str, str], content: str = "application/json"
    ) -> bytes:
        url = f"{path}?{urlencode(query)}" if query else path
        headers = {"Accept": "application/json", "Content-Type": content}
        call = self._client.param_serialize(
            method, url, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            answer = self._client.call_api(*call, _request_timeout=CALL_SECONDS)
        except client.ApiException as e:
            raise Refused(e.status, str(e.body or e.reason)) from e
        data: bytes = answer.read()
        if not 200 <= answer.status < 300:
            raise Refused(answer.status, data.decode(errors="replace"))
        return data
