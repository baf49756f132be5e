"""``python -m trtmodel_worker.gateway <config>``. Started by the front only."""

from __future__ import annotations

import logging
import sys

from trtmodel_worker.gateway.config import read_config

logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s gateway %(message)s")
if len(sys.argv) != 2:
    sys.exit("usage: python -m trtmodel_worker.gateway <config>")
config = read_config(sys.argv[1])
config.make_way()

from trtmodel_worker.gateway.process import run  # noqa: E402 - reading gRPC takes 0.1 s of a processor

sys.exit(run(config))
