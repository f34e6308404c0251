"""Names of Hugging Face's Hub, whose files lie in the cache that `huggingface_hub` itself laid out (L2)."""

from __future__ import annotations

import builtins
import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore.adapters import import_peft, load_adapter, load_adapters, read_adapter
from blobstore.errors import FileAccessError
from tests.adapters.caches import X, eager, open_lora
from tests.adapters.nets import RANK, SCALE, adapter_of, write_peft

COMMITS = {"main": "1" * 40, "v2": "2" * 40}
FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache with two revisions of `ann/polite`, downloaded from a server of this process, which is gone then."""
    import huggingface_hub

    folders = {COMMITS[name]: write_peft(tmp_path / name, adapter_of(seed)) for seed, name in enumerate(COMMITS, 1)}
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            *_, revision, name = self.path.split("/")
            commit = COMMITS.get(revision, revision)
            data = (folders[commit] / name).read_bytes()
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        for revision in COMMITS:
            for name in FILES:
                huggingface_hub.hf_hub_download(
                    "ann/polite", name, revision=revision, endpoint=f"http://127.0.0.1:{server.server_port}"
                )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    return


def test_names_of_the_hub(hub: None, lora: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported and loaded from the cache, without a network; a folder of this name comes first."""
    monkeypatch.chdir(tmp_path)
    import_peft("ann/polite", tmp_path / "a.ptd", foundation=lora.foundation)
    expected = adapter_of(1)
    assert all(torch.equal(torch.tensor(t), expected[n]) for n, t in read_adapter(tmp_path / "a.ptd").tensors.items())
    cache, method = open_lora(lora)
    load_adapter(cache, "ann/polite", program_scale=SCALE)
    assert torch.allclose(method(*X), eager(1), atol=1e-5)
    load_adapters(cache, [("ann/polite@v2", 1.0)], program_scale=SCALE)
    assert torch.allclose(method(*X), eager(2), atol=1e-5)
    write_peft(tmp_path / "ann/polite", adapter_of(3, rank=RANK))
    load_adapter(cache, "ann/polite", program_scale=SCALE)
    assert torch.allclose(method(*X), eager(3), atol=1e-5)


def test_names_that_are_not_in_the_cache(hub: None, lora: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message says how to fetch them, and errno that there is no such file."""
    cache, _ = open_lora(lora)
    for name, message in (
        ("ann/rude", r"ann/rude: No such file .*`hf download ann/rude`"),
        ("ann/polite@v3", "`hf download ann/polite --revision v3`"),
        ("ann/polite..name", r"`hf download"),
        ("ann/none.ptd", "No such file or directory$"),
        ("a/b/c", "No such file or directory$"),
    ):
        with pytest.raises(FileAccessError, match=message) as error:
            load_adapter(cache, name, program_scale=SCALE)
        assert error.value.errno == 2
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "huggingface_hub":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FileAccessError, match="install huggingface_hub"):
        load_adapter(cache, "ann/polite", program_scale=SCALE)
