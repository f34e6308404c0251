"""The outputs of a training method: where its gradients and parameters are, and their names."""

from __future__ import annotations

from dataclasses import dataclass

from blobstore.errors import ProgramError
from blobstore.runtime import Method, Program

__all__ = ["Signature", "not_for_training", "read_signature"]

_GRADIENTS = "__et_training_gradients_index_"
_PARAMETERS = "__et_training_parameters_index_"
_NAMES = "__et_training_fqn_"


@dataclass(frozen=True)
class Signature:
    """The outputs of a training method, in order: those of the model, the gradients, the parameters.

    Attributes:
        first_gradient: the index of the first gradient, which is the number of the model's outputs.
        names: the names of the parameters, in the order of the outputs.
        buffers: the number of buffers that the method changes; they are not among its outputs.
    """

    first_gradient: int
    names: tuple[str, ...]
    buffers: int

    @property
    def first_parameter(self) -> int:
        """The index of the first parameter."""
        return self.first_gradient + len(self.names)


def read_signature(program: Program, method: Method) -> Signature:
    """Read the signature from the methods that ExecuTorch's training export adds to a program.

    Raises:
        ProgramError: the program lacks these methods, or they contradict the outputs.
    """
    needed = [prefix + method.name for prefix in (_GRADIENTS, _PARAMETERS, _NAMES)]
    missing = [name for name in needed if name not in program.method_names]
    if missing:
        raise not_for_training(
            method, f"it lacks {', '.join(map(repr, missing))}; export it with _export_forward_backward"
        )
    (gradients, *_), (parameters, *_), names = (program.load_method(name)() or [None] for name in needed)
    total = len(method.outputs)
    # Counted from the end, because ExecuTorch's indices also count the changed buffers, which are not among the outputs.
    first = total - 2 * len(names)
    if not (
        type(gradients) is type(parameters) is int
        and 0 < first <= gradients
        and parameters - gradients == len(names) == len(set(names))
        and all(isinstance(name, str) and name for name in names)
    ):
        raise not_for_training(
            method,
            f"its gradients should begin at output {gradients!r} and its parameters at {parameters!r}, for {len(names)} "
            f"names, but it has {total} outputs",
        )
    if any(output.kind != "tensor" for output in method.outputs[first:]):
        raise not_for_training(method, "a gradient or a parameter is not a tensor")
    return Signature(first, tuple(names), gradients - first)


def not_for_training(method: Method, reason: str) -> ProgramError:
    """The error for a method that cannot be trained."""
    return ProgramError(f"{method.path}: method '{method.name}' is not a training program: {reason}")
