"""The tests in the installed executorch, with our adapters in place of its classes."""

import fnmatch
import importlib
import unittest
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from campaigns.conformance import adapters


@dataclass(frozen=True)
class Suite:
    """One module of tests.

    Attributes:
        module: its name.
        replaced: the replacement for each name of the module.
        excluded: tests of details of ExecuTorch's own code, or with an impossible file, by patterns with the reason.
        mend: repairs the module's fixtures.
    """

    module: str
    replaced: dict[str, Any]
    excluded: dict[str, str] = field(default_factory=dict)
    mend: Callable[[Any], None] | None = None


_SHARDS = "BlobStore has tags, and does not split untagged data into files of a given size"
_IMPOSSIBLE = "its layout does not fit its bytes (float[1, 2] in 4 or 5 bytes), which BlobStore refuses"
_LAYOUT = "it expects no layout for opaque bytes; BlobStore writes that of bytes, because ExecuTorch's reader needs one"


def _mend_layout(module: Any) -> None:
    """Repair a fixture that has three sizes and a dim order of two."""
    module.TEST_NAMED_DATA["fqn3"].tensor_layout.dim_order = [0, 1, 2]


SUITES = (
    Suite(
        "executorch.exir._serialize.test.test_named_data_store",
        {"NamedDataStore": adapters.Store},
        excluded={
            "test_externalize_pte_data_*": _SHARDS,
            "test_add_same_data_with_different_tensor_layout": _IMPOSSIBLE,
            "test_merge": _IMPOSSIBLE,
            "test_add_invalid_torch_tensor_dim_order": "BlobStore accepts dense memory with its dimensions in any order",
            "test_file_backed_data_dedup": "it expects the same objects that were added; BlobStore reads them",
        },
    ),
    Suite(
        "executorch.extension.flat_tensor.test.test_serialize",
        {"FlatTensorSerializer": adapters.Serializer},
        excluded={
            "test_serialize_default_alignment": _LAYOUT,
            "test_serialize_align_1024": _LAYOUT,
            "test_serialize_align_4096": _LAYOUT,
            "test_deserialize_refuses_newer_version": "it changes the version in ExecuTorch's module, not in the file",
            "test_deserialize_to_named_data_store_output": _IMPOSSIBLE,
        },
        mend=_mend_layout,
    ),
)


def run(say: Callable[[str], None]) -> int:
    """Run all suites and return the number of findings."""
    findings = 0
    for suite in SUITES:
        try:
            module = importlib.import_module(suite.module)
        except ImportError as error:
            say(f"{suite.module}: SKIPPED, it is not in this executorch: {error}")
            continue
        if suite.mend:
            suite.mend(module)
        outcomes: dict[str, str] = {}
        for test in _tests(unittest.defaultTestLoader.loadTestsFromModule(module)):
            outcomes[test._testMethodName] = _run(suite, module, test)
        say(f"{suite.module}: {sum(not text for text in outcomes.values())} of {len(outcomes)} tests pass")
        for name, text in outcomes.items():
            reasons = [reason for pattern, reason in suite.excluded.items() if fnmatch.fnmatchcase(name, pattern)]
            if reasons:
                say(f"    excluded {name}: {reasons[0]}")
                if not text:
                    say(f"FINDING {name} passes and need not be excluded")
                    findings += 1
            elif text:
                say(f"FINDING {name}: {text}")
                findings += 1
        if gone := {pattern for pattern in suite.excluded if not fnmatch.filter(outcomes, pattern)}:
            say(f"    not in this version: {', '.join(sorted(gone))}")
    say("The tests of the data maps in C++: SKIPPED, no package has their sources")
    return findings


def _tests(suite: Any) -> list[Any]:
    return [one for part in suite for one in (_tests(part) if isinstance(part, unittest.TestSuite) else [part])]


def _run(suite: Suite, module: Any, test: unittest.TestCase) -> str:
    """Why a test fails; empty if it passes."""
    with mock.patch.multiple(module, **suite.replaced):
        result = unittest.TestResult()
        test.run(result)
    problems = result.errors + result.failures
    return problems[0][1].strip().splitlines()[-1] if problems else ""
