"""What the demo stands on: the cluster, the operator, the model and data in S3, an empty namespace."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import boto3
import data
import variants
from boto3.exceptions import S3UploadFailedError
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from kube import DemoError, Kubectl

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "tests" / "cluster" / "cluster"
CHART = ROOT / "charts" / "trtmodel-operator"
OPERATOR_NAMESPACE = "trtmodel-system"
NAMESPACE = "demo"
S3_OF_THE_LOCAL_CLUSTER = "http://s3.s3.svc.cluster.local:7070"
BUCKETS = ("models", "data", "engines")
SECRET = """\
apiVersion: v1
kind: Secret
metadata: {{name: s3-credentials, namespace: {namespace}}}
stringData: {{AWS_ACCESS_KEY_ID: {key}, AWS_SECRET_ACCESS_KEY: {secret}}}
"""
UP_SECONDS = 3600.0  # without cached binaries they are compiled
Say = Callable[[str], None]


@dataclass(frozen=True)
class Stage:
    """`files` holds model.onnx, its variants and the data sets."""

    kubectl: Kubectl
    worker_image: str
    files: Path


def prepare(files: Path, say: Say) -> Stage:
    """Everything before the first rollout. Data sets are made while the cluster starts."""
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(_make_files, files)
        say("cluster: start, with DNS and S3")
        _cluster("up")
        say("images: build those of operator and worker, where their sources changed")
        images = dict(line.split("=", 1) for line in _cluster("images").splitlines() if "=" in line)
        environment = {**os.environ, **_exports()}
        kubectl = Kubectl(environment)
        reset(kubectl, environment)
        say("chart: install the operator with helm")
        install(kubectl, images)
        say("data: model, variants and data sets of real files")
        made.result()
    say("S3: upload them")
    upload(environment, files)
    return Stage(kubectl, images["WORKER_IMAGE"], files)


def manifest(path: Path, environment: Mapping[str, str]) -> str:
    """The TRTModel, with the S3 of whichever cluster this is."""
    return path.read_text().replace(S3_OF_THE_LOCAL_CLUSTER, environment["S3_ENDPOINT_IN_CLUSTER"])


def install(kubectl: Kubectl, images: Mapping[str, str]) -> None:
    """For the demo's namespace only, so that it disturbs no other installation. helm never changes a definition that
    is there: it is applied first."""
    kubectl.run("apply", "--server-side", "--force-conflicts", "-f", CHART / "files" / "trtmodel.yaml")
    repository, tag = images["OPERATOR_IMAGE"].rsplit(":", 1)
    values = {
        "image.repository": repository,
        "image.tag": tag,
        "worker.image": images["WORKER_IMAGE"],
        "watchNamespaces[0]": NAMESPACE,
    }
    helm = kubectl.environment.get("HELM", "helm")
    command: list[str | Path] = [
        helm, "upgrade", "--install", "trtmodel", CHART, "--namespace", OPERATOR_NAMESPACE, "--create-namespace",
        "--set", "crds.install=false", "--wait", "--timeout", "3m",
    ]  # fmt: skip
    for name, value in values.items():
        command += ["--set-string", f"{name}={value}"]
    done = subprocess.run(command, env=kubectl.environment, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode != 0:
        pods = kubectl.run("get", "pods", "-n", OPERATOR_NAMESPACE, "-o", "wide")
        raise DemoError(f"helm could not install the operator: {done.stderr.strip()}\n{pods}")


def upload(environment: Mapping[str, str], files: Path) -> None:
    """Model, variants and data sets; engines of an earlier run are removed, so that everything is built."""
    try:
        s3 = _s3(environment)
        there = {bucket["Name"] for bucket in s3.list_buckets()["Buckets"]}
        for bucket in BUCKETS:
            if bucket not in there:
                s3.create_bucket(Bucket=bucket)
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket="engines", Prefix=f"trtmodel/{NAMESPACE}/"):
            for found in page.get("Contents", ()):
                s3.delete_object(Bucket="engines", Key=found["Key"])
        for name in ("model", "damaged", "slow"):
            s3.upload_file(str(files / f"{name}.onnx"), "models", f"magika/{name}.onnx")
        for name in ("eval", "calib"):
            s3.upload_file(str(files / f"{name}.npz"), "data", f"magika/{name}.npz")
    except (BotoCoreError, ClientError, S3UploadFailedError) as e:
        raise DemoError(f"S3 at {environment['S3_ENDPOINT']}: {e}") from e


def reset(kubectl: Kubectl, environment: Mapping[str, str]) -> None:
    """A namespace without anything of an earlier run, and the way to S3."""
    kubectl.run("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait", "--timeout=90s", seconds=100)
    kubectl.run("create", "namespace", NAMESPACE)
    secret = SECRET.format(
        namespace=NAMESPACE, key=environment["AWS_ACCESS_KEY_ID"], secret=environment["AWS_SECRET_ACCESS_KEY"]
    )
    kubectl.run("apply", "-f", "-", text=secret)


def _s3(environment: Mapping[str, str]):  # type: ignore[no-untyped-def]  # boto3 makes its classes at run time
    return boto3.client(
        "s3",
        endpoint_url=environment["S3_ENDPOINT"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region_name=environment.get("AWS_REGION", "us-east-1"),
        config=Config(connect_timeout=5, read_timeout=30, retries={"max_attempts": 3}, s3={"addressing_style": "path"}),
    )


def _make_files(files: Path) -> None:
    data.make(files)
    variants.write(files / "model.onnx", files)


def _cluster(*arguments: str) -> str:
    """Its progress goes to standard error as it comes."""
    done = subprocess.run(
        [CLUSTER, *arguments], stdout=subprocess.PIPE, stderr=sys.stderr, text=True, timeout=UP_SECONDS, check=False
    )
    if done.returncode != 0:
        raise DemoError(f"{CLUSTER.name} {' '.join(arguments)} failed, see above")
    return done.stdout


def _exports() -> dict[str, str]:
    found = re.findall(r"^export (\w+)=(.*)$", _cluster("env"), re.MULTILINE)
    return {name: " ".join(shlex.split(value)) for name, value in found}
