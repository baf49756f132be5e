"""Files of clients, and who knows them: lanes that have read them, and hosts whose devices read them by themselves
(see ``host/sharing.py``)."""

from __future__ import annotations

import os
from typing import Protocol

from trtmodel_worker.host.wire import FORGET, SHARE


class Knower(Protocol):
    """A lane."""

    def forget(self, file: ClientFile) -> None: ...


class ClientFile:
    """An open file. Closed when nobody refers to it any more: a request that waits may outlive its region's
    registration, and the number of a closed descriptor may be another file's next. `reader`: for engine hosts, which
    write nothing there. `lanes` that know it. `gone`: it is registered no more."""

    __slots__ = ("fd", "gone", "lanes", "reader")

    def __init__(self, fd: int) -> None:
        """Raises OSError. The descriptor is closed in any case."""
        self.fd = self.reader = fd
        self.gone = False
        self.lanes: set[Knower] = set()
        self.reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)

    def leave(self) -> None:
        """No request will name it any more; some may be on their way."""
        self.gone = True
        for lane in list(self.lanes):
            lane.forget(self)

    def __del__(self) -> None:
        for fd in {self.fd, self.reader}:
            os.close(fd)


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
        file.leave()
        self._tell(FORGET, file)

    def join(self, host: Reader) -> None:
        """A host that reads so is about to serve."""
        self._hosts = [known for known in self._hosts if not known.is_gone] + [host]
        for file in self._files:
            host.tell(SHARE, file.reader)

    def _tell(self, what: bytes, file: ClientFile) -> None:
        self._hosts = [host for host in self._hosts if not host.is_gone]
        for host in self._hosts:
            host.tell(what, file.reader)
