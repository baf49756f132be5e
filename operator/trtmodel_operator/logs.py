"""One line of JSON for each log record, with the model that it is about."""

from __future__ import annotations

import contextvars
import datetime
import json
import logging
import sys

# Set by whoever works on a model, so that every line below it names the model without being told.
about: contextvars.ContextVar[str] = contextvars.ContextVar("about", default="")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if key := about.get():
            line["key"] = key
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up(level: str) -> None:
    """To stderr. kopf says at INFO what its handlers did, once for every event: only its warnings are kept."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("kopf", "aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
