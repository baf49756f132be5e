"""What appeared in a namespace, in the order in which it was made."""

from __future__ import annotations

import shlex
import subprocess
import threading
from collections.abc import Sequence

from .world import World


class Recorder:
    """A kubectl watches each kind; the store's revision at which an object was made
    puts them in one order. Close it."""

    def __init__(self, world: World, kinds: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[str, str], int] = {}
        environment = world.cluster.environment
        self._processes = []
        for kind in kinds:
            command = [*shlex.split(environment["KUBECTL"]), "-n", world.namespace, "get", kind]
            command += ["--watch", "--output-watch-events"]
            columns = "{.type} {.object.metadata.resourceVersion} {.object.metadata.name}{'\\n'}"
            process = subprocess.Popen(
                [*command, "-o", f"jsonpath={columns}"], env=environment, stdout=subprocess.PIPE, text=True
            )
            threading.Thread(target=self._read, args=(kind, process), daemon=True).start()
            self._processes.append(process)

    def order(self) -> list[tuple[str, str]]:
        """(kind, name), first made first."""
        with self._lock:
            return sorted(self._made, key=lambda entry: self._made[entry])

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.wait(10)

    def _read(self, kind: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            event, version, name = line.split()
            if event == "ADDED":
                with self._lock:
                    self._made.setdefault((kind, name), int(version))
