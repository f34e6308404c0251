"""What a release leaves behind: files that later versions read, and the names that its users write.

    python -m tests.core.golden

writes `tests/data/<major>.<minor>` before the first release of a minor version, and never again after it.
`tests/core/test_golden.py` reads the folders of all releases.
"""

import contextlib
import importlib
import inspect
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"


def modules() -> list[str]:
    """The public modules: those of the first page of the reference."""
    page = (ROOT / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    return [name for row in re.findall(r"^\| (\[.*?\]\(\w+\.md\)) \|", page, re.MULTILINE) for name in named(row)]


def named(row: str) -> list[str]:
    return re.findall(r"`(blobstore[.\w]*)`", row)


def python_names() -> dict[str, dict[str, list[str]]]:
    """For each public module its names and theirs, with the parameters of what can be called."""
    result = {}
    for module in modules():
        found = importlib.import_module(module)
        names = {name: getattr(found, name) for name in found.__all__}
        result[module] = {
            full: parameters(value)
            for name, value in names.items()
            for full, value in [(name, value), *members(name, value)]
        }
    return result


def members(name: str, value: object) -> Iterator[tuple[str, object]]:
    """The public members of a class of this project; properties and fields too."""
    if not inspect.isclass(value):
        return
    for kind in value.__mro__:
        if kind.__module__.split(".")[0] == "blobstore":
            for key in [*vars(kind), *vars(kind).get("__annotations__", ())]:
                if not key.startswith("_"):
                    yield f"{name}.{key}", getattr(value, key, None)


def parameters(value: object) -> list[str]:
    """Parameters in order: `name`, `name=` with a default, `*` before those that are given by name alone."""
    if not callable(value):
        return []
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # of a class whose metaclass hides it
        return []
    result: list[str] = []
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in result:
            result.append("*")
        if one.kind in {one.VAR_POSITIONAL, one.VAR_KEYWORD}:
            result.append("*" if one.kind is one.VAR_POSITIONAL else "**")
        elif one.name != "self":
            result.append(one.name + ("" if one.default is one.empty else "="))
    return result


def commands() -> dict[str, list[str]]:
    """For each command, also those in groups, its arguments and options."""
    import typer.main

    from blobstore.cli.app import app

    def walk(name: str, command: Any) -> Iterator[tuple[str, list[str]]]:
        if hasattr(command, "list_commands"):
            for inner in command.list_commands(None):
                yield from walk(f"{name} {inner}", command.get_command(None, inner))
        own = [one for one in command.params if one.name != "help" and not getattr(one, "hidden", False)]
        yield name, [text for one in own for text in [*one.opts, *one.secondary_opts]]

    return dict(walk("blobstore", typer.main.get_command(app)))


def json_fields(folder: Path, device: Path) -> dict[str, list[str]]:
    """The fields that commands print with `--json` about the files of a folder; `device` is empty."""
    model = [str(folder / "model.pte"), str(folder / "model.ptd")]
    lines = {
        "inspect": ["inspect", *model],
        "verify": ["verify", *model],
        "diff": ["diff", str(folder / "model.ptd"), str(folder / "slim" / "shared.ptd")],
        "report": ["report", "--no-cache", *model],
        "pull": ["pull", str(folder / "release" / "model" / "1"), str(device)],
    }
    return {name: sorted(set(fields(json.loads(printed([*line, "--json"]))))) for name, line in lines.items()}


def printed(line: list[str]) -> str:
    """What a command prints."""
    from blobstore.cli.app import app

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        app(line)
    return out.getvalue()


def fields(value: Any, path: str = "") -> Iterator[str]:
    """The paths of all members of objects; those of the items of a list have `[]`."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{path}.{key}".lstrip(".")
            yield from fields(item, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from fields(item, f"{path}[]")


def headers() -> list[str]:
    return sorted(path.name for path in (ROOT / "runtime_bindings" / "include" / "blobstore").glob("*.h"))


def surface(folder: Path, device: Path) -> dict[str, Any]:
    """All that users may rely on by name, with the files of a folder as the example."""
    found = {"python": python_names(), "commands": commands(), "json": json_fields(folder, device)}
    return {**found, "headers": {"blobstore": headers()}}


def write_files(folder: Path) -> None:
    """One file of each kind, of a model whose numbers `tests/core/test_golden.py` knows."""
    import torch
    from torch import nn

    import blobstore
    from blobstore.adapters import save_adapter
    from blobstore.lowering import lower
    from blobstore.releases import publish
    from blobstore.runtime import BlobCache
    from blobstore.training import TrainingProgram, lower_training

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.layer(x), y)

    def linear() -> nn.Linear:
        layer = nn.Linear(4, 3)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(12).reshape(3, 4))
            layer.bias.copy_(torch.tensor([0.5, -1.0, 2.0]))
        return layer

    x = torch.ones(1, 4)
    blobstore.save_programs({"model": lower(linear().eval(), (x,), tag="model")}, folder)
    lower_old = lower(linear().eval(), (x,), partitioners=list)
    (folder / "whole.pte").write_bytes(lower_old.buffer)
    blobstore.dedup_programs([folder / "whole.pte"], folder / "slim")
    blobstore.save_programs({"train": lower_training(Loss(), (x, torch.zeros(1, 3)), tag="weights")}, folder)
    training = TrainingProgram(folder / "train.pte", BlobCache(folder / "weights.ptd"))
    optimizer = torch.optim.SGD(training.named_parameters().values(), lr=0.5, momentum=0.9)
    training.step(optimizer, x, torch.zeros(1, 3))
    training.save(folder / "checkpoint.ptd", optimizer)
    pair = {"lora_a": torch.ones(1, 4), "lora_b": torch.full((3, 1), 2.0)}
    save_adapter(
        folder / "adapter.ptd",
        {f"layer.{name}.weight": tensor for name, tensor in pair.items()},
        foundation=folder / "model.ptd",
        scale=2.0,
    )
    publish([folder / "model.pte", folder / "model.ptd"], folder / "release", name="model", version="1")
    for name in ("tables", "pool.json", "releases.json", "reserve"):  # which are for publishers, and have random names
        (shutil.rmtree if (folder / "release" / name).is_dir() else Path.unlink)(folder / "release" / name)
    os.chdir(folder)  # so that the report has paths that exist elsewhere, too
    Path("report.json").write_text(printed(["report", "whole.pte", "--no-cache", "--json"]), encoding="utf-8")


def main() -> None:
    from blobstore import __version__

    folder = DATA / ".".join(__version__.split(".")[:2])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_files(folder)
    with tempfile.TemporaryDirectory() as device:
        text = json.dumps(surface(folder, Path(device)), indent=1, sort_keys=True)
    (folder / "public.json").write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(f"{folder.relative_to(ROOT)}: {len(list(folder.iterdir()))} entries\n")


if __name__ == "__main__":
    main()
