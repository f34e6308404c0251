"""The runner itself, on files that only ExecuTorch wrote."""

import numpy as np
import pytest

from tests.cpp.module_runner import ModuleRunnerError

NOT_FOUND = 0x20
ACCESS_FAILED = 0x22


@pytest.mark.long
@pytest.mark.parametrize("delegated", [False, True])
def test_two_data_files(lowered, module_runner, tmp_path, delegated):
    model = lowered.adapters(delegated=delegated)
    program = model.write(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"model.pte", "foundation.ptd", "adapter.ptd"}

    inputs = [x.numpy() for x in model.inputs()]
    [output] = module_runner(program, [tmp_path / "foundation.ptd", tmp_path / "adapter.ptd"], inputs)
    np.testing.assert_allclose(output, model.eager()[0].numpy(), atol=1e-6)


@pytest.mark.long
def test_named_method_and_integers(lowered, module_runner, tmp_path):
    model = lowered.decoder()
    program = model.write(tmp_path)
    for method in ("prefill", "decode"):
        inputs = [x.numpy() for x in model.inputs(method)]
        outputs = module_runner(program, [], inputs, method)
        for output, expected in zip(outputs, model.eager(method), strict=True):
            np.testing.assert_allclose(output, expected.numpy(), atol=1e-5)


def test_agrees_with_the_python_runtime(lowered, module_runner, stock_run, tmp_path):
    model = lowered.mlp(external=True)
    program = model.write(tmp_path)
    data = tmp_path / "_default_external_constant.ptd"
    [from_python] = stock_run(program, model.inputs(), data)
    [from_cpp] = module_runner(program, [data], [x.numpy() for x in model.inputs()])
    assert from_cpp.tobytes() == from_python.numpy().tobytes()


@pytest.mark.long
def test_missing_constant_is_reported(lowered, module_runner, tmp_path):
    model = lowered.adapters()
    program = model.write(tmp_path)
    with pytest.raises(ModuleRunnerError) as caught:
        module_runner(program, [tmp_path / "foundation.ptd"], [x.numpy() for x in model.inputs()])
    assert caught.value.code == NOT_FOUND


def test_missing_file_is_reported(module_runner, tmp_path):
    with pytest.raises(ModuleRunnerError) as caught:
        module_runner(tmp_path / "none.pte", [], [])
    assert caught.value.code == ACCESS_FAILED
