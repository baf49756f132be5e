"""``python -m trtmodel_worker.gateway <config>``. Started by the front only."""

from __future__ import annotations

import logging
import sys

from trtmodel_worker.gateway.process import read_config, run

logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s gateway %(message)s")
if len(sys.argv) != 2:
    sys.exit("usage: python -m trtmodel_worker.gateway <config>")
sys.exit(run(read_config(sys.argv[1])))
