"""Training programs: ExecuTorch runs forward and backward, torch or ExecuTorch steps, the cache serves."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor

from blobstore.disk.staging import refuse_inputs
from blobstore.errors import (
    CheckpointError,
    KeyNotFoundError,
    NotFiniteLossError,
    ProgramError,
    TrainingError,
    UnsupportedOperationError,
)
from blobstore.logical.updates import LogicalTensor, LogicalTensors
from blobstore.memory.mapped_file import Paths, as_path
from blobstore.memory.tensors import as_bytes
from blobstore.runtime import BlobCache, Program
from blobstore.runtime.cache import check_cache
from blobstore.training import checkpoint, optimizers
from blobstore.training.turns import Turns

__all__ = ["TrainingProgram"]

_GRADIENTS = "__et_training_gradients_index_"
_PARAMETERS = "__et_training_parameters_index_"
_NAMES = "__et_training_fqn_"


class TrainingProgram:
    """A method of a `.pte` that computes a loss and its gradients, as `_export_forward_backward` makes it.

    The parameters are embedded in the program, or, exported with `external_mutable_weights`, in the cache's data files.
    Either way the program trains a copy in memory of its own: neither the cache nor other programs on it see a step
    before `publish`. What is frozen and external is the cache's memory, shared with every other program on it.

    Every method may be called from any thread; those that read or change the parameters take turns. After `fork` the
    child has a copy of its own, unless another thread was in the middle of something: then it gets an error.

    Args:
        pte: the program.
        cache: where its external weights are.
        data: data files to open a cache on, private to this program; if `cache` is given too, on top of that.
        method: the method to train.

    Attributes:
        program: the program that runs.
        method: the method's name.

    Raises:
        ProgramError: it is no training program.
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
        self._method = self.program.load_method(method)
        first, names, changed = self._signature()
        self._first_gradient = first
        count = len(names)
        self._parameters = {name: self._method.output_memory(first + count + i) for i, name in enumerate(names)}
        self._gradients = {name: self._method.output_memory(first + i) for i, name in enumerate(names)}
        state = self._method.state_memory()
        self._buffers = {name: tensor for name, tensor in state.items() if name not in self._parameters}
        self._nameless = max(0, changed - len(self._buffers))
        for name, tensor in self._parameters.items():
            gradient = self._gradients[name]
            if (tensor.shape, tensor.dtype, tensor.stride()) != (gradient.shape, gradient.dtype, gradient.stride()):
                raise self._not_for_training(f"the gradient of '{name}' is not like the parameter")
        self._pairs = [(tensor, self._gradients[name]) for name, tensor in self._parameters.items()]
        self._turns = Turns(f"{self.program.path}: method '{method}'")
        self._attach()

    def _signature(self) -> tuple[int, list[str], int]:
        """Where the gradients begin among the outputs, the names of the parameters, in the outputs' order, and the
        number of buffers that the method changes."""
        method = self.method
        missing = [p + method for p in (_GRADIENTS, _PARAMETERS, _NAMES) if p + method not in self.program.method_names]
        if missing:
            raise self._not_for_training(
                f"it lacks {', '.join(map(repr, missing))}; export it with _export_forward_backward"
            )
        (gradients, *_), (parameters, *_), names = (
            self.program.load_method(prefix + method)() or [None] for prefix in (_GRADIENTS, _PARAMETERS, _NAMES)
        )
        total = len(self._method.outputs)
        # counted from the end: ExecuTorch's numbers count changed buffers too, which are no outputs of the method
        first = total - 2 * len(names)
        if not (
            type(gradients) is type(parameters) is int
            and 0 < first <= gradients
            and parameters - gradients == len(names) == len(set(names))
            and all(isinstance(name, str) and name for name in names)
        ):
            raise self._not_for_training(
                f"of its {total} outputs the gradients are to begin at {gradients!r}, the parameters at "
                f"{parameters!r}, for {len(names)} names"
            )
        if any(output.kind != "tensor" for output in self._method.outputs[first:]):
            raise self._not_for_training("a gradient or a parameter is no tensor")
        return first, names, gradients - first

    def _not_for_training(self, reason: str) -> ProgramError:
        return ProgramError(f"{self.program.path}: method '{self.method}' is not a training program: {reason}")

    def _attach(self) -> None:
        for tensor, gradient in self._pairs:
            if tensor.grad is not gradient:  # zero_grad() takes it away
                tensor.grad = gradient

    # The runtime's memory.

    def named_parameters(self) -> dict[str, Tensor]:
        """The trained parameters by name: always the same tensors, over the memory that the program reads.

        They can be used, and written to, before the first step. `grad` of each is its gradient. They keep the memory
        alive. Hold `locked()` while other threads train.
        """
        return dict(self._parameters)

    def named_gradients(self) -> dict[str, Tensor]:
        """The gradients by name, likewise: zero before the first step, each step overwrites them."""
        return dict(self._gradients)

    def named_buffers(self) -> dict[str, Tensor]:
        """The buffers that the program changes by itself, such as running statistics, likewise.

        ExecuTorch names them in a program, and gives them their first values, only if it is asked to:
        `ExecutorchBackendConfig(emit_mutable_buffer_names=True, passes=[InitializedMutableBufferPass([...])])`, as
        `lower_training` does.
        Those without names cannot be reached: they are not saved, not published, and not put back after a bad step.
        """
        return dict(self._buffers)

    def locked(self) -> AbstractContextManager[None]:
        """The lock that steps, checkpoints and publishing take: for loops of one's own.

            with training.locked():
                loss = training.forward_backward(x, y)[0]
                torch.nn.utils.clip_grad_norm_(training.named_parameters().values(), 1.0)
                optimizer.step()

        The thread that has it may call everything. Do not wait for other threads in it, and do not ask for it (nor step,
        save or publish) inside `cache.reading()`.
        """
        return self._turns

    # Training.

    def forward_backward(self, *inputs: Any) -> list[Any]:
        """Run the method: the gradients are those of the loss for these inputs.

        Returns:
            The outputs of the model, the loss first, in memory of their own.

        Raises:
            InputError, ExecutionError: as a call of `Method`. Parameters and buffers are as before.
        """
        with self._turns:
            return self._run(inputs)[0]

    def _run(self, inputs: tuple[Any, ...]) -> tuple[list[Any], dict[str, Tensor]]:
        """The outputs, and the buffers as they were before."""
        before = _copies(self._buffers)
        try:
            outputs = self._method.call_first(self._first_gradient, *inputs)
        except BaseException:
            _put(before, self._buffers)
            raise
        self._attach()
        return outputs, before

    def step(self, optimizer: Any, *inputs: Any, on_nan: Literal["raise", "skip", "accept"] = "raise") -> list[Any]:
        """`forward_backward` and the optimizer's step as one, as seen from other threads.

        Args:
            optimizer: one of `torch.optim` over `named_parameters()`, or ExecuTorch's own SGD.
            inputs: of the method.
            on_nan: what happens if the loss is not finite. "raise": an error; "skip": the outputs are returned, and
                there is no step; in both cases parameters, buffers and optimizer are as before. "accept": it is a
                step like any other.

        Returns, raises:
            As `forward_backward`.
            NotFiniteLossError: the loss is infinite or NaN.
            TrainingError: the optimizer is none, has other parameters, or has to run the program by itself (LBFGS: call
                it with a closure, in `locked()`). Or it failed: then the buffers are as before, and parameters that
                it changed until then are changed.
        """
        if not isinstance(on_nan, str) or on_nan not in ("raise", "skip", "accept"):
            raise TrainingError(f"on_nan {on_nan!r} is none of 'raise', 'skip', 'accept'")
        of_torch = optimizers.check(optimizer, self._parameters)
        with self._turns:
            outputs, before = self._run(inputs)
            if on_nan != "accept" and not _is_finite(outputs[0]):
                _put(before, self._buffers)
                if on_nan == "raise":
                    kept = f"all but {self._nameless} buffers without names is as before" if self._nameless else ""
                    raise NotFiniteLossError(
                        f"{self.program.path}: method '{self.method}': the loss is {outputs[0]}; "
                        f"{kept or 'nothing was changed'}"
                    )
                return outputs
            try:
                if of_torch:
                    optimizer.step()
                else:
                    optimizer.step(self._gradients)
            except Exception as error:  # of the optimizer's own making
                _put(before, self._buffers)
                raise TrainingError(
                    f"{self.program.path}: method '{self.method}': the {type(optimizer).__name__} failed: {error}"
                ) from error
            return outputs

    # Checkpoints.

    def save(
        self,
        path: str | os.PathLike[str],
        optimizer: Any = None,
        *,
        base: Paths = (),
        metadata: dict[str, str] | None = None,
    ) -> int:
        """Write a checkpoint: a `.ptd` with parameters and buffers under their names, and the optimizer's state.

        It is of one moment between two steps, also while other threads train; they wait while it is copied, not while
        it is written.

        Args:
            path: the file; one that is there is replaced when the new one is whole.
            optimizer: the `torch.optim` optimizer whose state to keep; without one, none is kept.
            base: `.ptd` files; what they have, with the same bytes, is not written again. Where several have a key, the
                last one counts.
            metadata: free text to keep with the file.

        Returns:
            The size of the file in bytes.

        Raises:
            OutputPathError: the path is the program's, a base's, or one that the cache maps.
            UnsupportedOperationError: the optimizer's state cannot be reached, as with ExecuTorch's own SGD; or the
                program changes buffers that have no names, so that a run could not go on from the checkpoint.
            UnsupportedDataError: the optimizer keeps what is neither a tensor nor a plain value.
            TrainingError: the optimizer has parameters that are not this program's.
            FileAccessError, InvalidFileError: a base cannot be read, or writing failed; an old file is as before.
        """
        self._check_names()
        path, bases = as_path(path), checkpoint.open_bases(base)
        inputs = [self.program.path, *self.program.cache.sources, *(map_.path for map_ in bases)]
        refuse_inputs([path], inputs)
        parameters, buffers, state = self._moment(optimizer)
        moment = checkpoint.Checkpoint(parameters, buffers, state, self._frozen())
        return checkpoint.write(path, moment, bases, metadata)

    def load(self, path: str | os.PathLike[str], optimizer: Any = None, *, base: Paths = ()) -> None:
        """Go on from a checkpoint: parameters, buffers, and, if given, the optimizer are what they were.

        Everything is checked before anything is changed.

        Args:
            path: what `save` wrote.
            optimizer: an optimizer of the class that was saved, over the same parameters in the same groups.
            base: the files that it was saved on.

        Raises:
            FileAccessError, InvalidFileError, IntegrityError: a file cannot be opened or trusted, or is no checkpoint.
            CheckpointError: it is of another model, of other frozen weights, as far as these are in data files, of
                another optimizer, or its base is missing or another.
            UnsupportedOperationError, TrainingError: as for `save`.
        """
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

    def _moment(self, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], optimizers.OptimizerState | None]:
        """Copies of the parameters, the buffers, and the optimizer's state, between two steps."""
        with self._turns:
            state = optimizers.capture(optimizer, self._parameters) if optimizer is not None else None
            return _copies(self._parameters), _copies(self._buffers), state

    def _check_names(self) -> None:
        if self._nameless:
            raise UnsupportedOperationError(
                f"{self.program.path}: method '{self.method}' changes {self._nameless} buffers that have no names, so a "
                "checkpoint would lack them; lower it with ExecutorchBackendConfig(emit_mutable_buffer_names=True)"
            )

    def _frozen(self) -> str:
        """A digest of the external weights that are not trained."""
        keys = sorted(set(self.program.external_keys(self.method)) - set(self._parameters) - set(self._buffers))
        state = xxhash.xxh3_128()
        for key in keys:
            state.update(f"{key}\0{self.program.cache.digest(key)}\0".encode())
        return state.hexdigest() if keys else ""

    def _check_fit(self, path: str | os.PathLike[str], saved: checkpoint.Checkpoint) -> None:
        where = f"{Path(path)} is a checkpoint of another model than {self.program.path}: "
        for kind, own, theirs in (
            ("parameters", self._parameters, saved.parameters),
            ("buffers", self._buffers, saved.buffers),
        ):
            if set(own) != set(theirs):
                lacks, more = sorted(set(own) - set(theirs)), sorted(set(theirs) - set(own))
                raise CheckpointError(f"{where}of the {kind}, it lacks {lacks} and has {more} besides")
            for name, tensor in own.items():
                expected, found = as_bytes(tensor)[1], as_bytes(theirs[name])[1]
                if expected != found:
                    raise CheckpointError(f"{where}'{name}' is {expected} in the program, {found} in the checkpoint")
        frozen = self._frozen()
        if saved.frozen != frozen:
            raise CheckpointError(
                f"{Path(path)}: the checkpoint was made on other frozen weights than those of {self.program.cache.name}: "
                f"their digest was {saved.frozen or 'none'}, it is {frozen or 'none'}"
            )

    # Publishing.

    def publish(self, cache: BlobCache | None = None, *, strict: bool = True, finite: bool = False) -> int:
        """Commit the trained parameters and buffers to the programs on a cache; their next call uses them.

        They are those of one moment between two steps; steps of other threads wait until it is done. Delegated programs
        get them by name, laid out as they store them (see docs/lowering.md). Buffers that the cache lacks, or that its
        programs change themselves, are passed over. Where a delegate has a trained tensor combined with a frozen one,
        such as the statistics of a folded normalization, the frozen one is taken from this program's data files.

        Args:
            cache: where to; left out, the cache that this program runs on.
            strict: refuse if the cache lacks parameters, or a program that is loaded on it seems to have some where no
                update reaches them (see docs/runtime.md); otherwise these are passed over.
            finite: refuse infinities and NaN.

        Returns:
            The cache's new generation.

        Raises:
            KeyNotFoundError: the cache lacks parameters; all are named. Nothing was changed, here and below.
            UpdateError: the cache takes none of the parameters and buffers; or some are out of reach in a loaded program,
                which is named.
            UnsupportedDataError: `cache` is not a cache.
            As `BlobCache.update`.
        """
        target = cache if cache is not None else self.program.cache
        check_cache(target, "cache")
        known = target.tensors
        missing = [name for name in self._parameters if name not in known and name not in target]
        if missing and strict:
            raise KeyNotFoundError(
                f"{target.name}: has none of the parameters {', '.join(map(repr, missing))} of {self.program.path}"
            )
        tensors = {
            name: tensor.detach()
            for name, tensor in {**self._parameters, **self._buffers}.items()
            if name in target or (name in known and not _is_passed_over(known[name], strict))
        }
        if not tensors:
            raise known.mismatch([*self._parameters, *self._buffers])
        if strict:
            target._check_reach(tensors)
        tensors.update(self._frozen_parts(tensors, known))
        with self._turns:  # committed from where they are: a copy would take longer than the commit
            return target.update(tensors, finite=finite)

    def _frozen_parts(self, tensors: Iterable[str], known: LogicalTensors) -> dict[str, Tensor]:
        """Copies of the frozen tensors without which a target cannot change the others."""
        own = set(self.program.external_keys(self.method))
        found: dict[str, Tensor] = {}
        pending = [known[name] for name in tensors if name in known]
        seen = {tensor.name for tensor in pending}
        with self.program.cache.reading():
            while pending:
                for need in set(pending.pop().needs) - seen:
                    tensor = known[need]
                    seen.add(need)
                    pending.append(tensor)
                    for name in (name for name in (need, *tensor.aliases) if name in own):
                        found[name] = self.program.cache.torch(name).clone()
        return found

    def __repr__(self) -> str:
        return f"<TrainingProgram {self.program.path}: {self.method!r}, {len(self._parameters)} parameters>"


def _is_passed_over(tensor: LogicalTensor, strict: bool) -> bool:
    """Whether not to publish to it: state of the programs that serve, or, unless `strict`, what cannot be changed."""
    return bool(tensor.refusal) and (tensor.auxiliary or not strict)


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _put(values: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Change tensors in place."""
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(value)


def _is_finite(loss: Any) -> bool:
    if isinstance(loss, Tensor):
        return math.isfinite(loss.item()) if loss.numel() == 1 else bool(torch.isfinite(loss).all())
    return math.isfinite(float(loss))
