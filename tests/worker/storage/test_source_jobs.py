"""Jobs on a model whose weights are in another file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from job_harness import MODEL, Jobs, make_jobs, profiles, save_npz
from storage_servers import Answer, Stub
from test_storage_source import WEIGHTS, identity, model
from trtmodel_contract.exitcodes import JobExit
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import Reason, ResolveResult, ResolveTask
from trtmodel_worker.builder.resolve import resolve
from trtmodel_worker.builder.sources import Place
from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.storage.uris import without_queries


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    model(tmp_path / "m")
    data = save_npz(tmp_path / "eval.npz", x=np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32))
    engine = EngineSettings("ONNXRuntime", profiles=profiles("x", 4))
    return make_jobs(tmp_path, tmp_path / "m/model.onnx", data, engine=engine)


def resolved(jobs: Jobs, source: str, pin: str = "") -> ResolveResult:
    task = ResolveTask(MODEL, source, pin, jobs.storage, jobs.engine, None, jobs.dataset, jobs.task)
    return resolve(task, Place(jobs.storage, None, jobs.folder / "cache"))


def test_A13_a_model_with_external_data_is_one_source_however_it_is_named(jobs: Jobs) -> None:
    found = [resolved(jobs, f"file://{jobs.folder}/m/{name}") for name in ("", "model.onnx")]
    assert found[0] == found[1]
    assert found[0].source_sha256 == identity(jobs.folder / "m")
    assert resolved(jobs, f"file://{jobs.folder}/m/", found[0].source_sha256) == found[0]
    with pytest.raises(Rejected, match="correct the pin") as e:
        resolved(jobs, f"file://{jobs.folder}/m/", "0" * 64)
    assert e.value.reason is Reason.DIGEST_MISMATCH


def test_A13_a_model_with_external_data_is_built_and_other_weights_are_noticed(jobs: Jobs) -> None:
    found = resolved(jobs, jobs.source)
    code, result = jobs.build(found)
    assert code == JobExit.DONE, result.message
    (jobs.folder / "m/model.onnx.data").write_bytes((WEIGHTS + 1).tobytes())
    assert resolved(jobs, jobs.source).revision != found.revision
    (jobs.bucket / "engines").rename(jobs.folder / "gone")
    code, result = jobs.build(found)
    assert (code, result.reason) == (JobExit.SOURCE_CHANGED, Reason.SOURCE_CHANGED)


@pytest.mark.parametrize(
    ("answer", "reason"), [(Answer(403), Reason.ACCESS_DENIED), (Answer(200), Reason.MODEL_INVALID)]
)
def test_what_lets_one_in_behind_an_address_stands_in_no_log_and_no_result(
    jobs: Jobs, stub: Stub, capfd: pytest.CaptureFixture[str], answer: Answer, reason: Reason
) -> None:
    """As in a presigned URL."""
    stub.answer = lambda *_: answer
    jobs.source = f"{stub.url}/m.onnx?X-Amz-Credential=somebody&X-Amz-Signature=hush"
    _, result = jobs.resolve()
    assert result.reason is reason
    assert "/m.onnx?..." in result.message
    logged = capfd.readouterr()
    assert "/m.onnx?..." in logged.err
    assert [text for text in (result.message, logged.out, logged.err) if "hush" in text or "somebody" in text] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://h/m.onnx?sig=a%2Fb==: denied", "https://h/m.onnx?...: denied"),
        ("from 'https://h:8/a?x=1&y=2' and (HTTP://h/b?z).", "from 'https://h:8/a?...' and (HTTP://h/b?...)."),
        ("s3://bucket/why?.onnx is not there", "s3://bucket/why?.onnx is not there"),  # a key as any other
        ("https://h/m.onnx is not there. Why? Nobody knows", "https://h/m.onnx is not there. Why? Nobody knows"),
    ],
)
def test_of_an_address_all_is_told_but_its_query(text: str, shown: str) -> None:
    assert without_queries(text) == shown
