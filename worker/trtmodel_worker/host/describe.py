"""What decides whether an engine loads on this machine."""

from __future__ import annotations

import json
import sys

from trtmodel_contract.codec import encode
from trtmodel_contract.exitcodes import HostExit

from trtmodel_worker.engines.registry import runtime


def describe(name: str) -> int:
    """Print it as JSON. Returns the exit code."""
    try:
        machine = runtime(name)
        print(json.dumps({"loadKey": encode(machine.load_key()), "driver": machine.driver()}))
    except Exception as e:  # noqa: BLE001 - a runtime may come from elsewhere: whatever it raises is the reason
        print(f"the runtime cannot be used here: {type(e).__name__}: {e}", file=sys.stderr)
        return HostExit.CANNOT_LOAD
    return HostExit.DONE
