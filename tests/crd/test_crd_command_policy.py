"""The example policy: who may edit a TRTModel may not command it, unless given that right."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import pytest
from crd_api import Api
from crd_manifests import ROOT, manifest

pytestmark = pytest.mark.e2e

POLICY = str(ROOT / "examples" / "who-may-command.yaml")
SECONDS_TO_TAKE_EFFECT = 30


def annotate(api: Api, model: str, user: str, annotation: str) -> str:
    """What kubectl says when that user tries; empty if it was done."""
    try:
        api.kubectl("annotate", "--overwrite", f"trtmodel/{model}", annotation, "--as", user)
    except AssertionError as e:
        return str(e)
    return ""


@pytest.fixture
def model(api: Api) -> Iterator[str]:
    """With the policy in force, an editor and a commander."""
    name = f"m-{secrets.token_hex(4)}"
    api.create(manifest({".metadata.name": name}), dry_run=False)
    api.kubectl("apply", "-f", POLICY)
    editing = ("--verb=get,update,patch", "--resource=trtmodels.trtmodel.io")
    api.kubectl("create", "role", f"{name}-edit", *editing)
    api.kubectl("create", "rolebinding", f"{name}-editor", f"--role={name}-edit", "--user=editor")
    api.kubectl("create", "rolebinding", f"{name}-commander", "--clusterrole=trtmodel-commander", "--user=commander")
    try:
        yield name
    finally:
        api.kubectl("delete", "-f", POLICY)


def test_an_editor_edits_and_a_commander_commands(api: Api, model: str) -> None:
    deadline = time.monotonic() + SECONDS_TO_TAKE_EFFECT
    tries = 0
    refused = ""
    while not refused and time.monotonic() < deadline:  # a new policy takes a moment to reach the admission chain
        tries += 1
        refused = annotate(api, model, "editor", f"trtmodel.io/command=abort#{tries}")
    assert f'the command "abort#{tries}" was not taken: editor lacks the verb "command" on trtmodels' in refused
    assert annotate(api, model, "editor", "example.com/note=fine") == ""
    assert annotate(api, model, "commander", "trtmodel.io/command=abort#a") == ""
    assert annotate(api, model, "editor", "example.com/note=still fine") == ""
    assert "was not taken" in annotate(api, model, "editor", "trtmodel.io/command-")
