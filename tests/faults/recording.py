"""What a program asked of the kernel, in order: read from strace's output."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tests.faults.disk import Disk

#: Modelled by `Disk`; of the others none may touch the recorded folder.
_MODELLED = (
    "openat write pwrite64 lseek ftruncate fsync fdatasync rename link mkdir unlink unlinkat rmdir"
)
_UNKNOWN = (
    "open creat writev pwritev pwritev2 copy_file_range sendfile fallocate truncate linkat "
    "symlink symlinkat renameat renameat2 mkdirat"
)
#: They name a file that no descriptor stands for.
_NAMING = "openat unlinkat rename link mkdir unlink rmdir open creat"
_LINE = re.compile(r"(\d+\.\d+) (\w+)\((.*)\)\s+= (-?\d+)(?:<[^>]*>)?[^<]*<(\d+\.\d+)>$")
_HEX = re.compile(r"(?:\\x[0-9a-f]{2})+")
_QUOTED = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_DESCRIPTOR = re.compile(r"(\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>(?:\(deleted\))?")


@dataclass(frozen=True, slots=True)
class Call:
    """One system call that succeeded.

    Attributes:
        seconds: When it took effect: a call that makes durable, when it returned.
        name: Its name.
        path: The file or folder it was about; absolute.
        words: Its arguments as strace wrote them.
        result: What it returned.
        data: Its string arguments.
    """

    seconds: float
    name: str
    path: str
    words: str
    result: int
    data: tuple[bytes, ...]


def why_not() -> str:
    """Why nothing can be recorded on this machine; empty if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-f", "true"], capture_output=True, text=True, check=False)
    return f"strace does not work here: {tried.stderr[-200:]}" if tried.returncode else ""


def record(command: Sequence[str], folder: Path, environment: dict[str, str]) -> list[Call]:
    """Run a command to its end, its children too, and return what it asked for."""
    words = ["strace", "-ff", "--seccomp-bpf", "-ttt", "-T", "-y", "-xx", "-s", "4194304"]
    words += ["-e", f"trace={','.join((_MODELLED + ' ' + _UNKNOWN).split())}", "-e", "signal=none"]
    done = subprocess.run(
        [*words, "-o", str(folder / "trace"), *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    calls = [call for path in folder.glob("trace.*") for call in _calls(path)]
    return sorted(calls, key=lambda call: call.seconds)


def _calls(path: Path) -> Iterator[Call]:
    """Those of one thread, in its order, whatever was done to the machine's clock meanwhile."""
    latest = 0.0
    for line in path.read_text().splitlines():
        match = _LINE.match(line)
        if match is None or int(match[4]) < 0:
            continue
        start, name, words, result, duration = match.groups()
        strings = tuple(_bytes(text) for text in _QUOTED.findall(words))
        descriptor = _DESCRIPTOR.match(words)
        where = _bytes(descriptor[2]).decode() if descriptor else ""
        if name in _NAMING.split():
            where = str(PurePosixPath(where) / strings[0].decode(errors="replace"))
        seconds = float(start) + (float(duration) if name in ("fsync", "fdatasync") else 0.0)
        latest = max(latest, seconds)
        yield Call(latest, name, where, words, int(result), strings)


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


class Player:
    """Carries recorded calls out on a `Disk`."""

    def __init__(self, root: Path) -> None:
        self.disk = Disk()
        self._root = PurePosixPath(root)
        # By name, not by descriptor: nobody here holds one file open twice.
        self._offsets: dict[str, int] = {}

    def play(self, call: Call) -> bool:
        """Carry one call out; False if it has nothing to do with the root or changes nothing."""
        if not PurePosixPath(call.path).is_relative_to(self._root):
            return False
        assert call.name in _MODELLED.split(), f"{call.name} of {call.path} is not modelled"
        action: Callable[[Call, PurePosixPath], bool] = getattr(self, "_" + call.name)
        return action(call, PurePosixPath(call.path).relative_to(self._root))

    def _openat(self, call: Call, path: PurePosixPath) -> bool:
        self._offsets[call.path] = 0
        create, truncate = "O_CREAT" in call.words, "O_TRUNC" in call.words
        if create or truncate:
            self.disk.open(path, create=create, truncate=truncate)
        return create or truncate

    def _write(self, call: Call, path: PurePosixPath) -> bool:
        offset = self._offsets[call.path]
        self.disk.write(path, offset, call.data[0][: call.result])
        self._offsets[call.path] = offset + call.result
        return True

    def _pwrite64(self, call: Call, path: PurePosixPath) -> bool:
        self.disk.write(path, int(call.words.rsplit(", ", 1)[1]), call.data[0][: call.result])
        return True

    def _lseek(self, call: Call, path: PurePosixPath) -> bool:
        self._offsets[call.path] = call.result
        return False

    def _ftruncate(self, call: Call, path: PurePosixPath) -> bool:
        self.disk.resize(path, int(call.words.rsplit(", ", 1)[1]))
        return True

    def _fsync(self, call: Call, path: PurePosixPath) -> bool:
        self.disk.sync(path)
        return True

    _fdatasync = _fsync

    def _rename(self, call: Call, path: PurePosixPath) -> bool:
        target = PurePosixPath(call.data[1].decode()).relative_to(self._root)
        self.disk.rename(path, target)
        return True

    def _link(self, call: Call, path: PurePosixPath) -> bool:
        target = PurePosixPath(call.data[1].decode()).relative_to(self._root)
        self.disk.link(path, target)
        return True

    def _mkdir(self, call: Call, path: PurePosixPath) -> bool:
        self.disk.make_folder(path)
        return True

    def _unlink(self, call: Call, path: PurePosixPath) -> bool:
        self.disk.remove(path)
        return True

    _unlinkat = _rmdir = _unlink
