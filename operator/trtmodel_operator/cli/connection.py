"""The API server, as the current context of kubeconfig names it, or the pod's own service account.

Every call has a time limit, and every failure becomes a `Failed` with its way out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from trtmodel_operator.cli.words import Failed, plain

Json = dict[str, Any]

CALL_SECONDS = 20.0
ASK_SECONDS = 2.0  # of one worker, through the API server's proxy
PAGE = 500
GROUP = "/apis/trtmodel.io/v1alpha1"
EVENTS = "/apis/events.k8s.io/v1"
COMMAND = "trtmodel.io/command"
IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


# What the client raises for a file of another shape, since it looks at none of it first.
_MALFORMED = (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError)
_TRIAL = re.compile(r"([0-9a-f]{1,64}); weight=([0-9]{1,3}); shadow=([0-9]{1,3})")


@dataclass(frozen=True)
class Routed:
    """What a worker answers with. `weight`: the share of requests that the candidate answers, `shadow` that of stable's
    answers that it mirrors, in percent."""

    stable: str
    holds: tuple[str, ...]
    candidate: str = ""
    weight: int = 0
    shadow: int = 0


class Connection:
    """Close it. `namespace` is the one of the command line, of the context, or default. Raises Failed."""

    def __init__(self, kubeconfig: str = "", context: str = "", namespace: str = "") -> None:
        try:
            loaded = _configuration(kubeconfig, context)
        except (config.ConfigException, OSError, *_MALFORMED) as e:
            named = kubeconfig or os.environ.get("KUBECONFIG") or "kubeconfig"
            broken = "it is no kubeconfig: " if isinstance(e, _MALFORMED) else ""
            why = f"{plain(named)}: {broken}{plain(e).rstrip('.')}"
            raise Failed(f"no cluster: {why}. Name one with --kubeconfig, KUBECONFIG or --context") from e
        self.namespace = namespace or loaded[1] or "default"
        settings = loaded[0]
        settings.retries = False
        if not settings.verify_ssl:  # the user wrote insecure-skip-tls-verify; kubectl says nothing of it either
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        self._client = client.ApiClient(settings)
        self._host = settings.host

    def close(self) -> None:
        self._client.close()

    def get(self, name: str) -> Json:
        """The TRTModel."""
        return self._json("GET", f"{self._models()}/{quote(name, safe='')}")

    def models(self, *, everywhere: bool = False, selector: str = "", seconds: float = CALL_SECONDS) -> list[Json]:
        path = f"{GROUP}/trtmodels" if everywhere else self._models()
        return self._pages(path, {"labelSelector": selector} if selector else {}, seconds)

    def command(self, name: str, text: str) -> Json:
        """Writes the annotation. The TRTModel as it is then."""
        body = {"metadata": {"annotations": {COMMAND: text}}}
        return self._json("PATCH", f"{self._models()}/{quote(name, safe='')}", body=body)

    def dry_run(self, manifest: Json) -> None:
        """Lets the API server judge a manifest and stores nothing."""
        meta = manifest.get("metadata")
        named = meta if isinstance(meta, Mapping) else {}
        path = f"{GROUP}/namespaces/{quote(str(named.get('namespace') or self.namespace), safe='')}/trtmodels"
        query = {"dryRun": "All", "fieldValidation": "Strict"}
        name = str(named.get("name") or "")
        try:
            self._json("GET", f"{path}/{quote(name, safe='')}")
        except Failed as e:
            if not isinstance(e, Refused) or e.status != 404:
                raise
            self._json("POST", path, query, manifest)
            return
        # It exists: rules about what may change are asked as well.
        query |= {"fieldManager": "trtmodel-lint", "force": "true"}
        self._json("PATCH", f"{path}/{quote(name, safe='')}", query, manifest, "application/apply-patch+yaml")

    def events(self, uid: str) -> list[Json]:
        """Of one object, oldest first."""
        path = f"{EVENTS}/namespaces/{quote(self.namespace, safe='')}/events"
        found = [e for e in self._pages(path, {}) if (e.get("regarding") or {}).get("uid") == uid]
        return sorted(found, key=lambda e: str(e.get("eventTime") or e["metadata"].get("creationTimestamp")))

    def pods(self, name: str) -> list[Json]:
        """Worker pods of the model that are not on their way out."""
        selector = f"trtmodel.io/model={name},trtmodel.io/role=worker"
        found = self._pages(f"/api/v1/namespaces/{quote(self.namespace, safe='')}/pods", {"labelSelector": selector})
        return [p for p in found if not p["metadata"].get("deletionTimestamp")]

    def ask(self, pod: str, model: str) -> Routed:
        """By the worker's own answer, through the API server's proxy, for which the caller needs the right to get
        pods/proxy. Raises Failed, ValueError."""
        where = f"/api/v1/namespaces/{quote(self.namespace, safe='')}/pods/{quote(pod, safe='')}:8080/proxy"
        answer = self._call("GET", f"{where}/v2/models/{quote(model, safe='')}", {}, None, "", ASK_SECONDS)
        found = json.loads(answer.data)
        trial = _TRIAL.fullmatch(str(answer.headers.get("x-trtmodel-candidate") or ""))
        return Routed(
            str(answer.headers.get("x-trtmodel-revision") or ""),
            tuple(str(v) for v in found.get("versions", ())),
            trial[1] if trial else "",
            int(trial[2]) if trial else 0,
            int(trial[3]) if trial else 0,
        )

    # ------------------------------------------------------------------------------------------------------------

    def _models(self) -> str:
        return f"{GROUP}/namespaces/{quote(self.namespace, safe='')}/trtmodels"

    def _pages(self, path: str, query: Mapping[str, str], seconds: float = CALL_SECONDS) -> list[Json]:
        found: list[Json] = []
        more = ""
        while True:
            page = {**query, "limit": str(PAGE), **({"continue": more} if more else {})}
            answer = self._json("GET", path, page, seconds=seconds)
            found += answer.get("items") or ()
            more = (answer.get("metadata") or {}).get("continue") or ""
            if not more:
                return found

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        kind: str = "",
        seconds: float = CALL_SECONDS,
    ) -> Json:
        answer = self._call(method, path, query or {}, body, kind, seconds)
        try:
            found = json.loads(answer.data)
        except (ValueError, RecursionError) as e:
            raise Failed(f"{self._host} answered with what is no JSON: is it an API server?") from e
        if not isinstance(found, dict):
            raise Failed(f"{self._host} answered with what is no object: is it an API server?")
        return found

    def _call(
        self, method: str, path: str, query: Mapping[str, str], body: Json | None, kind: str, seconds: float
    ) -> Any:
        written = kind or ("application/merge-patch+json" if method == "PATCH" else "application/json")
        headers = {"Accept": "application/json", "Content-Type": written, "User-Agent": "kubectl-trtmodel"}
        url = f"{path}?{urlencode(query)}" if query else path
        try:
            call = self._client.param_serialize(
                method, url, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            answer = self._client.call_api(*call, _request_timeout=seconds)
            answer.read()
        except ApiException as e:
            raise Refused(e.status, _said(e.body or e.reason)) from e
        except (urllib3.exceptions.HTTPError, OSError) as e:
            raise Failed(f"{self._host} cannot be reached: {plain(e)}", passing=True) from e
        if not 200 <= answer.status < 300:
            raise Refused(answer.status, _said(answer.data or b""))
        return answer


class Refused(Failed):
    """The API server's answer, in its own words. `status` is HTTP's."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text, passing=status == 429 or status >= 500)
        self.status = status


def _configuration(kubeconfig: str, context: str) -> tuple[client.Configuration, str]:
    """(settings, namespace of the context). As kubectl looks: a kubeconfig first, then the pod that this runs in.
    Raises ConfigException, OSError."""
    settings = client.Configuration()
    file = kubeconfig or os.environ.get("KUBECONFIG") or None
    try:
        contexts, active = config.list_kube_config_contexts(config_file=file)
    except config.ConfigException:
        if file or context or not IN_CLUSTER.is_file():
            raise
        config.load_incluster_config(client_configuration=settings)
        return settings, IN_CLUSTER.read_text().strip()
    chosen = next((c for c in contexts if c["name"] == context), None) if context else active
    if chosen is None:
        raise config.ConfigException(f"there is no context {context!r}")
    config.load_kube_config(file, chosen["name"], client_configuration=settings)
    return settings, str((chosen.get("context") or {}).get("namespace") or "")


def _said(body: object) -> str:
    """The message of a Status, else the body."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
    try:
        found = json.loads(text)
    except ValueError:
        return plain(text)[:1000]
    message = found.get("message") if isinstance(found, dict) else None
    return plain(message or text)[:4000]
