"""Training programs: ExecuTorch computes gradients, an optimizer steps, and a cache serves the result."""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, overload

import torch
import xxhash
from torch import Tensor

from blobstore.core.disk.staging import refuse_inputs
from blobstore.core.errors import (
    CheckpointError,
    NotFiniteLossError,
    TrainingError,
    UnsupportedOperationError,
)
from blobstore.core.memory.mapped_file import Paths, as_path
from blobstore.core.memory.tensors import AnyTensor, as_bytes
from blobstore.core.reprs import count, line, shorten
from blobstore.runtime import BlobCache, Program
from blobstore.runtime.cache import check_cache
from blobstore.runtime.program import Plain
from blobstore.runtime.tensors import Updated
from blobstore.training import checkpoint, optimizers
from blobstore.training.turns import Turns

__all__ = ["TrainingProgram"]


class TrainingProgram:
    """A method of a `.pte` that computes a loss and its gradients, exported by `_export_forward_backward`.

    The parameters are embedded in the program or, if it was exported with `external_mutable_weights`, in the cache's
    data files. In both cases the program trains its own copy: neither the cache nor other programs on it see a step
    before `publish`. Frozen external weights are read from the cache's memory, which all programs on the cache share.

    All methods may be called from any thread; those that read or change the parameters take turns. After `fork` the
    child has its own copy. If another thread was using the program at the fork, the child gets an error instead.

    Args:
        pte: the program.
        cache: has its external weights.
        data: data files for a cache that is private to this program; if `cache` is given too, it becomes the base.
        method: the method to train.

    Attributes:
        program: the program that runs.
        method: the method's name.

    Raises:
        ProgramError: the method is not a training program.
        UnsupportedOperationError: gradients or parameters have no planned memory (`alloc_graph_output=False`).
        As `Program` and `Program.load_method`.
    """

    def __init__(
        self,
        pte: str | os.PathLike[str],
        cache: BlobCache | None = None,
        *,
        data: Paths = (),
        method: str = "forward",
    ) -> None:
        self.program = Program(pte, cache, data=data)
        self.method = method
        self._native: Any = self.program._load_training(method)
        self._method = self.program._wrap(self._native.method)
        self._parameters: dict[str, Tensor] = self._native.parameters()
        self._gradients: dict[str, Tensor] = self._native.gradients()
        state = self._method.state_memory()
        self._buffers = {name: tensor for name, tensor in state.items() if name not in self._parameters}
        self._nameless: int = self._native.nameless
        self._pairs = [(tensor, self._gradients[name]) for name, tensor in self._parameters.items()]
        self._turns = Turns(self._where)
        self._attach()

    @property
    def _where(self) -> str:
        """The program and the method as messages name them."""
        return f"{self.program.path}: method '{self.method}'"

    def _attach(self) -> None:
        for tensor, gradient in self._pairs:
            if tensor.grad is not gradient:  # zero_grad() detaches it
                tensor.grad = gradient

    # The runtime's memory

    def named_parameters(self) -> dict[str, Tensor]:
        """The trained parameters by name: always the same tensors, over the memory that the program reads.

        They can be read and written before the first step. `grad` of each is its gradient. They keep the memory alive.
        Hold `locked()` while you use them and other threads train.
        """
        return dict(self._parameters)

    def named_gradients(self) -> dict[str, Tensor]:
        """The gradients by name, with the same rules: zero before the first step, overwritten by each step."""
        return dict(self._gradients)

    def named_buffers(self) -> dict[str, Tensor]:
        """The buffers that the program changes itself, such as running statistics, by name, with the same rules.

        A program has their names and initial values only if it was lowered with
        `ExecutorchBackendConfig(emit_mutable_buffer_names=True, passes=[InitializedMutableBufferPass([...])])`, as by
        `lower_training`. Buffers without names cannot be reached: they are neither saved, nor published, nor restored
        after a failed step.
        """
        return dict(self._buffers)

    def locked(self) -> AbstractContextManager[None]:
        """The lock that steps, checkpoints and publishing take, for training loops that do not use `step`.

            with training.locked():
                loss = training.forward_backward(x, y)[0]
                torch.nn.utils.clip_grad_norm_(training.named_parameters().values(), 1.0)
                optimizer.step()

        The thread that holds it may call every method. Do not wait for other threads while you hold it. Do not take it
        (or step, save or publish) inside `cache.reading()`.
        """
        return self._turns

    # Training

    @overload
    def forward_backward(self, *inputs: Tensor | Plain) -> list[Tensor]: ...
    @overload
    def forward_backward(self, *inputs: object) -> list[AnyTensor]: ...
    def forward_backward(self, *inputs: Any) -> list[Any]:
        """Run the method. Afterwards the gradients are those of the loss for these inputs.

        Returns:
            The outputs of the model, the loss first. They own their memory.

        Raises:
            InputError, ExecutionError: as when calling a `Method`. Parameters and buffers are unchanged.
        """
        with self._turns:
            return self._run(inputs)[0]

    def _run(self, inputs: tuple[Any, ...]) -> tuple[list[Any], dict[str, Tensor]]:
        """The outputs, and copies of the buffers from before."""
        before = _copies(self._buffers)  # a call that fails half-way may have changed running statistics
        try:
            outputs = self._method.call_first(self._native.outputs, *inputs)
        except BaseException:
            _put(before, self._buffers)
            raise
        self._attach()
        return outputs, before

    @overload
    def step(
        self, optimizer: Any, *inputs: Tensor | Plain, on_nan: Literal["raise", "skip", "accept"] = "raise"
    ) -> list[Tensor]: ...
    @overload
    def step(
        self, optimizer: Any, *inputs: object, on_nan: Literal["raise", "skip", "accept"] = "raise"
    ) -> list[AnyTensor]: ...
    def step(self, optimizer: Any, *inputs: Any, on_nan: Literal["raise", "skip", "accept"] = "raise") -> list[Any]:
        """Call `forward_backward` and step the optimizer. Other threads see both as one.

        Args:
            optimizer: an optimizer of `torch.optim` over `named_parameters()`, or ExecuTorch's own SGD.
            inputs: the inputs of the method.
            on_nan: what to do if the loss is not finite. "raise": raise an error; "skip": return the outputs without a
                step. In both cases parameters, buffers and optimizer are unchanged. "accept": step as usual.

        Returns, raises:
            As `forward_backward`.
            NotFiniteLossError: the loss is infinite or NaN.
            TrainingError: `optimizer` is not an optimizer, has other parameters, or must run the program itself (LBFGS:
                call it with a closure, in `locked()`). Or its step failed: then the buffers are restored, but
                parameters that it had already changed stay changed.
        """
        if not isinstance(on_nan, str) or on_nan not in ("raise", "skip", "accept"):
            raise TrainingError(f"on_nan must be 'raise', 'skip' or 'accept', not {on_nan!r}")
        of_torch = optimizers.check(optimizer, self._parameters)
        with self._turns:
            outputs, before = self._run(inputs)
            if on_nan != "accept" and not _is_finite(outputs[0]):
                _put(before, self._buffers)
                if on_nan == "raise":
                    raise self._not_finite(outputs[0])
                return outputs
            try:
                if of_torch:
                    optimizer.step()
                else:
                    optimizer.step(self._gradients)
            except Exception as error:  # raised by the optimizer's own code
                _put(before, self._buffers)
                raise TrainingError(f"{self._where}: the {type(optimizer).__name__} failed: {error}") from error
            return outputs

    def _not_finite(self, loss: Any) -> NotFiniteLossError:
        changed = (
            f"nothing but {self._nameless} buffers without names was changed"
            if self._nameless
            else "nothing was changed"
        )
        return NotFiniteLossError(f"{self._where}: the loss is {loss}; {changed}")

    # Checkpoints

    def save(
        self,
        path: str | os.PathLike[str],
        optimizer: Any = None,
        *,
        base: Paths = (),
        metadata: dict[str, str] | None = None,
    ) -> int:
        """Write a checkpoint: a `.ptd` with parameters and buffers under their names, and the optimizer's state.

        Its contents are from one moment between two steps, even if other threads train. These wait while the contents
        are copied, but not while they are written.

        Args:
            path: the file to write. An existing file is replaced when the new one is complete.
            optimizer: the `torch.optim` optimizer whose state to save, if any.
            base: `.ptd` files. Tensors that they have with the same bytes are not written again. If several have a key,
                the last one counts.
            metadata: free text to keep with the file.

        Returns:
            The size of the file in bytes.

        Raises:
            OutputPathError: the path is that of the program, a base, or a file that the cache maps.
            UnsupportedOperationError: the optimizer does not give access to its state, such as ExecuTorch's own SGD; or
                the program changes buffers that have no names, so a run could not continue from the checkpoint.
            UnsupportedDataError: the optimizer's state has something that is neither a tensor nor a plain value.
            TrainingError: the optimizer has parameters that do not belong to this program.
            FileAccessError, InvalidFileError: a base cannot be read, or writing failed; an existing file is unchanged.
        """
        self._check_names()
        path, bases = as_path(path), checkpoint.open_bases(base)
        inputs = [self.program.path, *self.program.cache.sources, *(map_.path for map_ in bases)]
        refuse_inputs([path], inputs)
        with self._turns:
            state = optimizers.capture(optimizer, self._parameters) if optimizer is not None else None
            parameters, buffers = _copies(self._parameters), _copies(self._buffers)
        moment = checkpoint.Checkpoint(parameters, buffers, state, self._frozen())
        return checkpoint.write(path, moment, bases, metadata)

    def load(self, path: str | os.PathLike[str], optimizer: Any = None, *, base: Paths = ()) -> None:
        """Continue from a checkpoint: restore the parameters, the buffers and, if it is given, the optimizer.

        Everything is checked before anything is changed.

        Args:
            path: a file that `save` wrote.
            optimizer: an optimizer of the class that was saved, over the same parameters in the same groups.
            base: the same base as for `save`.

        Raises:
            FileAccessError, InvalidFileError, IntegrityError: a file cannot be opened or trusted, or is not a
                checkpoint.
            CheckpointError: the checkpoint is of another model, of other frozen weights (as far as these are in data
                files), or of another optimizer; or its base is missing or different.
            UnsupportedOperationError, TrainingError: as in `save`.
        """
        # Read outside the lock: other threads step meanwhile, and only copying keeps them waiting.
        saved = checkpoint.read(path, checkpoint.open_bases(base))
        self._check_fit(path, saved)
        with self._turns:
            if optimizer is not None:
                if saved.optimizer is None:
                    raise CheckpointError(f"{Path(path)}: the checkpoint has no state of an optimizer")
                try:
                    optimizers.restore(optimizer, saved.optimizer, self._parameters)
                except CheckpointError as error:
                    raise CheckpointError(f"{Path(path)}: {error}") from error
            _put(saved.parameters, self._parameters)
            _put(saved.buffers, self._buffers)

    def _check_names(self) -> None:
        if self._nameless:
            raise UnsupportedOperationError(
                f"{self._where} changes {self._nameless} buffers that have no names, so a checkpoint would lack them; "
                "lower it with ExecutorchBackendConfig(emit_mutable_buffer_names=True)"
            )

    def _frozen(self) -> str:
        """A digest of the external weights that are not trained; empty without such weights."""
        keys = sorted(set(self.program.external_keys(self.method)) - set(self._parameters) - set(self._buffers))
        state = xxhash.xxh3_128()
        for key in keys:
            state.update(f"{key}\0{self.program.cache.digest(key)}\0".encode())
        return state.hexdigest() if keys else ""

    def _check_fit(self, path: str | os.PathLike[str], saved: checkpoint.Checkpoint) -> None:
        """Raise CheckpointError if a checkpoint is of another model or of other frozen weights."""
        where = f"{Path(path)}: a checkpoint of another model than {self.program.path}: "
        for kind, own, theirs in (
            ("parameters", self._parameters, saved.parameters),
            ("buffers", self._buffers, saved.buffers),
        ):
            if set(own) != set(theirs):
                lacks, more = sorted(set(own) - set(theirs)), sorted(set(theirs) - set(own))
                differences = [f"lacks the {kind} {lacks}"] if lacks else []
                differences += [f"has the unknown {kind} {more}"] if more else []
                raise CheckpointError(f"{where}it {' and '.join(differences)}")
            for name, tensor in own.items():
                expected, found = as_bytes(tensor)[1], as_bytes(theirs[name])[1]
                if expected != found:
                    raise CheckpointError(f"{where}'{name}' is {expected} in the program, {found} in the checkpoint")
        frozen = self._frozen()
        if saved.frozen != frozen:
            raise CheckpointError(
                f"{Path(path)}: the checkpoint was made with other frozen weights than those of {self.program.cache.name}: "
                f"their digest was {saved.frozen or 'none'}, it is {frozen or 'none'}"
            )

    # Publishing

    def publish(self, cache: BlobCache | None = None, *, strict: bool = True, finite: bool = False) -> Updated:
        """Commit the trained parameters and buffers to the programs on a cache. Their next call uses them.

        The values are from one moment between two steps; steps of other threads wait until the commit is done.
        Delegated programs receive them by name, in the layouts that they store (see docs/lowering.md). Buffers that the
        cache lacks, and those that its programs change themselves, are ignored. Where a delegate has combined a trained
        tensor with a frozen one, such as the statistics of a folded normalization, the frozen one is read from this
        program's data files.

        Args:
            cache: the target; the default is the cache that this program runs on.
            strict: refuse if the cache lacks parameters, if it has some under names that no program takes which serves, or
                if a program that is loaded on it seems to have some where no update reaches them (see
                docs/runtime.md). Without `strict`, such parameters are ignored. Refuse also what a strict
                `BlobCache.update_state_dict` refuses to clip.
            finite: refuse infinities and NaN.

        Returns:
            The cache's new generation, and how many numbers of which quantized tensors were clipped.

        Raises:
            KeyNotFoundError: the cache lacks parameters; the message names all of them. Nothing was changed; the same
                holds for all errors below.
            UpdateError: the cache has none of the parameters and buffers; nothing that serves takes them from it, and the
                message suggests other names; or some are out of reach in a loaded program, which the message names.
            UnsupportedDataError: `cache` is not a `BlobCache`.
            As `BlobCache.update`.
        """
        target = cache if cache is not None else self.program.cache
        check_cache(target, "cache")
        with self._turns:
            return Updated.of(self._native.publish(target.tensors._native, strict, finite))

    def __repr__(self) -> str:
        parameters = count(len(self._parameters), "parameter")
        return line("TrainingProgram", self.program.path, f"'{shorten(self.method)}'", parameters)


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _put(values: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Copy values into tensors of the same names."""
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(value)


def _is_finite(loss: Any) -> bool:
    if isinstance(loss, Tensor):
        return math.isfinite(loss.item()) if loss.numel() == 1 else bool(torch.isfinite(loss).all())
    return math.isfinite(float(loss))
