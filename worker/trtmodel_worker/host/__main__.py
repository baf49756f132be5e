"""``python -m trtmodel_worker.host serve <descriptor>`` and ``... describe <runtime>``. Started by the front only."""

from __future__ import annotations

import logging
import os
import sys

from trtmodel_contract.codec import loads

from trtmodel_worker.environment import without_blas_threads

logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s host %(message)s")

without_blas_threads()
if len(sys.argv) == 3 and sys.argv[1] == "serve":
    from trtmodel_worker.host.process import serve
    from trtmodel_worker.host.wire import HostConfig

    with os.fdopen(int(sys.argv[2]), "rb") as f:
        config = loads(HostConfig, f.read())
    serve(config)
if len(sys.argv) == 3 and sys.argv[1] == "describe":
    from trtmodel_worker.host.describe import describe  # without NumPy: the front waits for it before anything else

    sys.exit(describe(sys.argv[2]))
sys.exit("usage: python -m trtmodel_worker.host serve <descriptor> | describe <runtime>")
