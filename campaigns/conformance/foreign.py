"""Runs with another version of ExecuTorch, without blobstore: writes files for it, or reports what it reads in its files.

    python -m campaigns.conformance.foreign write FOLDER
    python -m campaigns.conformance.foreign read FOLDER

The report is JSON in the last line of the output.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from campaigns.lowered import BATCH, Network

VALUE = 3  # of the weights


def write(folder: Path) -> None:
    """Write programs with their weights inside and outside, for the portable kernels and XNNPACK, and a data file."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir._serialize._named_data_store import NamedDataStore
    from executorch.exir._serialize.data_serializer import DataPayload
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

    exported = torch.export.export(Network(VALUE).eval(), BATCH)
    for name, partitioners, external in (
        ("embedded", [], False),
        ("external", [], True),
        ("delegated", [XnnpackPartitioner()], False),
    ):
        manager = to_edge_transform_and_lower(exported, partitioner=partitioners).to_executorch(
            ExecutorchBackendConfig(external_constants=external)
        )
        with (folder / f"{name}.pte").open("wb") as file:
            manager.write_to_file(file)
        if external:
            manager.write_tensor_data_to_file(str(folder))
    store = NamedDataStore()
    store.add_named_data("opaque", b"some bytes", 64, "x")
    store.add_named_data("again", b"some bytes", 16, "x")
    output = store.get_named_data_store_output()
    payload = DataPayload(output.buffers, output.external_data["x"])
    (folder / "opaque.ptd").write_bytes(bytes(FlatTensorSerializer().serialize(payload)))


def read(folder: Path) -> dict[str, Any]:
    """The contents of `ours.ptd`, and the outputs of the programs in `slim`, or why they cannot run."""
    from executorch.exir._serialize._cord import Cord
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

    payload = FlatTensorSerializer().deserialize(Cord((folder / "ours.ptd").read_bytes()))
    found: dict[str, Any] = {}
    for key, entry in payload.named_data.items():
        data, layout = payload.buffers[entry.buffer_index], entry.tensor_layout
        shape = layout and [int(layout.scalar_type), list(layout.sizes), [int(d) for d in layout.dim_order]]
        found[key] = [hashlib.sha256(bytes(data)).hexdigest(), shape]
    result: dict[str, Any] = {"keys": found}
    try:
        from executorch.extension.pybindings import portable_lib as runtime
    except ImportError as error:
        result["no runtime"] = str(error)[:150]
        return result
    outputs = {}
    for path in sorted((folder / "slim").glob("*.pte")):
        program = runtime._load_for_executorch(str(path), str(folder / "slim" / "shared.ptd"))
        outputs[path.name] = sorted(set(program.run_method("forward", BATCH)[0].flatten().tolist()))
    result["outputs"] = outputs
    return result


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        sys.stdout.write("\n" + json.dumps(read(Path(sys.argv[2]))) + "\n")
