"""Requests with adapters in Java: each text is that of eager PyTorch with these weights (L3, N1)."""

import subprocess
from pathlib import Path

import pytest

from tests.helpers import native_build
from tests.llm.letters import eager
from tests.runtime.application import build_java

pytestmark = pytest.mark.slow


def test_requests(exported: Path) -> None:
    """All checks of the class `Requests` pass, under those of JNI."""
    jars = ("blobstore.jar", "blobstore_java_tests.jar")
    command = native_build.java(build_java(), "-Xcheck:jni", jars=jars)
    done = subprocess.run(
        [*command, "dev.blobstore.Requests", str(exported)],
        env=native_build.ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("WARNING", "FATAL", "JNI"):
        assert word not in done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len([line for line in lines if line[:1] == ["ok"]]) == 6
    texts = [line[1:] for line in lines if line[:1] == ["text"]]
    assert len(texts) == 20
    for adapter, strength, prompt, answer in texts:
        assert answer == eager(prompt, None if adapter == "-" else adapter, float(strength))
