"""A Prometheus of a test's own, and the configuration that the documentation gives."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from free_ports import free_port

ROOT = Path(__file__).resolve().parents[1]
ALERTS = ROOT / "charts" / "trtmodel-operator" / "files" / "alerts.yaml"
START_SECONDS = 60
CALL_SECONDS = 30
STOP_SECONDS = 30


def documented(pods: Path) -> dict[str, Any]:
    """The configuration in docs/metrics.md, with the rules of this clone. Debian builds Prometheus without discovery in
    Kubernetes: the file `pods` (see `discovered`) stands in for it, and all after that is as documented."""
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "metrics.md").read_text(), re.DOTALL)
    found: dict[str, Any] = yaml.safe_load(text)
    for job in found["scrape_configs"]:
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
        job["file_sd_configs"] = [{"files": [str(pods)], "refresh_interval": "1s"}]
    return found | {"rule_files": [str(ALERTS)]}


def discovered(pods: Iterable[Mapping[str, Any]]) -> str:
    """What Prometheus' discovery with the role pod finds of these pods, as a file of targets."""
    found = []
    for pod in pods:
        meta, address = pod["metadata"], pod["status"].get("podIP")
        labels = {"namespace": meta["namespace"], "pod_name": meta["name"]}
        labels |= {f"pod_label_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": v for name, v in meta.get("labels", {}).items()}
        for container in pod["spec"]["containers"] if address else ():
            for port in container.get("ports", ()):
                mine = labels | {"pod_container_port_name": port.get("name", "")}
                named = {f"__meta_kubernetes_{name}": value for name, value in mine.items()}
                found.append({"targets": [f"{address}:{port['containerPort']}"], "labels": named})
    return json.dumps(found)


class Prometheus:
    """Runs until it is closed."""

    def __init__(self, program: Path, config: dict[str, Any], folder: Path) -> None:
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "prometheus.log"
        flags = {
            "config.file": folder / "prometheus.yml",
            "storage.tsdb.path": folder / "data",
            "web.listen-address": f"127.0.0.1:{port}",
        }
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [program, *(f"--{name}={value}" for name, value in flags.items())], stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise AssertionError(f"prometheus does not start: {self.log()}")
            time.sleep(0.2)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def log(self) -> str:
        return self._log.read_text()[-2000:]

    def targets(self) -> dict[str, str]:
        """Pod -> '' for one that is scraped, else what is wrong."""
        found = self._ask("targets", state="active")["activeTargets"]
        return {
            t["labels"].get("pod", t["scrapeUrl"]): "" if t["health"] == "up" else t["lastError"] or t["health"]
            for t in found
        }

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("query", query=expression)["result"]
        return found

    def alerts(self) -> list[dict[str, Any]]:
        """Those that are pending or fire."""
        found: list[dict[str, Any]] = self._ask("alerts")["alerts"]
        return found

    def broken_rules(self) -> dict[str, str]:
        """Rules that cannot be evaluated, and why."""
        rules = [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]
        return {rule["name"]: rule["lastError"] for rule in rules if rule["health"] == "err"}

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=CALL_SECONDS) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _ask(self, what: str, **arguments: str) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=CALL_SECONDS) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as e:
            raise AssertionError(f"{what} {arguments}: {e.read().decode(errors='replace')}") from e
