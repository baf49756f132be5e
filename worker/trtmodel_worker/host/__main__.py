"""``python -m trtmodel_worker.host serve <descriptor>`` and ``... describe <runtime>``. Started by the front only."""

from __future__ import annotations

import logging
import os
import sys

from trtmodel_contract.codec import loads

from trtmodel_worker.host.reserve import ReservedThread, make_way
from trtmodel_worker.host.wire import HostConfig

logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s host %(message)s")

if len(sys.argv) == 3 and sys.argv[1] == "serve":
    with os.fdopen(int(sys.argv[2]), "rb") as f:
        config = loads(HostConfig, f.read())
    threads = [ReservedThread(f"lane-{i}") for i in range(len(config.lane_fds))]
    if config.duty < 1:
        make_way()
    from trtmodel_worker.host.process import serve  # by now: what it imports takes half a second of a processor

    serve(config, threads)
if len(sys.argv) == 3 and sys.argv[1] == "describe":
    from trtmodel_worker.host.process import describe

    sys.exit(describe(sys.argv[2]))
sys.exit("usage: python -m trtmodel_worker.host serve <descriptor> | describe <runtime>")
