"""Arguments of any type to the runtime, training and adapters lead to a result or a BlobStoreError."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import blobstore.adapters
import blobstore.runtime
import blobstore.runtime.tensors
import blobstore.training
from blobstore import runtime
from blobstore.runtime import BlobCache, Method, PackedStore, Program, Transaction
from blobstore.runtime.tensors import LogicalTensors, Updated
from blobstore.training import AdamW, MeZO, TrainingProgram
from tests.adapters import nets as adapter_nets
from tests.lowering.live import inputs
from tests.package.wrong_kinds import PublicCallable, check, public_callables
from tests.training import nets as training_nets

pytestmark = pytest.mark.long

RESULTS = {
    *("Adapter", "AdapterInfo", "AdaptersInfo", "FoundationInfo", "MergedAdapter", "NamedTensor", "Pair", "CacheStats"),
    *("DelegateStats", "LogicalTensor", "LogicalTensors", "Method", "PackedFile", "PackedStats", "Quantized"),
    *("Transaction", "ValueInfo"),
}
MODULES = (blobstore.runtime, blobstore.training, blobstore.adapters, blobstore.runtime.tensors)
INTERNAL = {  # methods of LogicalTensors for updates, which check their arguments first
    *("check_names", "check_reach", "check_stored", "commit", "copies", "mismatch", "names_for_state_dict", "update")
}
CALLABLES = [
    one
    for one in public_callables(*MODULES, results=RESULTS)
    if not (one.owner is LogicalTensors and one.name in INTERNAL)
    and not (one.owner is MeZO and one.name == "step")  # errors of the function that it calls go through
    and AdamW not in (one.owner, one.function)  # torch checks the arguments of its optimizers
    and Updated not in (one.owner, one.function)  # a number, which only the library makes
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A program with adapters on two files, one without on a third, a bound adapter, and a training program."""
    folder = tmp_path_factory.mktemp("files")
    module = adapter_nets.make(adapter_nets.LoraNet)
    adapter_nets.lower_lora(module, inputs(3, 16), folder, delegated=True)
    adapter_nets.lower_plain(adapter_nets.plain_of(module), inputs(3, 16), folder / "plain", delegated=False)
    for name in ("foundation", "plain/model"):
        file = folder / f"{name.replace('/', '-')}-adapter.ptd"
        blobstore.adapters.save_adapter(
            file, adapter_nets.adapter_of(1), foundation=folder / f"{name}.ptd", scale=adapter_nets.SCALE
        )
    runtime.make_working_copy(folder / "plain" / "model.ptd", folder / "working.ptd")
    peft = adapter_nets.write_peft(folder / "peft", adapter_nets.adapter_of(1))
    stock = adapter_nets.lower_stock(
        adapter_nets.with_adapter(module, adapter_nets.adapter_of(1)), inputs(3, 16), folder / "stock"
    )
    train = training_nets.xor(external=True)
    pte = train.write(folder / "train")
    data = next(pte.parent.glob("*.ptd"))
    training = TrainingProgram(pte, data=data)
    training.save(folder / "checkpoint.ptd", torch.optim.SGD(training.named_parameters().values(), lr=0.1))
    return SimpleNamespace(
        folder=folder,
        pte=folder / "model.pte",
        train=pte,
        train_data=data,
        batch=train.batches[0],
        peft=peft,
        stock=stock,
    )


