"""The object store, from where the tests run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import boto3
import pytest
from botocore.config import Config

from .cluster import Cluster, Json

MODELS, DATA, ENGINES = BUCKETS = ("e2e-models", "e2e-data", "e2e-engines")


class Store:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._s3 = boto3.client(
            "s3",
            endpoint_url=environment["S3_ENDPOINT"],
            aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
            region_name=environment.get("AWS_REGION", "us-east-1"),
            config=Config(
                connect_timeout=5, read_timeout=30, retries={"max_attempts": 3}, s3={"addressing_style": "path"}
            ),
        )

    def make_buckets(self) -> None:
        there = {bucket["Name"] for bucket in self._s3.list_buckets()["Buckets"]}
        for bucket in BUCKETS:
            if bucket not in there:
                self._s3.create_bucket(Bucket=bucket)

    def put(self, bucket: str, key: str, file: Path) -> None:
        self._s3.upload_file(str(file), bucket, key)

    def get(self, bucket: str, key: str) -> tuple[bytes, float]:
        """Its bytes, and when it was written, in seconds since the epoch."""
        found = self._s3.get_object(Bucket=bucket, Key=key)
        return found["Body"].read(), found["LastModified"].timestamp()

    def keys(self, bucket: str, prefix: str) -> list[str]:
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [found["Key"] for page in pages for found in page.get("Contents", ())]

    def delete(self, bucket: str, prefix: str) -> None:
        for key in self.keys(bucket, prefix):
            self._s3.delete_object(Bucket=bucket, Key=key)


def endpoints_of_s3(cluster: Cluster, service: str) -> Json:
    """Puts S3's pod behind this Service, which has no selector: deleting it takes S3 away from who asks there."""
    pods = cluster.items("/api/v1/namespaces/s3/pods", "app=s3")
    if not pods:
        pytest.skip("S3 is no pod of this cluster: it cannot be taken away")
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": service, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "ports": [{"name": "s3", "port": 7070}],
        "endpoints": [{"addresses": [pods[0]["status"]["podIP"]]}],
    }
