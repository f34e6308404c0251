"""Valid files to begin with: `python -m campaigns.fuzz.seeds FOLDER`."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import zstandard

import blobstore
from blobstore import BlobStore, open_ptd, save_file
from blobstore.adapters import save_adapter
from blobstore.core.codec.blobs import encode
from blobstore.core.constants import RECORDS_IDENTIFIER
from blobstore.core.disk.journal import Journal, Move, identity
from blobstore.core.formats.keys import KEY_PREFIX
from blobstore.core.formats.payload import MAGIC as PAYLOAD_MAGIC
from blobstore.core.formats.payload import split, wrap
from blobstore.core.formats.pte.program import read_program
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.tools.convert import convert
from blobstore.releases import publish, push
from blobstore.reporting import report
from blobstore.reporting.json_output import to_json
from blobstore.runtime import BlobCache, Program
from blobstore.training import TrainingProgram, lower_training
from campaigns.fuzz import adapters, chunks, disk, releases
from campaigns.fuzz.answers import ANSWER, KEPT, KIND
from campaigns.lowered import Learner, lower_embedded, lower_network
from tests.core.formats.pte import oracle
from tests.helpers import models
from tests.releases.server import registry_of
from tests.runtime.test_packed import KINDS

ROOT = Path(__file__).parents[2]


def main() -> None:
    folder = Path(sys.argv[1])
    for target, name, data in _make(folder):
        place = folder / target
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)


def _make(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    for path in _data_files(work):
        yield "ptd", path.name, path.read_bytes()
        yield "report", path.name, path.read_bytes()
    for path in _programs(work):
        yield "pte", path.name, path.read_bytes()
        yield "report", path.name, path.read_bytes()
    yield from _delegates(work)
    yield from _packed_files(work)
    convert(work / "types.ptd", work / "types.safetensors")
    yield "safetensors", "types", (work / "types.safetensors").read_bytes()
    yield "report", "types.safetensors", (work / "types.safetensors").read_bytes()
    yield "checkpoint", "adam", _checkpoint_list(work)
    yield from releases_of(work)
    yield from chunks_of()
    yield from interrupted(work)
    yield from adapters_of(work)
    yield "baseline", "reports", json.dumps(to_json(report([work / "slim"]))).encode()


def _data_files(work: Path) -> Iterator[Path]:
    store = BlobStore()
    store.write_ptd(work / "empty.ptd")
    save_file({"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, work / "one.ptd", metadata={"step": "1"})
    tensors = {"float": np.ones((2, 1), np.float32), "long": np.arange(3), "bool": np.ones(2, bool)}
    save_file({**tensors, "scalar": np.float32(1), "none": np.ones((0, 2), np.float32)}, work / "types.ptd")
    store.add("opaque", b"some bytes", alignment=4096)
    store.add("tied", np.ones(3, np.float32))
    store.add("tied too", np.ones(3, np.float32), alignment=64)
    layout = TensorLayout(ScalarType.FLOAT, (1, 2, 2, 1), (0, 2, 3, 1))
    store.add("last", np.ones(4, np.float32).tobytes(), layout=layout)
    store.write_ptd(work / "mixed.ptd", metadata={"a": "b", "c": ""})
    foreign = [("w", bytes(24), TensorLayout(ScalarType.FLOAT, (2, 3), (0, 1))), ("opaque", b"bytes", None)]
    oracle.write_ptd(work / "executorch.ptd", foreign)
    halves = {"m.lora_a": np.ones((1, 3), np.float32), "m.lora_b": np.ones((2, 1), np.float32)}
    save_adapter(work / "adapter.ptd", halves, foundation=work / "one.ptd", scale=0.5)
    yield from (
        work / name for name in ("empty.ptd", "one.ptd", "adapter.ptd", "types.ptd", "mixed.ptd", "executorch.ptd")
    )
    yield ROOT / "tests" / "data" / "golden.ptd"


def _programs(work: Path) -> Iterator[Path]:
    programs = {
        "mlp": models.mlp(),
        "mlp-external": models.mlp(external=True),
        "mlp-delegated": models.mlp(delegated=True),
        "counter": models.counter(),
        "channels-last": models.channels_last(),
    }
    for name, lowered in programs.items():
        yield lowered.write(work / name, name)
    everything = work / "everything.pte"
    everything.write_bytes(oracle.one_of_everything())
    yield everything
    inline = work / "inline.pte"
    inline.write_bytes(oracle.with_inline_data(models.channels_last().pte))
    yield inline
    lower_embedded(work / "embedded.pte", 1)
    blobstore.dedup_programs([work / "embedded.pte"], work / "slim")
    yield work / "slim" / "embedded.pte"


def _delegates(work: Path) -> Iterator[tuple[str, str, bytes]]:
    program = read_program(lower_network(work, "delegated", 1, delegated=True))
    whole = program.path.read_bytes()
    for number, delegate in enumerate(program.delegates):
        data = whole[delegate.span.start : delegate.span.start + delegate.span.size]
        end = data.rfind(PAYLOAD_MAGIC) + len(PAYLOAD_MAGIC)
        yield "payload", str(number), data[:end]
        inner, name, constants = split(data[:end])
        cut = replace(constants[0], nbytes=8, places=(), holes=(0, len(inner) // 2))
        yield "payload", f"{number}-holes", wrap(inner, name, [cut])
    yield "pte", "network-delegated", whole
    with open_ptd(work / "delegated.ptd") as data_map:
        for key, blob in data_map.views():
            if key.startswith(KEY_PREFIX) and bytes(blob[4:8]) == RECORDS_IDENTIFIER:
                yield "records", key[-8:], bytes(blob)


def _packed_files(work: Path) -> Iterator[tuple[str, str, bytes]]:
    for kind in ("linear", "dynamic int8"):
        folder = work / kind
        KINDS[kind](folder)
        Program(folder / "model.pte", BlobCache(folder / "model.ptd", packed=folder)).method()
        [path] = folder.glob("*.packed")
        yield "packed", kind, path.read_bytes()


def _checkpoint_list(work: Path) -> bytes:
    batch = (torch.ones(2, 3), torch.tensor([0, 1]))
    blobstore.save_programs({"train": lower_training(Learner(3), batch, tag="learner")}, work / "training")
    training = TrainingProgram(work / "training" / "train.pte", BlobCache(work / "training" / "learner.ptd"))
    optimizer = torch.optim.Adam(training.named_parameters().values())
    training.step(optimizer, *batch)
    training.save(work / "checkpoint.ptd", optimizer)
    with open_ptd(work / "checkpoint.ptd") as data_map:
        lists = [bytes(blob) for _, blob in data_map.views() if bytes(blob).startswith(b'{"format"')]
    return lists[0]


def releases_of(work: Path) -> Iterator[tuple[str, str, bytes]]:
    root, given = work / "www", work / "release"
    (given / "tokenizer").mkdir(parents=True)
    for name in ("1.json", "2.json", "empty"):
        (given / "tokenizer" / name).write_text("" if name == "empty" else f"{{{name}}}" * 9)
    tensors = releases.release_weights()
    save_file(tensors, given / "weights.ptd")
    publish([given], root, name="fuzz", version="1")
    save_file({**tensors, "second": tensors["second"] + np.float32(1)}, given / "weights.ptd")
    publish([given], root, name="fuzz", version="2")
    for path in sorted(root.glob("fuzz/*/index.json")):
        yield "index", path.parent.name, path.read_bytes()
        parts = json.loads(path.read_bytes())["parts"][0]
        yield "parts", path.parent.name, (root / "files" / parts).read_bytes()
    _, published = releases.published()
    framed = (published / "www/fuzz/2/ways.json.zst").read_bytes()
    yield "ways", "2", zstandard.ZstdDecompressor().decompress(framed)
    yield "ways", "framed", framed
    blob = np.nextafter(tensors["second"], np.float32(np.inf)).tobytes()[: releases.ENCODED_SIZE]
    for number, encoding in enumerate(releases.ENCODINGS):
        base = memoryview(releases.ENCODED_BASE[: len(blob)]) if encoding.startswith("near") else None
        pieces = encode(memoryview(blob), encoding, base)
        yield "encoded", encoding.replace(":", "-"), bytes([number, *b"".join(pieces)])
    pinned, answers = releases.answers_in(published / "www", "http://{host}/fuzz/1/index.json", work / "device")
    web = f"http://{{host}}/fuzz/1/index.json@sha256:{pinned}".encode() + KIND
    yield "http", "web", web + ANSWER.join(answers)
    yield "http", "kept", web + ANSWER.join(KEPT + one.replace(releases.CLOSES, b"", 1) for one in answers)
    push(f"oci:{work / 'layout'}:1", published / "www/fuzz/1")
    name = registry_of(work / "registry", work / "layout")
    _, answers = releases.answers_in(work / "registry", f"{{host}}/{name}", work / "other")
    challenge = 'WWW-Authenticate: Bearer realm="http://127.0.0.1:{port}/token",service="s",scope="pull"\r\n'
    login = [releases.ok(b"", "401 Unauthorized", challenge), releases.ok(b'{"token":"abcd"}')]
    yield "http", "registry", f"{{host}}/{name}".encode() + KIND + ANSWER.join([*login, *answers])


def chunks_of() -> Iterator[tuple[str, str, bytes]]:
    base = memoryview(chunks.BASE)
    data = np.frombuffer(chunks.BASE, np.uint8).copy()
    data[::9] += np.uint8(1)
    data[::70] += np.uint8(100)
    for number, encoding in enumerate(chunks.ENCODINGS):
        stored = b"".join(encode(memoryview(data.tobytes()), encoding, base))
        yield "chunk", encoding.replace(":", "-"), bytes([number]) + stored[4:]


def interrupted(work: Path) -> Iterator[tuple[str, str, bytes]]:
    folder = work / "group"
    stand_ins = disk.group(folder)
    here = folder / "here"
    moves = [
        Move(
            here / name,
            next((here / name).parent.glob(f"*{number:024x}.tmp")),
            (here / name).with_name(f".blobstore-{number + 8:024x}.tmp"),
            identity(here / name),
            identity((here / name).with_name(f".blobstore-{number:024x}.tmp")),
        )
        for number, name in enumerate(disk.GROUP)
    ]
    for name, count in (("group", 3), ("pair", 2)):
        text = json.dumps(json.loads(Journal(moves[:count], [here, here / "sub"]).text(here)))
        for mark, known in stand_ins.items():
            text = text.replace(known, f'"{mark}"')
        yield "journal", name, text.encode()
    yield from disk.commit_seeds()


def adapters_of(work: Path) -> Iterator[tuple[str, str, bytes]]:
    _, base, own = adapters.foundation()
    yield "adapter", "own", own.read_bytes()
    save_adapter(work / "half.ptd", adapters.halves(-1), foundation=base, scale=2)
    yield "adapter", "other", (work / "half.ptd").read_bytes()
    config = {
        "peft_type": "LORA",
        "r": 1,
        "lora_alpha": 2,
        "target_modules": ["m"],
        "bias": "none",
        "use_rslora": False,
    }
    prefix = "base_model.model.m.lora_"
    tensors = {f"{prefix}A.weight": ["F32", [1, 3]], f"{prefix}B.weight": ["F32", [2, 1]]}
    yield "peft", "one", json.dumps({"config": config, "tensors": tensors}).encode()
    patterns = {**config, "rank_pattern": {"m": 1}, "alpha_pattern": {"m": 4.0}}
    yield "peft", "patterns", json.dumps({"config": patterns, "tensors": tensors}).encode()


if __name__ == "__main__":
    main()
