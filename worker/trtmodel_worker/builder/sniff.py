"""What a file that is not ONNX probably is. 'protobuf parsing failed' sends people hunting for days."""

from __future__ import annotations

from pathlib import Path

HEAD_BYTES = 1024
MOST_HEADER = 100 << 20  # of safetensors, by its own rule
_MAGIC = (
    (b"PK\x03\x04", "a zip archive (a PyTorch checkpoint is one too): unpack it, or export the model to ONNX"),
    (b"\x1f\x8b", "gzip-compressed: decompress it"),
    (b"\x89HDF", "an HDF5 file (Keras): export the model to ONNX"),
    (b"\x80\x02", "a Python pickle: export the model to ONNX"),
    (b"\x80\x04", "a Python pickle: export the model to ONNX"),
    (b"ftrt", "a TensorRT plan: give the ONNX file that it was built from"),
    (b"\x93NUMPY", "a NumPy array: give the ONNX file"),
)


def guess(path: Path) -> str | None:
    """A sentence that starts with what the file is, None if it may be ONNX."""
    with path.open("rb") as f:
        head = f.read(HEAD_BYTES)
    if not head:
        return "empty (0 bytes): the upload did not finish"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the model: run `git lfs pull` before uploading"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return "an HTML page, probably an error page that was saved as the model: look at what the URL really serves"
    if text.startswith(b"<?xml"):
        return "an XML document, probably a storage error that was saved as the model (or OpenVINO IR)"
    if text.startswith((b"{", b"[")):
        return "JSON, probably an error that was saved as the model"
    if head[4:8] == b"TFL3":
        return "a TensorFlow Lite model: export it to ONNX"
    if head[4:8] == b"ORTM":
        return "a model in ORT format: give the ONNX file that it was made from"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < MOST_HEADER:
        return "a safetensors file, which holds weights and no graph: export the model to ONNX"
    return next((what for magic, what in _MAGIC if head.startswith(magic)), None)
