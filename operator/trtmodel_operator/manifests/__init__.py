"""The children of a TRTModel as plain dictionaries. Pure and deterministic: the same facts give the same bytes, so that
a fingerprint tells whether what lies in the cluster is what we would apply today.

Every container has requests and limits (a quota may demand them), runs as an ordinary user on a read-only file system
and mounts no API token. Workers and Jobs read the user's storage credentials from files; the operator never does.
"""

from trtmodel_operator.manifests.jobs import JOB_TTL, JobPolicy, collector_job, job
from trtmodel_operator.manifests.names import (
    ANNOTATION_FINGERPRINT,
    ANNOTATION_LOAD_KEY,
    API_VERSION,
    ENV_MODEL_UID,
    GROUP,
    KIND,
    LABEL_KIND,
    LABEL_MODEL,
    LABEL_PLATFORM,
    LABEL_ROLE,
    LABEL_TARGET,
    LABEL_UID,
    LABEL_WAITING,
    ROLE_JOB,
    ROLE_WORKER,
    VERSION,
    keys_name,
    platform,
    service_name,
    waiting_label,
    worker_selector,
    workload_name,
)
from trtmodel_operator.manifests.pointer import (
    boot_pointer,
    keys_config_map,
    pointer_config_map,
    pointer_content,
    read_pointer,
    wanted_content,
)
from trtmodel_operator.manifests.workers import (
    pod_disruption_budget,
    service,
    service_fingerprint,
    worker_deployment,
    workload_fingerprint,
)

__all__ = [
    "ANNOTATION_FINGERPRINT",
    "ANNOTATION_LOAD_KEY",
    "API_VERSION",
    "ENV_MODEL_UID",
    "GROUP",
    "JOB_TTL",
    "KIND",
    "LABEL_KIND",
    "LABEL_MODEL",
    "LABEL_PLATFORM",
    "LABEL_ROLE",
    "LABEL_TARGET",
    "LABEL_UID",
    "LABEL_WAITING",
    "ROLE_JOB",
    "ROLE_WORKER",
    "VERSION",
    "JobPolicy",
    "boot_pointer",
    "collector_job",
    "job",
    "keys_config_map",
    "keys_name",
    "platform",
    "pod_disruption_budget",
    "pointer_config_map",
    "pointer_content",
    "read_pointer",
    "service",
    "service_fingerprint",
    "service_name",
    "waiting_label",
    "wanted_content",
    "worker_deployment",
    "worker_selector",
    "workload_fingerprint",
    "workload_name",
]
