"""``python -m trtmodel_worker.host serve <descriptor>`` and ``... describe <runtime>``. Started by the front only."""

from __future__ import annotations

import logging
import os
import sys

from trtmodel_contract.codec import loads

from trtmodel_worker.host.process import describe, serve
from trtmodel_worker.host.wire import HostConfig

logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s host %(message)s")

if len(sys.argv) == 3 and sys.argv[1] == "serve":
    with os.fdopen(int(sys.argv[2]), "rb") as f:
        config = loads(HostConfig, f.read())
    serve(config)
if len(sys.argv) == 3 and sys.argv[1] == "describe":
    sys.exit(describe(sys.argv[2]))
sys.exit("usage: python -m trtmodel_worker.host serve <descriptor> | describe <runtime>")
