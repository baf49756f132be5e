"""Engine host processes: start one, watch it, end it.

A host is started by a thread that lives as long as the front (the kernel ties PDEATHSIG to the thread that forked),
and its end is seen through a pidfd: only then was it reaped, and only then are its regions free. An end of file on a
lane is no proof of death; it leads to SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trtmodel_contract.codec import DocumentError, decode, dumps, loads
from trtmodel_contract.control import DEVICE_LOST
from trtmodel_contract.exitcodes import HostExit
from trtmodel_contract.identity import LoadKey
from trtmodel_contract.manifest import Manifest

from trtmodel_worker import kernel
from trtmodel_worker.environment import scrubbed
from trtmodel_worker.front.lanes import LanePort
from trtmodel_worker.front.pulse import Crowd, Pulse
from trtmodel_worker.front.sharing import Sharing
from trtmodel_worker.host.arena import Arena, sealed_bytes
from trtmodel_worker.host.wire import MAX_MESSAGE_BYTES, HostConfig, Ready, Refused
from trtmodel_worker.placement import leave_to_front

log = logging.getLogger(__name__)

_DESCRIBE_SECONDS = 60.0
_DEVICE_DUTY = 0.07  # nobody can interrupt what runs on a GPU: requests wait for its end
_FINISH_SECONDS = 15.0
_STOPPED = ("T", "t")  # by a signal, by a debugger
_STAT_BYTES = 4096
_EXIT_CODE = 49  # in /proc/PID/stat, after the name: set at the beginning of a process's end
_EXITS = {
    HostExit.CANNOT_LOAD: "it could not load the engine",
    HostExit.STICKY_ERROR: "its device context was poisoned",
    HostExit.DEVICE_LOST: "it lost its device",
    HostExit.LANE_LOST: "a lane that had failed could not be made anew",
}


class HostFailed(Exception):
    """A host did not become ready. `refused`: it said that this engine must not serve, so trying again is no use."""

    def __init__(self, reason: str, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.refused = refused


@dataclass(frozen=True)
class Machine:
    """What this worker can load."""

    load_key: LoadKey
    driver: str


@dataclass(frozen=True)
class Payload:
    """Verified bytes of an engine, as descriptors of sealed memory files."""

    plan: tuple[int, int]
    goldens: tuple[tuple[int, int], ...]

    def close(self) -> None:
        for fd, _ in (self.plan, *self.goldens):
            os.close(fd)


class Hosts:
    """Starts hosts, all from one thread. `crowd`: what is left for one that is prepared beside requests now."""

    def __init__(
        self, runtime: str, crowd: Callable[[], Crowd] = lambda: Crowd.NONE, sharing: Sharing | None = None
    ) -> None:
        self._runtime = runtime
        self._sharing = sharing or Sharing()
        self._crowd = crowd
        self._pulses: dict[EngineHost, Pulse] = {}
        self._has_device = True
        # The front's slices are not for who prepares.
        self._parent = ThreadPoolExecutor(1, "host-parent", leave_to_front)

    def look(self) -> None:
        """A request was given to a lane, or has been answered: what is prepared meanwhile makes way, or goes on."""
        if self._pulses:
            crowd = self._crowd()
            for pulse in self._pulses.values():
                pulse.look(crowd)

    async def describe(self) -> Machine:
        """Ask the runtime, in a process of its own, what it can load here. Raises HostFailed."""
        command = [sys.executable, "-m", "trtmodel_worker.host", "describe", self._runtime]
        try:
            done = await asyncio.wrap_future(self._parent.submit(_run, command))
        except (OSError, subprocess.TimeoutExpired) as e:
            raise HostFailed(
                "RuntimeUnusable", f"the runtime {self._runtime} did not answer: {e}", refused=False
            ) from e
        try:
            document = json.loads(done.stdout)
            machine = Machine(decode(LoadKey, document["loadKey"]), str(document["driver"]))
        except (ValueError, KeyError, TypeError) as e:
            text = done.stderr.decode(errors="replace").strip()[-500:] or f"exit code {done.returncode}"
            raise HostFailed("RuntimeUnusable", text, refused=False) from e
        self._has_device = bool(machine.driver)
        return machine

    async def start(
        self,
        manifest: Manifest,
        payload: Payload,
        arena: Arena,
        lanes: int,
        timeout: float,
        buckets: tuple[int, ...],
        duty: float,
        auto: bool = False,
        spin_seconds: float = 0.0,
    ) -> EngineHost:
        """A host that is ready: loaded, warm at `buckets`, self-tested, computing at most `duty` of the time meanwhile,
        or less on a device: there the host rests, elsewhere it is stopped and continued, since the processors are what
        it shares with those that serve. `auto`: it may find that fewer than `lanes` are enough.
        Raises HostFailed; then nothing of it is left."""
        pulsed = duty < 1 and not self._has_device
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(lanes + 1)]
        control, theirs = [p[0] for p in pairs], [p[1] for p in pairs]
        for channel in control:
            channel.setblocking(False)
        config_fd = -1
        try:
            config = HostConfig(
                name=f"{manifest.revision}/{manifest.digest()[:12]}",
                runtime=self._runtime,
                manifest=dumps(manifest).decode(),
                plan_fd=payload.plan[0],
                plan_size=payload.plan[1],
                golden_fds=tuple(fd for fd, _ in payload.goldens),
                golden_sizes=tuple(size for _, size in payload.goldens),
                arena_fd=arena.fd,
                arena_size=arena.size,
                lane_fds=tuple(c.fileno() for c in theirs[1:]),
                control_fd=theirs[0].fileno(),
                parent_pid=os.getpid(),
                buckets=buckets,
                duty=1.0 if pulsed or duty >= 1 else min(duty, _DEVICE_DUTY),
                pulsed=pulsed,
                auto=auto,
                spin_seconds=spin_seconds,
            )
            config_fd = sealed_bytes("trtmodel-host-config", dumps(config))
            os.lseek(config_fd, 0, os.SEEK_SET)
            inherited = [config_fd, *_descriptors(config)]
            process = await self._spawn(config_fd, inherited)
        except BaseException as e:
            for channel in control:
                channel.close()
            if isinstance(e, OSError):
                raise HostFailed("HostNotStarted", f"no process could be started: {e}", refused=False) from e
            raise
        finally:
            for channel in theirs:
                channel.close()
            if config_fd >= 0:
                os.close(config_fd)
        try:
            host = EngineHost(process, control[0], control[1:])
        except OSError as e:  # no descriptor to see its end by
            process.kill()
            process.wait()
            for channel in control:
                channel.close()
            raise HostFailed("HostNotStarted", f"its process cannot be watched: {e}", refused=False) from e
        if pulsed:
            self._pulses[host] = Pulse(host.signal, self._crowd)
        try:
            host.ready = await asyncio.wait_for(host.answer(), timeout)
        except asyncio.TimeoutError as e:
            await self._give_up(host)
            text = f"it was not ready within {timeout:g} s (TRTMODEL_PREPARE_SECONDS)"
            raise HostFailed("PrepareTimeout", text, refused=False) from e
        except BaseException:
            await asyncio.shield(self._give_up(host))
            raise
        host.keep(host.ready.lanes)
        if host.ready.pins:
            self._sharing.join(host)
        return host

    def run_freely(self, host: EngineHost) -> None:
        """It is about to serve: it need not make way any more."""
        pulse = self._pulses.pop(host, None)
        if pulse is not None:
            pulse.end()

    async def _give_up(self, host: EngineHost) -> None:
        try:
            await host.end(0.0)
        finally:
            self.run_freely(host)

    async def _spawn(self, config_fd: int, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
        """Not left half-way: descriptors must stay open until the process has them, and nobody may forget it."""
        starting = asyncio.wrap_future(self._parent.submit(_spawn, config_fd, inherited))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            process = await starting
            process.kill()
            process.wait()
            raise

    def close(self) -> None:
        self._parent.shutdown(wait=False)


class EngineHost:
    """One running host, as its front sees it."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, lanes: Sequence[socket.socket]
    ) -> None:
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._pidfd = kernel.process_descriptor(process.pid)
        self._guilty = True
        self._hung_up = False
        self._oom_kills = oom_kills()
        self.failures = 0
        self.innocent = False
        self.pid = process.pid
        self.why = ""
        self.ready = Ready(0.0)
        self.lanes = [LanePort(self, channel) for channel in lanes]
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self.on_dying: Callable[[EngineHost], None] = lambda _: None
        self._loop.add_reader(self._pidfd, self._reaped)

    async def answer(self) -> Ready:
        """What it says about its engine. Raises HostFailed."""
        try:
            data = await self._loop.sock_recv(self._control, MAX_MESSAGE_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            code = await self.exited
            text = f"the host ended while it loaded the engine: {describe_exit(code)}"
            raise HostFailed("HostDied", text, refused=False)
        try:
            return loads(Ready, data)
        except DocumentError:
            refused = loads(Refused, data)
            await self.exited
            raise HostFailed(refused.reason, refused.message, refused=refused.reason != DEVICE_LOST) from None

    @property
    def is_gone(self) -> bool:
        return self.exited.done()

    def tell(self, what: bytes, descriptor: int) -> None:
        """As in `Reader`."""
        with contextlib.suppress(OSError):
            socket.send_fds(self._control, [what], [descriptor])

    def keep(self, lanes: int) -> None:
        """Only the first `lanes` of them serve."""
        for lane in self.lanes[lanes:]:
            lane.channel.close()
        del self.lanes[lanes:]

    def listen(self, readable: Callable[[LanePort], None]) -> None:
        for lane in self.lanes:
            self._loop.add_reader(lane.channel.fileno(), readable, lane)

    def kill(self, why: str, *, guilty: bool = True) -> None:
        """SIGKILL. `exited` tells when it is gone. `guilty`: what it runs may be why."""
        if not self.why and not self.exited.done():
            self.why, self._guilty = why, guilty
            log.warning("host %d is killed: %s", self.pid, why)
            self._silence()
            self.on_dying(self)
            self.signal(signal.SIGKILL)

    def hung_up(self, why: str) -> None:
        """It has ended or is about to, and its exit code says how: SIGKILL comes too late to change that. It is sent
        all the same, for it must not live on without a lane."""
        if not self.why and not self.exited.done():
            self._hung_up = True
            self.innocent = is_killed(self.pid) and oom_kills() == self._oom_kills
            self.kill(why)

    def is_lingering(self) -> bool:
        """As in `Host`. A driver was seen to clean up for 30 to 80 ms before the kernel closed anything."""
        if self.why or self.exited.done() or not is_killed(self.pid):
            return False
        self.hung_up("somebody killed it")
        return True

    def is_stopped(self) -> bool:
        """As in `Host`."""
        return not self.exited.done() and _state(self.pid) in _STOPPED

    async def end(self, grace: float = _FINISH_SECONDS) -> None:
        """SIGTERM, and SIGKILL after `grace` seconds. Returns when it was reaped."""
        self._silence()
        self.signal(signal.SIGTERM if grace else signal.SIGKILL)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.exited), grace or None)
            return
        self.signal(signal.SIGKILL)
        await asyncio.shield(self.exited)

    def signal(self, number: int) -> None:
        if not self.exited.done():
            self._process.send_signal(number)

    @property
    def killed_from_outside(self) -> bool:
        """Somebody killed it who is neither its front nor the kernel for lack of memory."""
        killed = self.exited.result() == -signal.SIGKILL and (self._hung_up or not self.why)
        return killed and oom_kills() == self._oom_kills

    @property
    def guilty(self) -> bool:
        """Something that it ran may be why it ended. A lane is lost by what failed before, and has been answered."""
        return self._guilty and not self.killed_from_outside and self.exited.result() != HostExit.LANE_LOST

    def epitaph(self) -> str:
        return describe_exit(self.exited.result()) if self._hung_up or not self.why else self.why

    def _silence(self) -> None:
        for lane in self.lanes:
            if lane.channel.fileno() >= 0:
                self._loop.remove_reader(lane.channel.fileno())

    def _reaped(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        self._silence()
        self._control.close()
        for lane in self.lanes:
            lane.channel.close()
        if not self.exited.done():
            self.exited.set_result(code)


def is_killed(pid: int) -> bool:
    """Whether SIGKILL ends the process or has ended it, reaped or not. Where the kernel does not tell: False."""
    return _stat(pid)[_EXIT_CODE : _EXIT_CODE + 1] == [str(int(signal.SIGKILL))]


def _state(pid: int) -> str:
    """As the kernel names it: "T" for a process that is stopped; "" where it does not tell."""
    return "".join(_stat(pid)[:1])


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, after its name; nothing where it does not tell. Asked while requests wait, so
    without what `Path` would do beside."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        return os.read(file, _STAT_BYTES).decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
    finally:
        os.close(file)


def oom_kills() -> int:
    """Processes of this container that the kernel has killed for lack of memory (cgroup v2, v1), 0 if nobody says."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(path).read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def describe_exit(code: int) -> str:
    if code < 0:
        return f"ended by signal {signal.Signals(-code).name}"
    return f"{_EXITS[HostExit(code)]} (exit code {code})" if code in list(_EXITS) else f"exit code {code}"


def _descriptors(config: HostConfig) -> list[int]:
    return [config.plan_fd, *config.golden_fds, config.arena_fd, *config.lane_fds, config.control_fd]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command,
        env=scrubbed(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=_DESCRIBE_SECONDS,
    )


def _spawn(config_fd: int, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "trtmodel_worker.host", "serve", str(config_fd)],
        stdin=subprocess.DEVNULL,
        env=scrubbed(os.environ),
        pass_fds=inherited,
        start_new_session=True,
    )
