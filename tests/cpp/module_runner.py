"""Builds and calls the stock C++ Module (module_runner.cpp)."""

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.helpers import native_build

# numpy's names of ExecuTorch's scalar types. They are written out here, because code that checks files must not share
# a table with code that writes them.
TYPES = {
    "uint8": 0,
    "int8": 1,
    "int16": 2,
    "int32": 3,
    "int64": 4,
    "float16": 5,
    "float32": 6,
    "float64": 7,
    "bool": 11,
}
NAMES = {number: name for name, number in TYPES.items()}


class ModuleRunnerError(Exception):
    """The program failed.

    Attributes:
        code: ExecuTorch's error number if it is below 64, or a negative signal number after a crash.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"exit code {code}: {message}")
        self.code = code


class ModuleRunner:
    """Calls the built program, in a process of its own for each call."""

    def __init__(self, executable: Path) -> None:
        self.executable = executable

    def __call__(
        self, program: Path, data_files: Sequence[Path], inputs: Sequence[np.ndarray], method: str = "forward"
    ) -> list[np.ndarray]:
        """Run a method with any number of data files, and return its outputs."""
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            command: list[str | Path] = [self.executable, program, method]
            for data_file in data_files:
                command += ["--data", data_file]
            for i, array in enumerate(inputs):
                file = directory / f"in{i}.bin"
                file.write_bytes(np.ascontiguousarray(array).tobytes())
                command += ["--input", file, str(TYPES[array.dtype.name]), _join(array.shape)]
            command += ["--output", directory / "out"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise ModuleRunnerError(done.returncode, done.stderr)
            lines = done.stdout.splitlines()
            return [_read(directory / f"out{i}.bin", line) for i, line in enumerate(lines)]

    def named_data(self, program: Path, data_files: Sequence[Path], key: str) -> bytes:
        """What an application finds under a key in `Program::get_named_data_map()`."""
        with tempfile.TemporaryDirectory() as name:
            command: list[str | Path] = [
                self.executable,
                program,
                "",
                "--named-data",
                key,
                "--output",
                Path(name, "out"),
            ]
            for data_file in data_files:
                command += ["--data", data_file]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise ModuleRunnerError(done.returncode, done.stderr)
            return Path(name, "out").read_bytes()


def build() -> ModuleRunner:
    """Configure and build, which takes a moment if nothing changed."""
    with native_build.folder("module-runner") as directory:
        native_build.build(Path(__file__).parent, directory, "-DCMAKE_BUILD_TYPE=Release")
        return ModuleRunner(directory / "module_runner")


def _join(numbers: Sequence[int]) -> str:
    return "x".join(map(str, numbers))


def _read(file: Path, line: str) -> np.ndarray:
    fields = [field.split("x") if field else [] for field in line.split(" ")]
    [scalar_type], sizes, dim_order = ([int(number) for number in field] for field in fields)
    in_memory = np.frombuffer(file.read_bytes(), NAMES[scalar_type]).reshape([sizes[d] for d in dim_order])
    return in_memory.transpose(np.argsort(dim_order)) if dim_order else in_memory.reshape(())
