"""Search for bad answers to bad files, for some time: `make fuzz SECONDS=…`.

The readers in Python run under atheris, those in C++ under libFuzzer with AddressSanitizer and UndefinedBehaviorSanitizer.
Both keep the inputs of one format in one folder, so each continues from the inputs of the other. The inputs stay in
build/fuzz, and the next run begins with them. A finding is tried again without instrumentation, minimized and kept as a
file.
"""

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from campaigns.children import say

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "fuzz"
CORPUS, FOUND, NATIVE = BUILD / "corpus", BUILD / "found", BUILD / "native"
LONGEST = 24576  # bytes of an input
SANITIZERS = "address,undefined,fuzzer-no-link"
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:quarantine_size_mb=16:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


@dataclass(frozen=True)
class Job:
    """One fuzzer on one corpus.

    Attributes:
        corpus: the folder of inputs, and the target that tries findings again.
        native: the native fuzzer; empty for Python.
    """

    corpus: str
    native: str = ""

    @property
    def name(self) -> str:
        return f"{self.corpus}, {'C++' if self.native else 'Python'}"


FUZZERS = {
    "ptd": ("", "ptd_fuzz", "adapter_fuzz"),
    "pte": ("", "pte_fuzz"),
    "packed": ("packed_fuzz",),
    "records": ("",),
    "payload": ("", "payload_fuzz"),
    "safetensors": ("", "safetensors_fuzz"),
    "checkpoint": ("",),
    "baseline": ("",),
    "report": ("",),
    **dict.fromkeys(("index", "parts", "ways", "encoded"), ("", "releases_fuzz")),
    "chunk": ("", "codec_fuzz"),
    "http": ("",),
    "journal": ("",),
    "commits": ("commits_fuzz",),
    "adapter": ("",),
    "peft": ("",),
}
JOBS = [Job(corpus, native) for corpus, fuzzers in FUZZERS.items() for native in fuzzers]


def main() -> None:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="of the whole search")
    parser.add_argument("--only", default="", help="fuzzers whose name contains this, as in 'ptd, C++'")
    options = parser.parse_args()
    jobs = [job for job in JOBS if options.only in job.name]
    if not jobs:
        parser.error(f"no fuzzer has {options.only!r} in its name; there are {[job.name for job in JOBS]}")
    _check_tools()
    _make_seeds()
    _build()
    shutil.rmtree(FOUND, ignore_errors=True)
    cores = os.cpu_count() or 1
    seconds = max(1, int(options.seconds * min(cores, len(jobs)) / len(jobs)))
    start = time.monotonic()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - for a folder of our own
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as folder, ThreadPoolExecutor(cores) as threads:
        lines = list(threads.map(lambda job: _run(job, seconds, folder), jobs))
    for line in lines:
        say(line)
    findings = _try_again()
    say(f"{time.monotonic() - start:.0f} s, {findings} findings")
    sys.exit(1 if findings else 0)


def _check_tools() -> None:
    """Exit with instructions if a tool is missing."""
    missing = []
    if importlib.util.find_spec("atheris") is None:
        missing.append(f"atheris: {sys.executable} -m pip install 'atheris>=3'")
    if shutil.which("clang++") is None:
        missing.append(
            "clang++ with its run-time libraries: apt-get install clang libclang-rt-dev, or the packages with these names on your system"
        )
    if missing:
        sys.exit("Fuzzing needs\n  " + "\n  ".join(missing))


