"""The command line, in this process and on a terminal."""

import errno
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

from typer.testing import CliRunner

from blobstore.cli.app import app

__all__ = ["Terminal", "printed"]


def printed(*arguments: object, code: int = 0) -> str:
    """What a command prints. It must end with this code, and with no exception."""
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


class Terminal:
    """A command of blobstore on a terminal of its own.

    Attributes:
        output: what was read so far.
    """

    def __init__(self, *arguments: object, folder: Path, columns: int = 80, term: str = "xterm-256color") -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        command = [sys.executable, "-W", "error", "-m", "blobstore", *map(str, arguments)]
        env = {**os.environ, "TERM": term, "XDG_CACHE_HOME": str(folder / "cache"), "COLORTERM": "truecolor"}
        env.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=env, start_new_session=True
        )
        os.close(slave)
        self.output = b""

    def until(self, text: bytes) -> None:
        """Read until something is there."""
        while text not in self.output:
            self.output += os.read(self.master, 4096)

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def end(self) -> int:
        """Read to the end; the exit code."""
        while True:
            try:
                data = os.read(self.master, 4096)
            except OSError as error:
                assert error.errno == errno.EIO  # how Linux says that nobody has the terminal any more
                break
            if not data:
                break
            self.output += data
        os.close(self.master)
        return self.process.wait()
