"""ExecuTorch's internals, which blobstore needs beside its public API, and the check that they are the expected ones.

This is the only module of the package that imports them. Other versions of ExecuTorch may change them without notice.
A change that went unnoticed could produce wrong records, so importing this module checks the version of ExecuTorch, and
the parameters and fields of everything that is wrapped, called or read.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from blobstore.core.distribution import install
from blobstore.core.errors import MissingDependencyError
from blobstore.core.requirements import SUPPORTED, check_lowering, installed, is_supported

try:
    from executorch.backends.xnnpack import xnnpack_preprocess
    from executorch.backends.xnnpack._passes.decompose_batch_norm import DecomposeBatchNorm
    from executorch.backends.xnnpack._passes.fuse_batch_norm import FuseBatchNormPass
    from executorch.backends.xnnpack.operators.node_visitor import NodeVisitor
    from executorch.backends.xnnpack.utils.utils import get_param_tensor, get_tensor_name
    from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
    from executorch.exir._serialize._named_data_store import NamedDataStoreOutput
    from executorch.exir._serialize.data_serializer import DataEntry
    from executorch.exir.backend.backend_details import BackendDetails, CompileSpec, PreprocessResult
    from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
    from executorch.exir.memory import view
    from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
    from executorch.exir.scalar_type import ScalarType
    from executorch.exir.schema import ExtraTensorInfo
    from executorch.exir.tensor import TensorSpec
    from executorch.exir.tensor_layout import TensorLayout
except ImportError as error:
    _import_error: ImportError | None = error
else:
    _import_error = None

__all__ = [
    "BackendDetails",
    "CompileSpec",
    "DataEntry",
    "DecomposeBatchNorm",
    "DelegationSpec",
    "ExtraTensorInfo",
    "FuseBatchNormPass",
    "InitializedMutableBufferPass",
    "NamedDataStoreOutput",
    "NodeVisitor",
    "PartitionResult",
    "Partitioner",
    "PreprocessResult",
    "ScalarType",
    "TensorLayout",
    "TensorSpec",
    "XnnpackBackend",
    "check",
    "get_param_tensor",
    "get_tensor_name",
    "view",
    "xnnpack_preprocess",
]

_XNNPACK = "executorch.backends.xnnpack"
_SCHEMA = f"{_XNNPACK}.serialization.xnnpack_graph_schema"

# By module: functions and classes with all their parameters, in order. A dataclass has its fields as parameters.
_PARAMETERS: Mapping[str, Mapping[str, str]] = {
    f"{_XNNPACK}.operators.node_visitor": {
        "NodeVisitor.get_serialized_buffer_index": "self tensor xnn_graph vals_to_ids convert_to_nhwc "
        "swap_in_out_for_weights quant_params force_fp32 groups",
        "NodeVisitor.get_quant_params": "self quant_params xnn_graph external_tag",
    },
    f"{_XNNPACK}._passes.fuse_batch_norm": {
        "FuseBatchNormPass._fuse_ops": "self graph_module graph input_node bn is_conv constant_placeholders_to_delete",
    },
    f"{_XNNPACK}._passes.decompose_batch_norm": {
        "DecomposeBatchNorm.replace_bn_node_with_conv": "self bn_node graph_module",
    },
    f"{_XNNPACK}.xnnpack_preprocess": {
        "XnnpackBackend.preprocess": "edge_program compile_specs",
        "serialize_xnnpack_binary": "xnnpack_graph constant_data_bytes",
    },
    f"{_XNNPACK}.utils.utils": {
        "get_param_tensor": "exp_prog node",
        "get_tensor_name": "exp_prog node",
    },
    "executorch.exir._serialize._named_data_store": {
        "NamedDataStore.add_named_data": "self key data alignment external_tag tensor_layout",
        "NamedDataStoreOutput": "buffers pte_data external_data",
    },
    "executorch.exir._serialize.data_serializer": {
        "DataEntry": "buffer_index alignment tensor_layout",
    },
    "executorch.exir.memory": {
        "view": "base size",
    },
    "executorch.exir.passes.init_mutable_pass": {
        "InitializedMutableBufferPass": "patterns",
    },
    "executorch.exir.tensor_layout": {
        "TensorLayout": "scalar_type sizes dim_order",
    },
    "executorch.exir.backend.backend_details": {
        "BackendDetails.preprocess": "edge_program compile_specs",
        "BackendDetails.preprocess_multimethod": "edge_programs compile_specs",
        "CompileSpec": "key value",
        "PreprocessResult": "processed_bytes debug_handle_map data_store_output _delegate_info_meta",
    },
    "executorch.exir.backend.partitioner": {
        "DelegationSpec": "backend_id compile_specs",
        "PartitionResult": "tagged_exported_program partition_tags",
        "Partitioner.partition": "self exported_program",
        "Partitioner.ops_to_not_decompose": "self ep",
        "Partitioner.transform_for_pre_decomposition": "self exported_program",
    },
}

# By module: classes whose instances are only read, with those of their constructor's parameters that are read.
_FIELDS: Mapping[str, Mapping[str, str]] = {
    f"{_XNNPACK}.operators.quant_params": {
        "QuantParams": "per_channel q_input scale zp axis dtype qmax qmin is_dynamic group_size",
    },
    _SCHEMA: {
        "XNNGraph": "xnodes xvalues constant_data",
        "XNode": "xnode_union",
        "XValue": "xvalue_union",
        "ConstantDataOffset": "size named_key",
        "XNNTensorValue": "constant_buffer_idx id_out",
        "XNNQuantizedTensorValue": "tensor_value quant_params",
        "PerChannelQuant": "scale_buffer_idx",
        "PerChannelGroupQuant": "scale_buffer_idx",
        "XNNFullyConnected": "filter_id bias_id",
        "XNNConv2d": "filter_id bias_id",
        "XNNDepthwiseConv2d": "filter_id bias_id",
        "XNNConvTranspose2d": "filter_id bias_id",
    },
}


# Modules, and names in modules, that exporting language models needs.
_LLAMA = "executorch.examples.models.llama"
_EXPORT = "executorch.extension.llm.export"
_LANGUAGE_MODELS = {
    "LLMEdgeManager": f"{_EXPORT}.builder:LLMEdgeManager",
    "LlmConfig": f"{_EXPORT}.config.llm_config:LlmConfig",
    "LoRALinear": f"{_LLAMA}.lora:LoRALinear",
    "LoraConfig": f"{_EXPORT}.config.llm_config:LoraConfig",
    "ModelArgs": f"{_LLAMA}.model_args:ModelArgs",
    "construct_transformer": f"{_LLAMA}.llama_transformer:construct_transformer",
    "convert_weights": f"{_LLAMA}.convert_weights",
    "export_llama_lib": f"{_LLAMA}.export_llama_lib",
    "export_llm": f"{_EXPORT}.export_llm",
}
_PARAMETERS_OF_LANGUAGE_MODELS: Mapping[str, Mapping[str, str]] = {
    f"{_LLAMA}.export_llama_lib": {
        "export_llama": "export_options",
        "get_xnnpack_partitioner": "dynamic_quant_only_partitioner enable_bf16",
    },
    f"{_LLAMA}.convert_weights": {
        "load_and_convert_unsloth_to_meta": "checkpoint_path",
    },
    f"{_LLAMA}.llama_transformer": {
        "construct_transformer": "model_args",
    },
    f"{_LLAMA}.lora": {
        "LoRALinear": "in_dim out_dim rank alpha dropout use_bias",
    },
    f"{_EXPORT}.builder": {
        "LLMEdgeManager._export": "self module",
        "LLMEdgeManager.to_executorch": "self passes external_constants_tag share_mutable_buffers",
        "LLMEdgeManager.save_to_pte": "self output_name",
    },
    f"{_EXPORT}.export_llm": {
        "export_llama": "export_options",
        "main": "",
    },
}


def check() -> None:
    """Check that the installed ExecuTorch is the one whose internals are known.

    Raises:
        MissingDependencyError: it or torch is not installed, has another version, or its internals differ. The message
            names the supported version, the one that was found, and every difference.
    """
    found = installed("executorch")
    if found is None or is_supported("executorch", found):
        check_lowering()
    differences = [*_differences(_PARAMETERS, exact=True), *_differences(_FIELDS, exact=False)]
    if _import_error is not None and not differences:
        differences.append(str(_import_error))
    if found is not None and not is_supported("executorch", found):
        differences = differences or ["its internals look the same, but nothing was tested with it"]
    _refuse(found, differences)


def __getattr__(name: str) -> Any:
    """What only exporting language models needs: it takes seconds to import, and asks for more packages."""
    if name not in _LANGUAGE_MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        imported = {key: _imported(place) for key, place in _LANGUAGE_MODELS.items()}
    except ImportError as error:
        raise MissingDependencyError(
            f"exporting language models needs more packages ({error}): {install('llm')}"
        ) from error
    _refuse(installed("executorch"), list(_differences(_PARAMETERS_OF_LANGUAGE_MODELS, exact=True)))
    globals().update(imported)
    return imported[name]


def _imported(place: str) -> Any:
    module, _, name = place.partition(":")
    imported = importlib.import_module(module)
    return getattr(imported, name) if name else imported


def _refuse(found: str | None, differences: list[str]) -> None:
    if differences:
        raise MissingDependencyError(
            f"blobstore needs executorch {SUPPORTED['executorch']}, found executorch {found}: {'; '.join(differences)}. "
            f"To install it: {install('executorch')}"
        ) from _import_error


def _differences(modules: Mapping[str, Mapping[str, str]], *, exact: bool) -> Iterable[str]:
    """How the parameters of these objects differ from those listed; with `exact`, more parameters differ too."""
    for module, objects in modules.items():
        try:
            imported = importlib.import_module(module)
        except ImportError as error:
            yield f"no {module} ({error})"
            continue
        for name, listed in objects.items():
            expected = tuple(listed.split())
            try:
                found = tuple(inspect.signature(attrgetter(name)(imported)).parameters)
            except (AttributeError, TypeError, ValueError):
                yield f"no {module}.{name}"
                continue
            if found != expected if exact else not set(expected) <= set(found):
                yield f"{name} takes ({', '.join(found)}), expected ({', '.join(expected)})"


check()
