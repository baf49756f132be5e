"""Run a stage in a process of its own and make sense of how it ended."""

from __future__ import annotations

from pathlib import Path

from trtmodel_contract.codec import dumps, loads

from trtmodel_worker.builder import progress
from trtmodel_worker.builder.process import StageDied, run_module
from trtmodel_worker.builder.stages import Answer, Request
from trtmodel_worker.engines.building import Rejected


def run(stage: str, request: Request, work: Path) -> Answer:
    """The stage's answer. Raises Rejected for what the stage rejected, StageDied for a crash."""
    progress.board.enter(stage)
    request_path, answer_path = work / f"{stage}.request.json", work / f"{stage}.answer.json"
    request_path.write_bytes(dumps(request))
    answer_path.unlink(missing_ok=True)
    ended = run_module(["trtmodel_worker.builder.stages", stage, str(request_path), str(answer_path)])
    if not answer_path.exists():
        raise StageDied(f"stage {stage} {ended}")
    answer = loads(Answer, answer_path.read_bytes())
    if answer.rejected is not None:
        raise Rejected(answer.rejected, answer.message)
    return answer


__all__ = ["StageDied", "run"]
