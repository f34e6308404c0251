"""Torch tensors and whole models in a .ptd: the calls of `safetensors.torch`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.core import files
from blobstore.core.errors import CheckpointError, UnsupportedDataError
from blobstore.core.formats.keys import prefix_apart
from blobstore.core.requirements import needed
from blobstore.core.tensor_file import Device, TensorFile, safe_open
from blobstore.core.text import quoted

if TYPE_CHECKING:
    import torch

_MOST = 20
"""The most names in a message."""

__all__ = ["load", "load_file", "load_model", "save", "save_file", "save_model"]


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    force: bool = False,
) -> None:
    """`blobstore.save_file`; tensors on another device are copied to the CPU first.

    Args:
        tensors: by name, of any order of dimensions; equal ones are stored once, tied ones included.
        filename: the .ptd; one that is there is replaced once the new one is complete.
        metadata: free text to keep with the file.
        force: replace a file of any format.

    Raises:
        As `blobstore.save_file`.
    """
    files.save_file(_on_cpu(tensors), filename, metadata, force=force)


def save(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of the file that `save_file` would write.

    Raises:
        As `save_file`, but for what the disk can refuse.
    """
    return files.save(_on_cpu(tensors), metadata)


def load_file(
    filename: str | os.PathLike[str], device: Device = "cpu", *, tied: bool = False
) -> dict[str, torch.Tensor]:
    """`blobstore.load_file` as torch tensors: private to this process, and each with memory of its own.

    Args:
        filename: a .ptd; a .safetensors and a .pte are taken, too.
        device: where the tensors are put, as torch takes it.
        tied: whether writing to one of the names that share a blob writes to all of them.

    Raises:
        As `blobstore.load_file`.
    """
    return files.load_file(filename, "pt", device, tied=tied)


def load(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a .ptd in memory as torch tensors, which are copies.

    Raises:
        As `blobstore.core.files.load`.
    """
    return files.load(data, "pt")


def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
) -> None:
    """Save the state dict of a model. Tied weights are there under all of their names, and stored once.

    Args:
        model: its `state_dict()` is saved; so what is not persistent is not.
        filename: the .ptd; one that is there is replaced once the new one is complete.
        metadata: free text to keep with the file.
        force_contiguous: store all tensors in the plain order of dimensions; else each in its own, such as
            channels-last, which spares a copy.

    Raises:
        UnsupportedDataError: `model` is not a module, or its state dict has something that is not a tensor.
        As `save_file`.
    """
    state = _on_cpu(_module(model).state_dict())
    if force_contiguous:
        state = {name: value.contiguous() if hasattr(value, "contiguous") else value for name, value in state.items()}
    files.save_file(state, filename, metadata)


def load_model(
    model: torch.nn.Module, filename: str | os.PathLike[str], strict: bool = True, device: Device = "cpu"
) -> tuple[list[str], list[str]]:
    """Copy the tensors of a file into a model.

    A name that is tied in the model to one that the file has is not missing. Shapes, and with `strict` names, are
    compared before anything is copied; dtypes are converted, as `load_state_dict` does.

    Args:
        model: what to load into. Its tensors keep their memory, device and dtype.
        filename: what `save_model` wrote; any .ptd, .safetensors or .pte with the model's names.
        strict: whether names that are missing or unexpected are an error.
        device: where the tensors of the file are put on their way.

    Returns:
        The names of the model that the file has not, and those of the file that the model has not or that contradict
        another name of the same tensor; sorted.

    Raises:
        CheckpointError: a tensor has another shape; with `strict`, names are missing or unexpected. The model is as it
            was. Or torch refuses a tensor; then others may be loaded.
        UnsupportedDataError: `model` is not a module.
        As `load_file`.
    """
    own = _module(model).state_dict(keep_vars=True)
    with safe_open(filename, "pt", device) as file:
        names = file.keys()
        _check_shapes(file, own, names)
        groups = _tied(own)
        surplus = _contradicting(file, groups, names)
        wanted = [name for name in names if name not in surplus]
        known = {name for group in groups if not group.isdisjoint(wanted) for name in group}
        missing = sorted(own.keys() - known)
        unexpected = sorted(surplus | (set(names) - own.keys()))
        if strict and (missing or unexpected):
            raise _not_these(file.path, model, missing, unexpected)
        tensors = {name: file.get_tensor(name) for name in wanted if name in own}
        try:
            model.load_state_dict(tensors, strict=False)
        except RuntimeError as error:
            raise CheckpointError(f"{file.path}: {error}") from error
    return missing, unexpected


def _not_these(path: Path, model: torch.nn.Module, missing: list[str], unexpected: list[str]) -> CheckpointError:
    """The error for names that differ: in a line if all have a prefix, otherwise with the first of them."""
    both = (("missing", missing), ("unexpected", unexpected))
    reason = prefix_apart(unexpected, missing, given_in="the file", known_in="the model") or "; ".join(
        f"{what} {quoted(some, most=_MOST)}" for what, some in both if some
    )
    return CheckpointError(f"{path}: not the weights of this {type(model).__name__}: {reason}")


def _module(model: Any) -> torch.nn.Module:
    with needed("models need torch", "executorch"):
        import torch
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedDataError(f"expected a torch.nn.Module, found a {type(model).__qualname__}")
    return model


def _on_cpu(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """What lies on an accelerator as a copy on the CPU; a meta tensor has no bytes anywhere, and stays."""
    if not isinstance(tensors, Mapping):
        return tensors  # for `save_file` to refuse
    devices = {name: getattr(getattr(value, "device", None), "type", "cpu") for name, value in tensors.items()}
    return {
        name: value if devices[name] in {"cpu", "meta"} else value.detach().cpu() for name, value in tensors.items()
    }


def _check_shapes(file: TensorFile[torch.Tensor], own: Mapping[str, Any], names: list[str]) -> None:
    import torch

    wrong = [
        f"{name!r} is {file.shape(name)} in the file and {list(own[name].shape)} in the model"
        for name in names
        if isinstance(own.get(name), torch.Tensor)
        and not torch.nn.parameter.is_lazy(own[name])
        and list(own[name].shape) != file.shape(name)
    ]
    if wrong:
        raise CheckpointError(f"{file.path}: {'; '.join(wrong)}")


def _tied(own: Mapping[str, Any]) -> list[set[str]]:
    """The names of a model's state, those of one tensor together."""
    import torch

    groups: dict[Any, set[str]] = {}
    for name, value in own.items():
        identity: Any = id(value)
        plain = isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value) and not value.is_meta
        if plain and value.layout is torch.strided and value.numel():
            identity = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        groups.setdefault(identity, set()).add(name)
    return list(groups.values())


def _contradicting(file: TensorFile[torch.Tensor], groups: list[set[str]], names: list[str]) -> set[str]:
    """Names of tensors that the file has with other contents than under an earlier name of the same tensor."""
    order = {name: number for number, name in enumerate(names)}
    contradicting: set[str] = set()
    for group in groups:
        there = sorted(group & order.keys(), key=order.__getitem__)
        contradicting.update(name for name in there[1:] if not file.equal(there[0], name))
    return contradicting


def __dir__() -> list[str]:
    return list(__all__)
