"""Requests that are made from our own OpenAPI document: each answer has a status, a form and headers that it allows."""

from __future__ import annotations

import re
from typing import Any

EXAMPLES = 40  # of each operation, beside those that cover each keyword of the document
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,unsupported_method,allow_header_conformance,missing_required_header"
)


def test_answers_are_what_the_openapi_document_says(schemathesis: Any, served: Any, tmp_path: Any) -> None:
    program = str(schemathesis.directory / "bin" / "schemathesis")
    said = schemathesis.run([
        "env", "-C", str(tmp_path), program, "run", f"http://{served.http}/openapi.json", "--checks", CHECKS,
        "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES), "--seed", "1", "--generation-database", "none",
        "--suppress-health-check", "all", "--warnings", "off", "--continue-on-failure", "--no-color",
    ])  # fmt: skip
    found = re.search(r"([\d,]+) generated, ([\d,]+) passed", said)
    assert found is not None, said
    assert found[1] == found[2], said
    assert int(found[1].replace(",", "")) > 500
    assert served.worker.get("/v2/health/ready").status == 200
