"""What the cluster says about a pod that does not run, or whose container died, in a word and a sentence."""

from __future__ import annotations

from collections.abc import Iterator

from trtmodel_operator.ports import Json

MESSAGE_BYTES = 1024  # of what the cluster says about a pod
LAST_WORDS = 400  # characters of a container's last words, or of its log, that are repeated

# Why a container does not run. ContainerCreating and PodInitializing are ordinary and not in it.
_WAITING_TROUBLE = (
    "ImagePullBackOff",
    "ErrImagePull",
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
    "RegistryUnavailable",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "CrashLoopBackOff",
)


def trouble_of(pod: Json) -> tuple[str, str]:
    """What keeps a pod from running, or ended it: a reason and a message; ('', '') if nothing does."""
    status = pod.get("status") or {}
    if status.get("phase") == "Failed" and status.get("reason"):  # Evicted, NodeLost, Preempted ...
        return str(status["reason"]), shortened(str(status.get("message") or ""))
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("reason") or "Unschedulable"), shortened(str(condition.get("message") or ""))
    for container in container_states(pod):
        state = container.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        before = (container.get("lastState") or {}).get("terminated") or {}
        if (reason := waiting.get("reason")) in _WAITING_TROUBLE:
            message = str(waiting.get("message") or "")
            if before:
                message = f"{message} ({_ending(pod, container, before)})".strip()
            if reason in ("ErrImagePull", "ImagePullBackOff"):
                # The kubelet shows the two in turn. Told as one, with the cause alone, status and events stay quiet.
                return "ImagePullBackOff", shortened(message.rpartition("ErrImagePull: ")[2])
            return reason, shortened(message)
        if ended and int(ended.get("exitCode") or 0) != 0:
            return str(ended.get("reason") or "Error"), shortened(_ending(pod, container, ended))
    return "", ""


def _ending(pod: Json, container: Json, ended: Json) -> str:
    """In words. What it said last is its message, or the end of its log where the kubelet was asked for that."""
    name = str(container.get("name") or "")
    text = f"{f'the container {name}' if name else 'the container'} ended with exit code {ended.get('exitCode')}"
    if ended.get("reason") == "OOMKilled":
        text += f": it needed more memory than its limit{_memory_limit(pod, name)}"
    said = " ".join(str(ended.get("message") or "").split())
    return f"{text}. It said last: {said[-LAST_WORDS:]}" if said else text


def _memory_limit(pod: Json, name: str) -> str:
    containers = (pod.get("spec") or {}).get("containers") or ()
    resources = next((c.get("resources") or {} for c in containers if c.get("name") == name), {})
    limit = (resources.get("limits") or {}).get("memory")
    return f" of {limit}" if limit else ""


def container_states(pod: Json) -> Iterator[Json]:
    status = pod.get("status") or {}
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def death_of(pod: Json) -> str:
    """How the last life of a container ended."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    lives = ((s, (s.get("lastState") or {}).get("terminated")) for s in statuses)
    return next((shortened(_ending(pod, s, life)) for s, life in lives if life), "")


def shortened(text: str) -> str:
    return text.encode()[:MESSAGE_BYTES].decode(errors="ignore")
