"""What a portable Python leaves out works without it, as the worker uses it."""

import os
import select
import subprocess
import sys

import pytest
from trtmodel_worker import kernel


@pytest.fixture
def portable(monkeypatch):
    """An interpreter without them, as uv installs it."""
    for name in ("memfd_create", "pidfd_open"):
        monkeypatch.delattr(os, name, raising=False)


@pytest.mark.usefixtures("portable")
def test_a_sealed_memory_file_is_neither_written_nor_cut():
    descriptor = kernel.memory_file("a-name")
    try:
        os.write(descriptor, b"engine")
        kernel.seal(descriptor, kernel.SEAL_SHRINK | kernel.SEAL_GROW | kernel.SEAL_WRITE | kernel.SEAL_SEAL)
        for change in (
            lambda: os.write(descriptor, b"x"),
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


@pytest.mark.usefixtures("portable")
def test_the_descriptor_of_a_process_is_readable_when_the_process_has_ended():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = kernel.process_descriptor(process.pid)
    try:
        assert select.select([descriptor], [], [], 0)[0] == []
        process.communicate(b"\n", timeout=30)
        assert select.select([descriptor], [], [], 30)[0] == [descriptor]
    finally:
        os.close(descriptor)


@pytest.mark.usefixtures("portable")
def test_what_the_kernel_refuses_is_an_error_with_its_name():
    with pytest.raises(ProcessLookupError):
        kernel.process_descriptor(2**22 + 1)
