"""What stands outside the product, as a pod: webhooks and a Prometheus that answer as a test wants it, and note what
they were asked. The script needs nothing but Python's standard library: it runs in the worker's image."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping

from .cluster import Json
from .world import World, until

NAME = "outside"
PORT = 8080
SCRIPT = textwrap.dedent('''\
    """PUT /plan sets what is answered by path: [status, body]. GET /asked lists what came."""
    import http.server, json, threading

    PLAN, ASKED, LOCK = {}, [], threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, status, body):
            data = body.encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            with LOCK:
                self.answer(200, json.dumps(ASKED))

        def do_PUT(self):
            with LOCK:
                PLAN.update(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.answer(200, "{}")

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
            headers = {name.lower(): value for name, value in self.headers.items()}
            with LOCK:
                ASKED.append({"path": self.path, "headers": headers, "body": body})
                status, said = PLAN.get(self.path, [404, "nobody is asked here"])
            self.answer(status, said)

        def log_message(self, *about):
            pass

    http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()
    ''')


class Outside:
    def __init__(self, world: World) -> None:
        self._world = world
        self.address = f"http://{NAME}.{world.namespace}.svc:{PORT}"

    def start(self, image: str) -> None:
        labels = {"app": NAME}
        container = {
            "name": NAME,
            "image": image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["python", "/script/serve.py"],
            "readinessProbe": {"httpGet": {"path": "/asked", "port": PORT}, "periodSeconds": 1},
            "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}},
            "volumeMounts": [{"name": "script", "mountPath": "/script", "readOnly": True}],
        }
        pod = {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
            "volumes": [{"name": "script", "configMap": {"name": NAME}}],
        }
        self._world.apply(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": {"serve.py": SCRIPT}},
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": NAME},
                "spec": {"selector": labels, "ports": [{"port": PORT}]},
            },
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": NAME, "labels": labels}, "spec": pod},
        )
        self._world.kubectl("wait", f"pod/{NAME}", "--for=condition=Ready", "--timeout=60s", seconds=70)

    def plans(self, answers: Mapping[str, tuple[int, str]]) -> None:
        """What is said at these paths from now on."""
        self._call("PUT", "/plan", {path: list(answer) for path, answer in answers.items()})

    def gives(self, *numbers: float) -> None:
        """What Prometheus answers every query with: so many series."""
        series = [{"metric": {"pod": f"p{i}"}, "value": [1, str(n)]} for i, n in enumerate(numbers)]
        data = {"resultType": "vector", "result": series}
        self.plans({"/api/v1/query": (200, json.dumps({"status": "success", "data": data}))})

    def asked(self, path: str) -> list[Json]:
        found: list[Json] = self._call("GET", "/asked")
        return [a for a in found if a["path"] == path]

    def wait_asked(self, path: str, seconds: float = 60) -> Json:
        """The last call of this path."""
        found: list[Json] = until(f"{path} is called", seconds, lambda: self.asked(path))
        return found[-1]

    def _call(self, method: str, path: str, body: Json | None = None) -> list[Json]:
        pod = f"/api/v1/namespaces/{self._world.namespace}/pods/{NAME}:{PORT}/proxy{path}"
        found: list[Json] = self._world.cluster.request(method, pod, body)
        return found
