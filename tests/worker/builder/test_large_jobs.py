"""A model whose weights no Job holds in memory, from its file to a published engine that serves."""

from __future__ import annotations

from pathlib import Path

import large_models
import numpy as np
import pytest
from trtmodel_contract.identity import Storage
from trtmodel_worker.engines.base import allocate_anew
from trtmodel_worker.engines.onnxruntime import OnnxRuntime, plans
from trtmodel_worker.storage import ArtifactStore

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LAYERS = 12  # 805 MB


def test_A13_a_job_takes_a_fraction_of_the_memory_that_the_weights_would(tmp_path: Path) -> None:
    path = large_models.external(tmp_path, LAYERS)
    size = (tmp_path / "weights").stat().st_size
    said, own, _ = large_models.build_job(path, tmp_path)
    assert own < size / 2, said
    store = ArtifactStore(Storage("engines", endpoint=f"file://{tmp_path / 'bucket'}"), "ml", None)
    ((_, manifest),) = store.current(next(iter(_revisions(tmp_path))))
    plan = memoryview(store.fetch_blob(manifest.plan.digest, manifest.plan.size, tmp_path / "cache").read_bytes())
    contents = plans.read(plan)
    assert contents is not None
    assert sum(weight.nbytes for weight in contents.weights.values()) == size
    lane = OnnxRuntime().load(plan, manifest.profiles, 1).create_lane()
    rows = np.ones((2, large_models.WIDTH), np.float32)
    assert not lane.run({"x": rows}, allocate_anew)["y"].any()


def _revisions(folder: Path) -> list[str]:
    return [found.name for found in (folder / "bucket/engines/trtmodel/ml/engines").iterdir()]
