"""`blobstore adapters`."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as load

from blobstore import save_file
from blobstore.adapters import foundation_fingerprint, read_adapter, save_adapter
from tests.adapters.llama import hf_model, save_peft
from tests.adapters.nets import adapter_of, write_peft
from tests.helpers.terminal import printed


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    return functools.partial(printed, "adapters")


@pytest.fixture
def files(tmp_path: Path) -> None:
    tensors = {"l.0.weight": torch.ones(24, 16), "l.1.base.weight": torch.ones(8, 24)}
    save_file(tensors, tmp_path / "f.ptd")
    save_file({**tensors, "more": torch.ones(1)}, tmp_path / "g.ptd")
    save_adapter(tmp_path / "a.ptd", adapter_of(1), foundation=tmp_path / "f.ptd", scale=1.5, metadata={"made": "here"})
    save_file(adapter_of(2), tmp_path / "unbound.ptd")


def test_they_fit(run: Any, files: None) -> None:
    """The tables show each tensor with its shape, and for adapters the rank (D2)."""
    lines = run("f.ptd", "a.ptd", "unbound.ptd").splitlines()
    assert lines[0] == f"f.ptd: foundation {foundation_fingerprint('f.ptd')}, 2 keys, 2,304 bytes"
    assert "l.1.base.weight\tfloat\t8 x 24\t768" in lines
    assert "a.ptd: adapter of 2 modules, 864 bytes, scale 1.5" in lines
    assert "l.0.lora_b.weight\tfloat\t24 x 3\t288\t3" in lines
    assert "fits; made for this foundation" in lines
    assert "unbound.ptd: adapter of 2 modules, 864 bytes, scale not recorded" in lines
    assert any(line.startswith("fits; not bound: it does not record") for line in lines)


def test_json(run: Any, files: None) -> None:
    """`--json` has the same facts."""
    found = json.loads(run("f.ptd", "a.ptd", "--json"))
    assert found["foundation"]["fingerprint"] == foundation_fingerprint("f.ptd")
    assert found["foundation"]["tensors"][0]["sizes"] == [24, 16]
    adapter = found["adapters"][0]
    assert (adapter["fits"], adapter["scale"], adapter["problems"]) == (True, 1.5, [])
    assert adapter["metadata"] == {"made": "here"}
    assert [pair["rank"] for pair in adapter["pairs"]] == [3, 3]


def test_another_foundation(run: Any, files: None) -> None:
    """Exit code 1 and the reason; an adapter that records no foundation may fit (D2)."""
    output = run("g.ptd", "a.ptd", "unbound.ptd", code=1)
    assert "DOES NOT FIT; made for another foundation" in output
    assert f"  made for foundation {foundation_fingerprint('f.ptd')}, but g.ptd is" in output
    assert "fits; not bound" in output
    assert json.loads(run("g.ptd", "a.ptd", "--json", code=1))["adapters"][0]["fits"] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"l.0.lora_a.weight": torch.ones(3, 15)}, "'l.0.weight' is [24, 16], but"),
        ({"x.lora_a": torch.ones(3, 15), "x.lora_b": torch.ones(2, 3)}, "module 'x' is not in f.ptd, which has no"),
        (
            {"l.0.lora_a.weight": torch.full((3, 16), float("nan"))},
            "'l.0.lora_a.weight' has values that are not finite",
        ),
    ],
)
def test_misfits(run: Any, files: None, tmp_path: Path, change: Any, message: str) -> None:
    """The reason names the tensor."""
    tensors = {name: t for name, t in {**adapter_of(1), **change}.items() if t is not None}
    save_file(tensors, tmp_path / "bad.ptd")
    output = run("f.ptd", "bad.ptd", code=1)
    assert message in output
    assert "DOES NOT FIT" in output


def test_errors_are_one_line(run: Any, files: None, tmp_path: Path) -> None:
    """Files that cannot be read, and files in the wrong place."""
    (tmp_path / "torn.ptd").write_bytes((tmp_path / "a.ptd").read_bytes()[:500])
    for arguments, name in (
        (("f.ptd", "torn.ptd"), "torn.ptd"),
        (("f.ptd", "none.ptd"), "none.ptd"),
        (("a.ptd", "a.ptd"), "a.ptd: this file is an adapter, not a foundation"),
        (("f.ptd", "g.ptd"), "g.ptd: not an adapter"),
    ):
        output = run(*arguments, code=3)
        (error,) = [line for line in output.splitlines() if line.startswith("blobstore: ")]
        assert error.startswith(f"blobstore: {name}")
    run("f.ptd", code=2)


def test_names_are_printed_harmlessly(run: Any, tmp_path: Path) -> None:
    """Markup and escape sequences in a name have no effect on the terminal."""
    name = "l [bold red]x[/] \x1b[31m"
    save_file({f"{name}.weight": torch.ones(2, 2)}, tmp_path / "f.ptd")
    save_file(
        {f"{name}.lora_a.weight": torch.ones(1, 2), f"{name}.lora_b.weight": torch.ones(2, 1)}, tmp_path / "a.ptd"
    )
    output = run("f.ptd", "a.ptd")
    assert "[bold red]" in output
    assert "\x1b" not in output


def test_import_and_export(run: Any, tmp_path: Path) -> None:
    """PEFT's files come back to the bit (L2)."""
    save_peft(tmp_path / "peft")
    save_file(dict(hf_model().state_dict()), tmp_path / "f.ptd")
    assert "a.ptd: " in run("import", "peft", "-o", "a.ptd", "--foundation", "f.ptd")
    assert "fits; made for this foundation" in run("list", "f.ptd", "a.ptd")
    run("import", "peft", "-o", "b.ptd", "--foundation", "f.ptd", "--like", "a.ptd", "--round")
    run("export", "b.ptd", "-o", "again")
    left, right = (load(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "again"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    output = run("import", "f.ptd", "-o", "c.ptd", "--foundation", "f.ptd", code=3)
    assert "adapter_config.json" in output
    run("import", "peft", "-o", "c.ptd", code=2)
    run("import", "peft", "-o", "c.ptd", "--program", "x.pte", code=2)
    run("import", "peft", "-o", "c.ptd", "--foundation", "f.ptd", "--exported-with", "peft", code=2)
    assert not (tmp_path / "c.ptd").exists()


def test_names_of_modules(run: Any, tmp_path: Path) -> None:
    """Pairs and files of them; what is no map of names is an error (L2)."""
    write_peft(tmp_path / "peft", adapter_of(1))
    weights = {f"net.{name}.weight": torch.ones(*sizes) for name, sizes in {"a": (24, 16), "b": (8, 24)}.items()}
    save_file(weights, tmp_path / "f.ptd")
    common = ("import", "peft", "-o", "a.ptd", "--foundation", "f.ptd", "--names")
    run(*common, "l.0=net.a", "--names", "base_model.model.l.1=net.b")
    assert [pair.module for pair in read_adapter(tmp_path / "a.ptd").pairs] == ["net.a", "net.b"]
    (tmp_path / "names.json").write_text('{"l.0": "net.a"}')
    (tmp_path / "a.ptd").unlink()
    run(*common, "names.json", "--names", "l.1=net.b")
    assert [pair.module for pair in read_adapter(tmp_path / "a.ptd").pairs] == ["net.a", "net.b"]
    for text in ("[]", "{", '{"l.0": 3}'):
        (tmp_path / "bad.json").write_text(text)
        assert "bad.json" in run(*common, "bad.json", code=3)
    assert "none.json" in run(*common, "none.json", code=3)
    assert "names has 'nothing'" in run(*common, "nothing=net.a", code=3)
    run(*common, "l.0=net.a", "--names", "names.json", code=2)
    run("import", "peft", "-o", "a.ptd", "--program", "x.pte", "--exported-with", "peft", "--names", "a=b", code=2)


def test_combine(run: Any, files: None, tmp_path: Path) -> None:
    """With strengths; `list` is a command and the default."""
    save_adapter(tmp_path / "b.ptd", adapter_of(2), foundation=tmp_path / "f.ptd", scale=3)
    run("combine", "a.ptd", "b.ptd=0.5", "-o", "both.ptd", "--foundation", "f.ptd")
    assert "l.0.lora_b.weight\tfloat\t24 x 6" in run("f.ptd", "both.ptd")
    both = read_adapter(tmp_path / "both.ptd")
    assert both.scale == 1.5
    assert torch.equal(torch.tensor(both.tensors["l.0.lora_b.weight"][:, 3:]), adapter_of(2)["l.0.lora_b.weight"])
    assert "records no foundation" in run("combine", "unbound.ptd", "-o", "c.ptd", "--foundation", "f.ptd", code=3)
    assert "give like=" in run("combine", "-o", "c.ptd", "--foundation", "f.ptd", code=3)
    run("combine", "-o", "none.ptd", "--foundation", "f.ptd", "--like", "a.ptd")
    assert not any(array.any() for array in read_adapter(tmp_path / "none.ptd").tensors.values())
    run("combine", "a.ptd=much", "-o", "c.ptd", "--foundation", "f.ptd", code=2)