def _make_seeds() -> None:
    """Add valid files to the corpora, unless those of the current source are there."""
    sources = sorted([*(ROOT / "blobstore").rglob("*.py"), Path(__file__).with_name("seeds.py")])
    version = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    mark = BUILD / "seeds" / "version"
    if mark.exists() and mark.read_text() == version:
        return
    say("Making seeds ...")
    shutil.rmtree(mark.parent, ignore_errors=True)
    command = [sys.executable, "-W", "ignore", "-m", "campaigns.fuzz.seeds", str(mark.parent)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    for job in JOBS:
        (CORPUS / job.corpus).mkdir(parents=True, exist_ok=True)
        for source in (mark.parent / job.corpus, ROOT / "tests" / "data" / "found" / job.corpus):
            for path in source.iterdir() if source.exists() else ():
                shutil.copy(path, CORPUS / job.corpus)
    mark.write_text(version)


def _build() -> None:
    spec = importlib.util.find_spec("executorch")
    assert spec is not None and spec.submodule_search_locations
    package = Path(next(iter(spec.submodule_search_locations)), "share", "cmake")
    say("Building the native fuzzers ...")
    configure = [
        "cmake", "-S", ROOT / "runtime_bindings", "-B", NATIVE, "-G", "Ninja", f"-Dexecutorch_DIR={package}",
        "-DBLOBSTORE_TESTS=ON", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCMAKE_CXX_COMPILER=clang++",
        f"-DBLOBSTORE_SANITIZE={SANITIZERS}", "-DCMAKE_UNITY_BUILD=ON",
        "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1",  # as for the other tests, compiling is most of the work
    ]  # fmt: skip
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([str(part) for part in configure], check=True, stdout=subprocess.DEVNULL, env=environment)
    targets = [job.native for job in JOBS if job.native]
    command = ["cmake", "--build", NATIVE, "--target", *targets]
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL, env=environment)


def _run(job: Job, seconds: int, folder: str) -> str:
    """Run one fuzzer and return a line about it."""
    found = FOUND / job.corpus
    found.mkdir(parents=True, exist_ok=True)
    command = (
        [NATIVE / "tests" / job.native] if job.native else [sys.executable, "-m", "campaigns.fuzz.coverage", job.corpus]
    )
    limits = ["-timeout=10", "-rss_limit_mb=2048", f"-malloc_limit_mb={300 if job.native else 2048}"]
    command += [f"-max_total_time={seconds}", f"-max_len={LONGEST}", *limits]
    command += [f"-artifact_prefix={found}/{'native' if job.native else 'python'}-", "-print_final_stats=1"]
    log = BUILD / f"{job.corpus}-{job.native or 'python'}.log"
    environment = {
        **os.environ,
        **OPTIONS,
        "BLOBSTORE_FUZZ_DATA": str(BUILD / "seeds" / "work" / "slim" / "shared.ptd"),
        "BLOBSTORE_FUZZ_COPY": str(ROOT / "tests" / "data" / "golden.ptd"),
        "TMPDIR": folder,
    }
    with log.open("w") as output:
        process = subprocess.run(
            [str(part) for part in (*command, CORPUS / job.corpus)],
            stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, check=False,
        )  # fmt: skip
    text = log.read_text(errors="replace")
    runs = re.search(r"stat::number_of_executed_units:\s*(\d+)", text) or re.search(r"Done (\d+) runs", text)
    covered = re.findall(r"cov: (\d+)", text)
    outcome = "" if process.returncode == 0 else f", ended with {process.returncode}: {log}"
    if process.returncode and not list(found.glob("*")):
        (found / "no-input").write_bytes(b"")
        outcome = f", did not run: {text[-600:]}"
    count = int(runs[1]) if runs else 0
    return f"{job.name:22} {count:10,} inputs in {seconds} s, {covered[-1] if covered else '?'} branches{outcome}"


def _try_again() -> int:
    """Keep what is still a finding without instrumentation, or in native code with its sanitizers; return the number."""
    from campaigns.fuzz.replay import minimize, replay

    findings = 0
    contents = {(path.parent.name, path.read_bytes()): path for path in sorted(FOUND.rglob("*")) if path.is_file()}
    for (target, data), path in contents.items():
        reason, smaller = replay(target, data), data
        if reason:
            smaller = minimize(target, data)
        elif path.name.startswith(("native-", "no-input")):
            reason = "a sanitizer or a limit ended the native fuzzer"
        else:
            path.unlink()  # slow only under instrumentation
            continue
        findings += 1
        kept = path.with_name("kept-" + hashlib.sha256(smaller).hexdigest()[:12])
        path.unlink()
        kept.write_bytes(smaller)
        say(f"FINDING {target}: {reason}\n    {kept}\n    to keep it: mv it to tests/data/found/{target}/")
    return findings


if __name__ == "__main__":
    main()
