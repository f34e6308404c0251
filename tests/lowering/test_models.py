"""The shared models give the same outputs in the stock runtime as in torch."""

import pytest
import torch

pytestmark = pytest.mark.long


def _cases():
    for delegated in (False, True):
        yield "mlp", {"delegated": delegated}
        yield "conv", {"delegated": delegated}
        yield "decoder", {"delegated": delegated}
    yield "channels_last", {}
    yield "counter", {}


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), list(_cases()))
def test_stock_runtime_matches_eager(lowered, stock_run, name, options):
    model = getattr(lowered, name)(**options)
    for method in model.methods:
        expected = [torch.arange(1, 65) * 2.0] if name == "counter" else model.eager(method)
        outputs = stock_run(model.pte, model.inputs(method), method=method)
        torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-5)
