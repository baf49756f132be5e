"""Four rollouts of a real model on a real cluster under traffic: `make demo`.

1. FP32, the first engine.
2. INT8 of the same graph, 2.6 times faster: promoted by canary.
3. A graph that INT8 destroys: stopped by the accuracy gate; no request ever reaches it.
4. A graph that is right and several times slower: passes the gate, tried by one worker, rolled back.

From the second on a pod sends 40 checked requests a second to the model's Service. Exit status 0 only if all four ended
as they should and no request failed.
"""

from __future__ import annotations

import calendar
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import stage
from kube import DemoError, Follower, Kubectl, ModelWatch, Object, condition, describe, revision
from report import Result, table
from traffic import Summary, Traffic

HERE = Path(__file__).parent
MODEL = "magika"
ROLLOUT_SECONDS = 240.0
BASELINE_SECONDS = 8.0  # of undisturbed traffic before each rollout
TRAFFIC_SECONDS = 1200.0
METRICS_PORT = 8082
BEGAN, EPOCH = time.monotonic(), time.time()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {text}", flush=True)


class Demo:
    """The story: each rollout is a change of the manifest, a wait for its end, and what that must look like."""

    def __init__(self, ready: stage.Stage) -> None:
        self._stage = ready
        self._kubectl: Kubectl = ready.kubectl
        self._traffic = Traffic(ready.kubectl, stage.NAMESPACE)
        self._watch = ModelWatch(ready.kubectl, stage.NAMESPACE, MODEL)
        self._lines = Follower(ready.kubectl, _show, "get", "trtmodels", "-n", stage.NAMESPACE, "--watch")
        self._stable = ""
        self._settled = 0.0
        self.results: list[Result] = []

    def run(self) -> None:
        try:
            self._first()
            self._start_traffic()
            self._change("2 INT8", "promoted by canary", HERE / "patch-int8.yaml", self._must_be_promoted)
            self._change("3 damaged", "stopped by the gate", _source("damaged"), self._must_be_stopped)
            self._change("4 slow", "rolled back", _source("slow"), self._must_be_rolled_back)
        finally:
            self._watch.close()
            self._lines.close()

    def stop_traffic(self) -> None:
        self._traffic.stop()

    def total(self) -> Summary:
        return self._traffic.summary(float("-inf"), float("inf"))

    def failures(self) -> list[str]:
        return [
            f"[{f['due'] - EPOCH:5.0f} s] {f['failure']}: {f['detail']} (revision {f['revision'] or 'unknown'})"
            for f in self._traffic.failures()
        ]

    def _first(self) -> None:
        manifest = HERE / "trtmodel.yaml"
        result = self._begin("1 FP32", "first engine serves")
        say(f"{result.name}: kubectl apply -f {manifest.relative_to(stage.ROOT)}")
        self._kubectl.run("apply", "-f", "-", text=stage.manifest(manifest, self._kubectl.environment))
        model = self._until_ended(result, 1)
        result.serving = result.end
        self._measure_build(result)
        result.problems += _unless(condition(model, "Ready")["status"] == "True", "it is not Ready")
        self._finish(result, model)
        self._stable = revision(model, "stable")

    def _start_traffic(self) -> None:
        self._traffic.start(self._stage.worker_image, MODEL, self._stage.files / "requests.npz", TRAFFIC_SECONDS)
        self._settled = time.time()
        say("traffic: 40 requests a second over 16 connections, every answer checked")

    def _change(
        self, name: str, expected: str, patch: Path | str, check: Callable[[Result, Object], list[str]]
    ) -> None:
        self._traffic.wait("undisturbed traffic", 60, lambda now: now - self._settled >= BASELINE_SECONDS)
        before = self._traffic.summary(self._settled, time.time())
        result = self._begin(name, expected)
        result.before = before
        arguments = ["patch", "trtmodel", MODEL, "-n", stage.NAMESPACE, "--type", "merge"]
        arguments += ["-p", patch] if isinstance(patch, str) else ["--patch-file", str(patch)]
        say(f"{name}: kubectl patch trtmodel {MODEL} {_shown(patch)}")
        self._kubectl.run(*arguments)
        generation = self._kubectl.get("trtmodel", MODEL, "-n", stage.NAMESPACE)["metadata"]["generation"]
        model = self._until_ended(result, generation)
        self._traffic.wait(
            "answers by the stable engine alone", 30, lambda now: self._only(revision(model, "stable"), now)
        )
        self._settled = time.time()
        result.during = self._traffic.summary(result.begin, self._settled)
        self._measure_build(result)
        result.problems += check(result, model)
        failed = result.during["failed"]
        result.problems += _unless(not failed, f"{failed} requests failed: {result.during['failures']}")
        self._finish(result, model)
        self._stable = revision(model, "stable")

    # What each rollout must look like at its end

    def _must_be_promoted(self, result: Result, model: Object) -> list[str]:
        new = revision(model, "stable")
        answered = _answers(result, new)
        result.serving = answered.get("first")
        result.flip = self._flip()
        return [
            *_unless(condition(model, "Ready")["status"] == "True", "it is not Ready"),
            *_unless(new != self._stable, "the stable revision is still the old one"),
            *_unless(bool(answered), "no request was answered by the new revision"),
        ]

    def _must_be_stopped(self, result: Result, model: Object) -> list[str]:
        answered = set((result.during or {}).get("revisions", ()))
        return [
            *_unless(condition(model, "Stalled")["reason"] == "GateFailed", "it was not stopped by the gate"),
            *_unless(condition(model, "Verified")["status"] == "False", "Verified is not False"),
            *_unless(revision(model, "stable") == self._stable, "the stable revision changed"),
            *_unless(answered == {self._stable}, f"requests were answered by {sorted(answered)}"),
        ]

    def _must_be_rolled_back(self, result: Result, model: Object) -> list[str]:
        tried = [name for name in (result.during or {}).get("revisions", ()) if name != self._stable]
        result.serving = _answers(result, tried[0]).get("first") if tried else None
        result.flip = self._flip()
        return [
            *_unless(condition(model, "Verified")["status"] == "True", "it did not pass the gate"),
            *_unless(condition(model, "Stalled")["status"] == "True", "it is not Stalled"),
            *_unless(revision(model, "stable") == self._stable, "the stable revision changed"),
            *_unless(len(tried) == 1, f"tried were {tried}, and not one candidate"),
        ]

    # Parts of every rollout

    def _begin(self, name: str, expected: str) -> Result:
        self.results.append(Result(name, expected, time.time()))
        return self.results[-1]

    def _until_ended(self, result: Result, generation: int) -> Object:
        def ended(model: Object) -> bool:
            known = model["metadata"]["generation"] >= generation
            return known and "True" in (condition(model, "Ready")["status"], condition(model, "Stalled")["status"])

        model = self._watch.wait(f"{result.name}: end of the rollout", ROLLOUT_SECONDS, ended)
        result.end = time.time()
        return model

    def _finish(self, result: Result, model: Object) -> None:
        result.outcome = "not as it should" if result.problems else result.expected
        why = condition(model, "Stalled" if condition(model, "Stalled")["status"] == "True" else "Ready")
        say(f"{result.name}: {result.outcome}. {why['reason']}: {why['message']}")
        if result.problems:
            raise DemoError(f"{result.name}: {'; '.join(result.problems)}\n{describe(model)}")

    def _measure_build(self, result: Result) -> None:
        """From the termination message of the build Job of this rollout: it ends with the gate and the upload."""
        selector = f"trtmodel.io/model={MODEL},trtmodel.io/kind=build"
        for pod in self._kubectl.get("pods", "-n", stage.NAMESPACE, "-l", selector)["items"]:
            for container in pod.get("status", {}).get("containerStatuses", ()):
                ended = container["state"].get("terminated")
                if not ended or _epoch(pod["metadata"]["creationTimestamp"]) < int(result.begin):
                    continue
                result.gated = _epoch(ended["finishedAt"])
                build = json.loads(ended.get("message") or "{}").get("build")
                result.built = result.gated - build["gateSeconds"] if build else None

    def _flip(self) -> float | None:
        """The longest of the workers' last changes of route."""
        selector = f"trtmodel.io/model={MODEL},trtmodel.io/role=worker"
        found = []
        for pod in self._kubectl.get("pods", "-n", stage.NAMESPACE, "-l", selector)["items"]:
            text = self._kubectl.proxy(stage.NAMESPACE, pod["metadata"]["name"], METRICS_PORT, "/metrics")
            found += [float(line.split()[1]) for line in text.splitlines() if line.startswith("trtmodel_flip_seconds ")]
        return max(found, default=None)

    def _only(self, name: str, now: float) -> bool:
        return set(self._traffic.summary(now - 2, now)["revisions"]) == {name}


