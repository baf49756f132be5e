"""The worker's memory and processes on a portable Python, which lacks what they need of the kernel."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys

import pytest
from trtmodel_worker import kernel
from trtmodel_worker.host.arena import Arena, sealed_bytes
from trtmodel_worker.host.sharing import can_pin


@pytest.fixture(autouse=True)
def _portable(monkeypatch):
    """An interpreter as uv installs it."""
    for name in ("memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING", "pidfd_open"):
        monkeypatch.delattr(os, name, raising=False)
    for name in [name for name in vars(fcntl) if name.startswith(("F_SEAL_", "F_ADD_SEALS", "F_GET_SEALS"))]:
        monkeypatch.delattr(fcntl, name)


def test_what_was_sealed_is_neither_written_nor_cut():
    descriptor = sealed_bytes("a-name", b"engine")
    try:
        for change in (
            lambda: os.pwrite(descriptor, b"x", 0),
            lambda: os.ftruncate(descriptor, 1),
            lambda: os.ftruncate(descriptor, 100),
            lambda: kernel.seal(descriptor, 0),
        ):
            with pytest.raises(PermissionError):
                change()
        assert os.pread(descriptor, 100, 0) == b"engine"
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


def test_an_arena_is_written_and_keeps_its_size():
    arena = Arena.create("arena", 8192)
    arena.view[:6] = b"tensor"
    assert os.pread(arena.fd, 6, 0) == b"tensor"
    for size in (4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    arena.close()


class Pinning:
    def __init__(self):
        self.pinned = []

    def pin(self, address, size):
        self.pinned.append(address)
        return True

    def unpin(self, address):
        self.pinned.remove(address)


def test_whether_a_device_pins_clients_memory_is_tried():
    engine = Pinning()
    assert can_pin(engine)
    assert engine.pinned == []


def test_the_descriptor_of_a_process_is_readable_when_the_process_has_ended():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = kernel.process_descriptor(process.pid)
    try:
        assert select.select([descriptor], [], [], 0)[0] == []
        process.communicate(b"\n", timeout=30)
        assert select.select([descriptor], [], [], 30)[0] == [descriptor]
    finally:
        os.close(descriptor)


def test_what_the_kernel_refuses_is_an_error_with_its_name():
    with pytest.raises(ProcessLookupError):
        kernel.process_descriptor(2**22 + 1)
