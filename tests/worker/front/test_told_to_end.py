"""Process 1 of a container is ended by no signal that has no handler of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SLOW_MODULES = """
import sys, time, types
class Slow(types.ModuleType):
    def __getattr__(self, name):
        print("reads its modules", flush=True)
        time.sleep(60)
sys.modules["trtmodel_worker.front.main"] = Slow("main")
sys.modules["trtmodel_worker.builder.main"] = Slow("main")
from trtmodel_worker.__main__ import main
main([sys.argv[1]])
"""


@pytest.mark.parametrize("command", ["serve", "build"])
def test_a_process_that_is_told_to_end_while_it_reads_its_modules_ends_by_a_handler(command: str) -> None:
    with subprocess.Popen([sys.executable, "-c", SLOW_MODULES, command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        code = process.wait(30)
    assert code == 128 + signal.SIGTERM  # by the kernel it would be -SIGTERM, and nothing at all for process 1
