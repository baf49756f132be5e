"""Which files of clients are told to engine hosts whose devices read them by themselves: see ``host/sharing.py``."""

from __future__ import annotations

from typing import Protocol

from trtmodel_worker.host.wire import FORGET, SHARE


class ClientFile(Protocol):
    """`reader`: a descriptor that can only be read from."""

    reader: int


class Reader(Protocol):
    """An engine host."""

    @property
    def is_gone(self) -> bool: ...

    def tell(self, what: bytes, descriptor: int) -> None:
        """Not a reason to wait: a host that does not hear it copies."""
        ...


class Sharing:
    """A file that is registered twice is told twice, and forgotten twice."""

    def __init__(self) -> None:
        self._files: list[ClientFile] = []
        self._hosts: list[Reader] = []

    def add(self, file: ClientFile) -> None:
        self._files.append(file)
        self._tell(SHARE, file)

    def remove(self, file: ClientFile) -> None:
        self._files.remove(file)
        self._tell(FORGET, file)

    def join(self, host: Reader) -> None:
        """A host that reads so is about to serve."""
        self._hosts.append(host)
        for file in self._files:
            host.tell(SHARE, file.reader)

    def _tell(self, what: bytes, file: ClientFile) -> None:
        self._hosts = [host for host in self._hosts if not host.is_gone]
        for host in self._hosts:
            host.tell(what, file.reader)