def makers(files: Any, tmp_path: Path) -> dict[str, Any]:
    folder = files.folder
    foundation, adapter, plain = folder / "foundation.ptd", folder / "adapter.ptd", folder / "plain" / "model.ptd"
    weight = "l.0.weight"

    def cache() -> BlobCache:
        return BlobCache([foundation, adapter])

    def loaded() -> BlobCache:
        made = cache()
        blobstore.adapters.load_adapter(made, folder / "foundation-adapter.ptd")
        return made

    def loaded_several() -> BlobCache:
        made = cache()
        blobstore.adapters.load_adapters(made, [folder / "foundation-adapter.ptd"])
        return made

    def method() -> Method:
        return Program(files.pte, cache()).method()

    def training() -> TrainingProgram:
        return TrainingProgram(files.train, data=files.train_data)

    class NoSteps:
        def step(self, gradients: Any) -> None:
            pass

    return {
        # objects
        "BlobCache": lambda: BlobCache(plain),
        "Transaction": lambda: Transaction(BlobCache(plain)),
        "Method": method,
        "Program": lambda: Program(files.pte, cache()),
        "TrainingProgram": training,
        "MeZO": lambda: MeZO(BlobCache(plain)),
        "Adapter": lambda: blobstore.adapters.read_adapter(folder / "foundation-adapter.ptd"),
        "AdapterTags": blobstore.adapters.AdapterTags,
        "MergedAdapter": lambda: blobstore.adapters.merge_adapter(BlobCache(plain), folder / "plain-model-adapter.ptd"),
        "LogicalTensors": lambda: cache().tensors,
        "PackedStore": lambda: PackedStore(tmp_path / "packed"),
        # arguments
        "folder": lambda: tmp_path / "packed",
        "limit": lambda: 1 << 20,
        "read_ahead": lambda: 1 << 20,
        "packed": lambda: None,
        "BlobCache.paths": lambda: folder / "working.ptd",
        "base": lambda: (),
        "BlobCache.base": lambda: None,
        "key": lambda: weight,
        "LogicalTensors.__getitem__.name": lambda: "l.0.base.weight",
        "LogicalTensors.__contains__.name": lambda: "l.0.base.weight",
        "LogicalTensors.value.name": lambda: "l.0.base.weight",
        "Transaction.data": lambda: torch.zeros(24, 16),
        "Transaction.__setitem__.data": lambda: torch.zeros(24, 16),
        "BlobCache.get_key.index": lambda: 0,
        "BlobCache.load_data_into.buffer": lambda: bytearray(24 * 16 * 4),
        "blobs": lambda: {weight: torch.zeros(24, 16)},
        "BlobCache.update_blobs.blobs": lambda: {weight: bytes(24 * 16 * 4)},
        "tensors": lambda: adapter_nets.make(adapter_nets.PlainNet, 1).state_dict(),
        "BlobCache.load.path": lambda: plain,
        "path": lambda: tmp_path / "out.ptd",
        "paths": lambda: [foundation, adapter],
        "target": lambda: tmp_path / "target.ptd",
        "Program.path": lambda: files.pte,
        "Program.cache": cache,
        "cache": lambda: BlobCache(plain),
        "method": lambda: "forward",
        "name": lambda: "forward",
        "__getitem__.name": lambda: "forward",
        "BlobCache.__getitem__.name": lambda: weight,
        "Method.__call__.inputs": lambda: inputs(3, 16),
        "Method.execute.inputs": lambda: inputs(3, 16),
        "Method.call_first.count": lambda: 1,
        "Method.call_first.inputs": lambda: inputs(3, 16),
        "Method.output_memory.index": lambda: 0,
        "pte": lambda: files.train,
        "TrainingProgram.data": lambda: files.train_data,
        "TrainingProgram.cache": lambda: None,
        "TrainingProgram.publish.cache": lambda: None,
        "TrainingProgram.load.path": lambda: folder / "checkpoint.ptd",
        "lr": lambda: 0.5,
        "eps": lambda: 0.5,
        "seed": lambda: 1,
        "MeZO.names": lambda: [weight],
        "TrainingProgram.step.optimizer": NoSteps,
        "TrainingProgram.step.inputs": lambda: files.batch,
        "TrainingProgram.forward_backward.inputs": lambda: files.batch,
        "lower_training.module": lambda: training_nets.seeded(training_nets.XOR),
        "lower_training.inputs": lambda: files.batch,
        "read_adapter.path": lambda: adapter,
        "load_adapter.cache": cache,
        "load_adapter.path": lambda: folder / "foundation-adapter.ptd",
        "load_adapters.cache": cache,
        "load_adapters.adapters": lambda: [folder / "foundation-adapter.ptd"],
        "combine_adapters.adapters": lambda: [folder / "foundation-adapter.ptd"],
        "combine_adapters.target": lambda: folder / "combined.ptd",
        "combine_adapters.foundation": lambda: foundation,
        "combine_adapters.like": lambda: None,
        "load_adapters.program_scale": lambda: None,
        "set_adapter_strengths.cache": loaded_several,
        "set_adapter_strengths.strengths": lambda: [0.5],
        "set_adapter_strength.cache": loaded,
        "set_adapter_strength.strength": lambda: 0.5,
        "merge_adapter.adapter": lambda: folder / "plain-model-adapter.ptd",
        "Adapter.value.name": lambda: "l.0.lora_a.weight",
        "AdapterTags.__call__.tensor": lambda: "l.0.weight",
        "save_adapter.tensors": lambda: adapter_nets.adapter_of(1),
        "foundation": lambda: foundation,
        "AdapterTags.foundation": lambda: "foundation",
        "adapters": lambda: [adapter],
        "scale": lambda: 1.5,
        "bind_adapter.source": lambda: adapter,
        "import_peft.source": lambda: files.peft,
        "import_peft.foundation": lambda: foundation,
        "import_peft.like": lambda: None,
        "import_peft.params": lambda: None,
        "import_peft.names": lambda: {"l.0": "l.0"},
        "export_peft.source": lambda: folder / "foundation-adapter.ptd",
        "export_peft.directory": lambda: tmp_path / "exported",
        "export_peft.params": lambda: {"dim": 16, "n_heads": 4},
        "import_for_program.source": lambda: files.peft,
        "import_for_program.program": lambda: files.stock,
        "import_for_program.exported_with": lambda: files.peft,
        "import_for_program.params": lambda: None,
    }


@pytest.mark.slow_for("lower_training")
@pytest.mark.parametrize("one", CALLABLES, ids=str)
def test_every_wrong_kind_of_argument(
    one: PublicCallable, files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every public function and method, with every wrong type for each argument."""
    monkeypatch.chdir(tmp_path)
    check(one, makers(files, tmp_path), tmp_path)
