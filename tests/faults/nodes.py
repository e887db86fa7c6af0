"""Nodes for real, as namespaces of one machine: processes, mounts and network of their own.

Each node has its own /dev/shm, its own disk at a path that is the same on all nodes, and one network
interface in a bridge. Whatever else is on the machine is shared, as over NFS. A node that is killed
takes all its processes, its memory and its disk along.

Nothing is left in the machine's own namespaces: the bridge has a network namespace too, and
everything ends with the process that made it, however that ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from typing_extensions import Self

from tests.background import fork_processes, torch_loaded
from tests.processes import PATIENCE_SECONDS

INTERFACE = "eth0"
#: Exit status of a process whose function raised an error.
FAILED = 70
#: CLONE_NEWNS, CLONE_NEWPID and CLONE_NEWNET of linux/sched.h.
_NEW_NAMESPACES = 0x00020000 | 0x20000000 | 0x40000000
_BRIDGE = "br0"
_TOOLS = ("ip", "mount", "nsenter", "unshare")
_DISK_MEBIBYTES = _MEMORY_MEBIBYTES = 2048
_LOOK_SECONDS = 0.01


class CannotMakeNodes(Exception):
    """This machine lets nobody make a node; the message says why."""


def why_no_nodes() -> str:
    """Why no node can be made here; empty if one can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"nodes need {', '.join(missing)}"
    options = ["-m", "-n", "-p", "-f", "--mount-proc", "--kill-child"]
    tries = "mount -t tmpfs tmpfs /dev/shm && " + " && ".join(
        f"ip link add {what}" for what in ("br0 type bridge", "end1 type veth peer name end2")
    )
    done = subprocess.run(
        ["unshare", *options, "sh", "-c", tries], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else f"unshare -m -n is not permitted: {done.stderr.strip()}"


class Rank:
    """A process of a training, in a node.

    Attributes:
        code: Its exit status, negative for a signal; None while it runs.
    """

    def __init__(self, node: Node, pid: int) -> None:
        self._node, self._pid = node, pid
        self.code: int | None = None

    def poll(self) -> int | None:
        """See ``subprocess.Popen.poll``."""
        self._node.listen()
        return self.code

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int | None:
        """Wait until it ends, or the time is over."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return self.code

    def send_signal(self, number: int) -> None:
        """Send a signal to this process alone."""
        if self.poll() is None:
            self._node.send_signal(number, self._pid)


class Node:
    """One node; made by `Network.start`.

    Args:
        disk: Where it has its disk.
        plug: Connects the namespace of a process with the bridge.
        address: Of its interface, with the length of the network's part.
    """

    def __init__(self, disk: Path, plug: Callable[[int], None], address: str) -> None:
        self._line, theirs = multiprocessing.Pipe()
        self._ranks: dict[int, Rank] = {}
        self._holder = torch_loaded().Process(
            target=_hold, args=(theirs, str(disk), address), daemon=True
        )
        self._holder.start()
        theirs.close()
        self._init = int(self._hear())
        plug(self._init)
        self._line.send(None)
        self._hear()

    @property
    def root(self) -> Path:
        """All files as the node sees them."""
        return Path(f"/proc/{self._init}/root")

    @property
    def bytes_sent(self) -> int:
        """What its interface has sent so far, with the heads of all layers."""
        lines = Path(f"/proc/{self._init}/net/dev").read_text().splitlines()
        return next(int(line.split()[9]) for line in lines if f"{INTERFACE}:" in line)

    @property
    def is_alive(self) -> bool:
        """Whether it was not killed."""
        return not self._line.closed

    def start(
        self,
        main: Callable[..., int | None],
        *arguments: object,
        output: Path,
        env: Mapping[str, str] | None = None,
    ) -> Rank:
        """Start a process that runs a function as a script.

        Args:
            main: Importable by name; what it returns is the exit status.
            arguments: They reach it as text.
            output: What it prints is appended here.
            env: Its environment is this process's and these.
        """
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **(env or {})}
        words = [str(argument) for argument in arguments]
        self._line.send(("start", main, words, str(output), environment))
        rank = Rank(self, int(self._hear()))
        self._ranks[rank._pid] = rank
        return rank

    def send_signal(self, number: int, pid: int = -1) -> None:
        """Send a signal to a process, by its number in the node; to all of them by default."""
        if self.is_alive:
            with suppress(BrokenPipeError):
                self._line.send(("signal", pid, number))

    def stop_all(self) -> None:
        """Kill all processes; memory and disk stay."""
        self.send_signal(signal.SIGKILL)
        for rank in self._ranks.values():
            rank.wait()

    def kill(self) -> None:
        """Kill all processes at once; memory and disk are gone when this returns."""
        with suppress(ProcessLookupError):
            os.kill(self._init, signal.SIGKILL)
        self._holder.join(PATIENCE_SECONDS)  # ends when the last process of the node has
        assert self._holder.exitcode is not None
        self.listen()
        self._line.close()

    def listen(self) -> None:
        """Note which processes have ended."""
        if not self.is_alive:
            return
        try:
            while self._line.poll():
                self._note(self._line.recv())
        except (EOFError, OSError):
            for rank in self._ranks.values():
                rank.code = -signal.SIGKILL if rank.code is None else rank.code

    def _hear(self) -> Any:
        """Wait for an answer."""
        while self._line.poll(PATIENCE_SECONDS):
            message = self._line.recv()
            if message[0] == "trouble":
                raise CannotMakeNodes(message[1])
            if message[0] == "answer":
                return message[1]
            self._note(message)
        raise TimeoutError("a node does not answer")

    def _note(self, message: tuple[str, int, int]) -> None:
        _, pid, status = message
        if pid in self._ranks:
            self._ranks[pid].code = os.waitstatus_to_exitcode(status)


class Network:
    """Nodes with a bridge between them; a context manager that ends them all.

    Args:
        folder: Shared by all nodes, but for the folder ``disk`` in it.

    Attributes:
        disk: Each node's own disk.
        nodes: Those that were started.
    """

    def __init__(self, folder: Path) -> None:
        self.disk = folder / "disk"
        self.nodes: list[Node] = []
        self._names: dict[Node, str] = {}

    def __enter__(self) -> Self:
        reason = why_no_nodes()
        if reason:
            raise CannotMakeNodes(reason)
        self.disk.mkdir(parents=True, exist_ok=True)
        # It ends with its input, so with this process.
        script = (
            f"ip link add {_BRIDGE} type bridge && ip link set {_BRIDGE} up && echo up && exec cat"
        )
        self._hub = subprocess.Popen(
            ["unshare", "-n", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._hub.stdout is not None
        assert self._hub.stdout.readline() == b"up\n"
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            if node.is_alive:
                node.kill()
        with self._hub:
            self._hub.kill()

    def start(self) -> Node:
        """Start a fresh node, with an address that no other one had."""
        number = len(self.nodes) + 1
        name = f"node{number}"

        def plug(pid: int) -> None:
            words = f"ip link add {name} netns {self._hub.pid} type veth peer name {INTERFACE} netns {pid}"
            _do(*words.split())
            self._in_hub(f"ip link set {name} master {_BRIDGE} up")

        node = Node(self.disk, plug, f"10.77.{number >> 8}.{number & 255}/16")
        self.nodes.append(node)
        self._names[node] = name
        return node

    def unplug(self, node: Node) -> None:
        """Cut a node off: what it sends is lost, and nobody is told."""
        self._in_hub(f"ip link set {self._names[node]} down")

    def _in_hub(self, command: str) -> None:
        _do("nsenter", "-t", str(self._hub.pid), "-n", *command.split())


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMakeNodes(f"{' '.join(command)}: {done.stderr.strip()}")


def _hold(line: Connection, disk: str, address: str) -> None:
    """Make the namespaces, and end when the node's last process has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NAMESPACES):
        line.send(("trouble", f"no namespaces: {os.strerror(ctypes.get_errno())}"))
        return
    pid = os.fork()
    if pid == 0:
        _live(line, disk, address)
    line.send(("answer", pid))
    line.close()
    os.waitpid(pid, 0)


def _live(line: Connection, disk: str, address: str) -> None:
    """Be the first process of a node; never returns."""
    try:
        os.setsid()
        woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        line.recv()
        _furnish(disk, address)
        signal.set_wakeup_fd(wakes)
        line.send(("answer", None))
        while True:
            select.select([line.fileno(), woken], [], [])
            with suppress(BlockingIOError):
                os.read(woken, 4096)
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    line.send(("ended", *ended))
            while line.poll():
                _obey(line, *line.recv())
    except (EOFError, BrokenPipeError):
        pass  # who made the node has ended
    except CannotMakeNodes as error:
        line.send(("trouble", str(error)))
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _furnish(disk: str, address: str) -> None:
    tmpfs = "mount -t tmpfs -o mode=1777,size={}m tmpfs {}"
    for command in (
        "mount --make-rprivate /",
        "mount -t proc proc /proc",
        tmpfs.format(_MEMORY_MEBIBYTES, "/dev/shm"),
        tmpfs.format(_DISK_MEBIBYTES, disk),
        f"ip address add {address} dev {INTERFACE}",
        "ip link set lo up",
        f"ip link set {INTERFACE} up",
    ):
        _do(*command.split())
    with suppress(OSError):  # its messages would be counted as the training's
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")


def _obey(line: Connection, word: str, *rest: Any) -> None:
    if word == "signal":
        pid, number = rest
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return
    pid = os.fork()
    if pid == 0:
        _begin(line, *rest)
    line.send(("answer", pid))


def _begin(
    line: Connection,
    main: Callable[..., int | None],
    words: list[str],
    output: str,
    environment: dict[str, str],
) -> None:
    """The life of a started process; never returns."""
    code = FAILED
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        line.close()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.environ.clear()
        os.environ.update(environment)
        fork_processes(forks=True)
        code = main(*words) or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