def _show(output: IO[str]) -> None:
    """A line where anything but the age differs from the one before: the operator writes its memory apart from the
    rest of the status, and each write is an event."""
    shown: list[str] = []
    for line in output:
        if line.split()[:-1] != shown:
            shown = line.split()[:-1]
            print(f"[{time.monotonic() - BEGAN:5.0f} s]   {line.rstrip()}", flush=True)


def _source(name: str) -> str:
    return json.dumps({"spec": {"source": {"uri": f"s3://models/magika/{name}.onnx"}}})


def _shown(patch: Path | str) -> str:
    return f"-p '{patch}'" if isinstance(patch, str) else f"--patch-file {patch.relative_to(stage.ROOT)}"


def _answers(result: Result, name: str) -> Summary:
    found: Summary = (result.during or {}).get("revisions", {}).get(name, {})
    return found


def _unless(good: bool, problem: str) -> list[str]:
    return [] if good else [problem]


def _epoch(text: str) -> float:
    """Of a Kubernetes time, which is in whole seconds of UTC."""
    return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="trtmodel-demo-") as folder:
        try:
            demo = Demo(stage.prepare(Path(folder), say))
        except (DemoError, OSError) as e:
            say(f"the demo could not begin: {e}")
            return 1
        ended = _play(demo)
    print(f"\n{table(demo.results)}\n")
    if len(demo.results) > 1:
        ended = _tell_requests(demo) and ended
    say("all four rollouts ended as they should" if ended else "NOT all rollouts ended as they should")
    print("The cluster is still up: `eval $(tests/cluster/cluster env)` for kubectl. `make demo-down` removes it.")
    return 0 if ended else 1


def _play(demo: Demo) -> bool:
    try:
        demo.run()
    except DemoError as e:
        say(str(e))
    except KeyboardInterrupt:
        say("interrupted")
    else:
        return True
    return False


def _tell_requests(demo: Demo) -> bool:
    """Whether none failed, between the rollouts neither."""
    try:
        total, failures = demo.total(), demo.failures()
        demo.stop_traffic()
    except DemoError as e:
        say(f"the traffic cannot be asked any more: {e}")
        return False
    print(f"all requests: {total['sent']:,} sent, {total['failed']} failed")
    for line in failures[:10]:
        print(f"  {line}")
    return not total["failed"]


if __name__ == "__main__":
    sys.exit(main())
