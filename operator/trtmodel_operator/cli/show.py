"""get, status, history, explain and events: read, and print."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from trtmodel_operator.cli import look, output
from trtmodel_operator.cli.connection import Connection, Routed
from trtmodel_operator.cli.outcome import EXIT_DONE, EXIT_LATE, condition, listed, memory, outcome, revision, wanted
from trtmodel_operator.cli.words import Failed, plain, span

Json = dict[str, Any]

POLL_SECONDS = 1.0
WHOLE = 100  # percent
ASK_AGAIN_SECONDS = 5.0
ASKED_MOST = 20  # workers of one model that are asked what they serve


def get(at: Connection, options: argparse.Namespace) -> int:
    if options.name and options.all_namespaces:
        raise Failed("a name and --all-namespaces do not go together", 2)
    found = [at.get(options.name)] if options.name else at.models(
        everywhere=options.all_namespaces, selector=options.selector
    )  # fmt: skip
    if options.output == "json":
        print(output.as_json(found[0] if options.name else {"apiVersion": "v1", "kind": "List", "items": found}))
    elif not found:
        print("No TRTModels found.", file=sys.stderr)
    else:
        wide = options.output == "wide"
        print(output.table(look.rows(found, time.time(), everywhere=options.all_namespaces, wide=wide)))
    return EXIT_DONE


def history(at: Connection, options: argparse.Namespace) -> int:
    model = at.get(options.name)
    return _rows(options, (model.get("status") or {}).get("history") or [], look.history(model, time.time()), "history")


def events(at: Connection, options: argparse.Namespace) -> int:
    found = at.events(at.get(options.name)["metadata"]["uid"])
    return _rows(options, found, look.events(found, time.time()), "events")


def explain(at: Connection, options: argparse.Namespace) -> int:
    model = at.get(options.name)
    found = look.explain(model)
    if options.output == "json":
        print(output.as_json(_as_document(found)))
    else:
        output.show(found)
    return EXIT_DONE


def status(at: Connection, options: argparse.Namespace) -> int:
    """Once, again and again, or until it has ended."""
    deadline = time.monotonic() + options.timeout if options.timeout else None
    until = deadline if deadline is not None else math.inf if options.watch else 0.0
    told = ""
    asked = _Asked(at)
    with _screen(options) as draw:
        while True:
            model = patiently(at, options.name, until)
            ended = outcome(model)
            done = not options.watch if deadline is None else ended is not None or time.monotonic() >= deadline
            if options.watch or done:
                draw(model, () if options.no_workers else asked.workers(model))
            if done:
                break
            if deadline is not None and not options.watch:
                told = progress(model, told)
            time.sleep(POLL_SECONDS)
    if deadline is None:
        return EXIT_DONE
    return conclude(options.name, ended.code if ended else EXIT_LATE, ended.sentence if ended else "", options.timeout)


def patiently(at: Connection, name: str, until: float) -> Json:
    """The model. What passes (an API server that restarts) is waited out until that time. Raises Failed."""
    told = False
    while True:
        try:
            return at.get(name)
        except Failed as e:
            if not e.passing or time.monotonic() >= until:
                raise
            if not told:
                print(f"{time.strftime('%H:%M:%S')} {plain(e)}: trying again", file=sys.stderr, flush=True)
            told = True
            time.sleep(POLL_SECONDS)


class _Asked:
    """What the workers said, asked again when status has news, and every few seconds."""

    def __init__(self, at: Connection) -> None:
        self._at, self._found = at, list[look.Worker]()
        self._version, self._at_time = "", -math.inf

    def workers(self, model: Json) -> list[look.Worker]:
        version, now = str(model["metadata"].get("resourceVersion")), time.monotonic()
        if version != self._version or now - self._at_time >= ASK_AGAIN_SECONDS:
            self._found, self._version, self._at_time = ask_workers(self._at, model), version, now
        return self._found


def conclude(name: str, code: int, sentence: str, seconds: float) -> int:
    """The last words of what waited. The exit code."""
    if code == EXIT_LATE:
        sentence = f"it did not end within {span(seconds)}"
    print(f"{name}: {plain(sentence)}", file=sys.stderr)
    return code


def progress(model: Json, told: str) -> str:
    """A line for who waits, when there is news. What was told."""
    status_ = model.get("status") or {}
    text = f"{status_.get('phase', '')} {status_.get('summary', '')}".strip()
    text += "".join(
        f"; {job.get('name')} {job.get('stage', '')}"
        for target in listed(status_.get("targets"))
        if (job := target.get("job") or {})
    )
    if text and text != told:
        print(f"{time.strftime('%H:%M:%S')} {plain(text)}", file=sys.stderr, flush=True)
    return text


def ask_workers(at: Connection, model: Json) -> list[look.Worker]:
    """The worker pods, and what they answer with. Who may not list pods gets none: status has the counts."""
    name = model["metadata"]["name"]
    try:
        pods = at.pods(name)
    except Failed:
        return []

    asked = {str(p["metadata"]["name"]) for p in sorted(pods, key=_name)[:ASKED_MOST]}

    def ask(pod: Json) -> look.Worker:
        meta, state = pod["metadata"], pod.get("status") or {}
        ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in state.get("conditions") or ())
        serves, trial, holds, silence = "", "", tuple[str, ...](), ""
        if ready and meta["name"] in asked:
            try:
                routed = at.ask(meta["name"], name)
                holds, serves = routed.holds, routed.candidate if routed.weight == WHOLE else routed.stable
                trial = _trial(routed)
            except (Failed, ValueError) as e:
                silence = f"cannot be asked: {plain(e)[:120]}"
        return look.Worker(
            meta["name"],
            str((meta.get("labels") or {}).get("trtmodel.io/target", "")),
            ready,
            str((pod.get("spec") or {}).get("nodeName") or ""),
            sum(int(c.get("restartCount") or 0) for c in state.get("containerStatuses") or ()),
            serves,
            holds,
            silence,
            trial,
        )

    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(ask, sorted(pods, key=_name)))


def _name(pod: Json) -> str:
    return str(pod["metadata"]["name"])


def _trial(routed: Routed) -> str:
    """What a candidate does beside the revision that serves."""
    if not routed.candidate or routed.weight == WHOLE:
        return ""
    shares = ((routed.weight, "answers"), (routed.shadow, "mirrors"))
    return f"{routed.candidate} " + " and ".join(f"{verb} {share} %" for share, verb in shares if share)


def as_document(model: Json, workers: Sequence[look.Worker]) -> Json:
    """status -o json."""
    ended, found = outcome(model), model.get("status") or {}
    return {
        "namespace": model["metadata"].get("namespace", ""),
        "name": model["metadata"]["name"],
        "phase": found.get("phase", ""),
        "summary": found.get("summary", ""),
        "outcome": None if ended is None else {"exitCode": ended.code, "message": ended.sentence},
        "conditions": {
            kind: {part: condition(model, kind).get(part, "") for part in ("status", "reason", "message")}
            for kind in (str(c.get("type")) for c in listed(found.get("conditions")))
        },
        "revisions": {
            "wanted": wanted(model),
            **{role: revision(model, role) for role in ("stable", "candidate", "standby")},
        },
        "step": memory(model).get("step"),
        "analysis": found.get("analysis"),
        "targets": found.get("targets") or [],
        "workers": [
            {"name": w.name, "target": w.target, "ready": w.ready, "node": w.node, "restarts": w.restarts,
             "serves": w.serves, "holds": list(w.holds), "trial": w.trial,
             "silence": w.silence}
            for w in workers
        ],
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------

Draw = Callable[[Json, Sequence[look.Worker]], None]


@contextmanager
def _screen(options: argparse.Namespace) -> Iterator[Draw]:
    """What draws a look at a model: over the last one on a terminal, below it elsewhere, and only news."""
    if options.output != "json" and options.watch and output.is_terminal():
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(highlight=False), auto_refresh=False) as live:
            yield lambda model, workers: live.update(output.rich_tree(look.tree(model, workers)), refresh=True)
        return
    last: list[Any] = [None]

    def draw(model: Json, workers: Sequence[look.Worker]) -> None:
        shown: Any = as_document(model, workers) if options.output == "json" else look.tree(model, workers)
        if shown == last[0]:
            return
        if options.output == "json":
            print(output.as_json(shown) if not options.watch else output.as_json_line(shown), flush=True)
        else:
            if last[0] is not None:
                print()
            output.show(shown)
            sys.stdout.flush()
        last[0] = shown

    yield draw


def _rows(options: argparse.Namespace, raw: Any, rows: Sequence[Sequence[str]], what: str) -> int:
    if options.output == "json":
        print(output.as_json(raw))
    elif len(rows) > 1:
        print(output.table(rows))
    else:
        print(f"{options.name} has no {what} yet.", file=sys.stderr)
    return EXIT_DONE


def _as_document(line: look.Line) -> Mapping[str, Any]:
    return {"text": line.text, **({"below": [_as_document(b) for b in line.below]} if line.below else {})}
