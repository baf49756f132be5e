"""What an engine consists of, from the engine inspector: how many layers of which type, and in which precision.

Its JSON has several shapes: 8.6 and 10 write one text "Format/Datatype" for each tensor, 11 writes two values.
"""

from __future__ import annotations

import collections
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

MOST_TYPES = 12

log = logging.getLogger("trtmodel.tensorrt")

_NAMES = (
    ("FP8", re.compile(r"\bFP8|E4M3")),
    ("BF16", re.compile(r"BF16|BFloat16", re.IGNORECASE)),
    ("INT8", re.compile(r"INT8", re.IGNORECASE)),
    ("FP16", re.compile(r"FP16|\bHalf\b", re.IGNORECASE)),
    ("FP32", re.compile(r"FP32|\bFloat\b", re.IGNORECASE)),
)


def summary(text: str) -> Mapping[str, str]:
    """Bounded, whatever the engine's size. Empty where the inspector says nothing that can be read."""
    try:
        # Not strictly: 8.6 puts a control character between the names of the nodes that a layer was made of.
        layers = json.loads(text, strict=False).get("Layers", [])
    except (ValueError, AttributeError) as e:
        log.warning("the engine inspector's text cannot be read (%s): %.200r", e, text)
        return {}
    known = [layer for layer in layers if isinstance(layer, dict)]
    if not layers:
        return {}
    counts = {"layers": str(len(layers))}
    if known:
        types = collections.Counter(str(layer.get("LayerType", "?")) for layer in known)
        precisions = collections.Counter(_precision(layer) for layer in known)
        counts["layersByType"] = _listed(types)
        counts["layersByPrecision"] = _listed(precisions)
    return counts


def _precision(layer: dict[str, Any]) -> str:
    """The precision that a layer computes in, as far as its tensors show: the narrowest of its inputs, since a layer
    of INT8 may well write FP32."""
    tensors = [t for part in ("Inputs", "Outputs") for t in layer.get(part, []) if isinstance(t, dict)]
    said = " ".join(str(t.get("Format/Datatype", t.get("DataType", t.get("Datatype", "")))) for t in tensors)
    return next((name for name, pattern in _NAMES if pattern.search(said)), "other")


def _listed(counts: collections.Counter[str]) -> str:
    shown = counts.most_common(MOST_TYPES)
    rest = sum(counts.values()) - sum(count for _, count in shown)
    parts = [f"{name[:40]} {count}" for name, count in shown]
    return ", ".join([*parts, f"other {rest}"] if rest else parts)
