"""`blobstore adapters`: what they hold and whether they fit; PEFT's in and out; several as one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from blobstore.cli import ERROR, exits
from blobstore.cli.options import AsJson, file_argument, file_option
from blobstore.cli.output import counted, out, print_error, print_json, print_table, say
from blobstore.core.errors import AdapterError, BlobStoreError, InvalidFileError
from blobstore.core.memory.mapped_file import same_file
from blobstore.core.tools.folders import files_of

if TYPE_CHECKING:
    from blobstore.adapters import AdapterInfo, AdaptersInfo, FoundationInfo, NamedTensor

__all__ = ["app"]


Foundation = Annotated[
    list[Path],
    file_option(
        "--foundation", help="The data file (.ptd) of the foundation; repeat it for several that belong together."
    ),
]


class _WithDefault(typer.core.TyperGroup):
    """A group whose command `list` may be left out: `blobstore adapters foundation.ptd a.ptd`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["list", *args]
        return list(super().parse_args(ctx, args))


app = typer.Typer(
    name="adapters",
    cls=_WithDefault,
    help="List and check LoRA adapters, import and export those of PEFT, and combine several. `list` is the default.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("list")
@exits.handled
def listed(
    foundation: Annotated[
        Path, file_argument("The data file (.ptd) of the foundation; or a folder of several that belong together.")
    ],
    files: Annotated[
        list[Path], file_argument("Data files (.ptd) of adapters, and folders of them.", metavar="ADAPTER")
    ],
    as_json: AsJson = False,
) -> None:
    """List what a foundation and its LoRA adapters hold, and check that they fit. Exit code 1 if one does not.

    An adapter fits if its pairs are complete and finite, the foundation has their modules with the same shapes, and
    the adapter was made for this foundation. An adapter that does not record its foundation is listed as not bound.
    Exit code 3 if a file is no adapter or cannot be read; the others are listed anyway.
    """
    base = files_of(foundation, (".ptd",))
    given = _adapters(files, base)
    from blobstore.adapters import AdaptersInfo, inspect_adapters  # needs the native package, as no other command does

    code, listed = 0, inspect_adapters(base, [])
    for path in given:
        try:
            info = inspect_adapters(base, path)
        except BlobStoreError as error:
            print_error(error)
            code = ERROR
        else:
            listed = AdaptersInfo(info.foundation, (*listed.adapters, *info.adapters))
    if as_json:
        print_json(listed)
    else:
        _print_adapters(listed)
    if not all(adapter.fits for adapter in listed.adapters):
        code = code or exits.NO
    if code:
        raise typer.Exit(code)


def _adapters(paths: list[Path], base: list[Path]) -> list[Path]:
    """The data files of paths, each once; of a folder, those that are not of the foundation."""
    given: dict[Path, None] = {}
    for path in paths:
        for file in files_of(path, (".ptd",)):
            if file == path or not any(same_file(file, one) for one in base):
                given[file] = None
    if not given:
        raise AdapterError(f"{', '.join(map(str, paths))}: there is no adapter beside the foundation")
    return list(given)


def _print_adapters(info: AdaptersInfo) -> None:
    base = info.foundation
    say(
        f"{', '.join(map(str, base.paths))}: foundation {base.fingerprint}, {counted(base.keys, 'key')}, {base.nbytes:,} bytes"
    )
    columns = ("tensor", "dtype", "shape", "bytes", "rank")
    print_table("", columns[:-1], [_tensor_row(tensor) for tensor in base.tensors])
    for adapter in info.adapters:
        out.print()
        scale = "not recorded" if adapter.scale is None else f"{adapter.scale:g}"
        say(f"{adapter.path}: adapter of {counted(adapter.pairs, 'module')}, {adapter.nbytes:,} bytes, scale {scale}")
        ranks = {name: pair.rank for pair in adapter.pairs for name in (pair.a, pair.b)}
        rows = [(*_tensor_row(tensor), ranks.get(tensor.name, "")) for tensor in adapter.tensors]
        print_table("", columns, rows)
        say(f"{'fits' if adapter.fits else 'DOES NOT FIT'}; {_made_for(adapter, base)}")
        for problem in adapter.problems:
            say(f"  {problem}")


def _tensor_row(tensor: NamedTensor) -> tuple[str, str, str, int]:
    shape = " x ".join(map(str, tensor.sizes)) or "scalar"
    return tensor.name, tensor.scalar_type.name.lower(), shape, tensor.nbytes


def _made_for(adapter: AdapterInfo, base: FoundationInfo) -> str:
    if adapter.foundation is None:
        return "not bound: it does not record the foundation that it was made for"
    return "made for this foundation" if adapter.foundation == base.fingerprint else "made for another foundation"


@app.command("import")
@exits.handled
def from_peft(
    source: Annotated[
        str, typer.Argument(metavar="DIR", help="The folder that PEFT wrote, or USER/NAME in the Hub's local cache.")
    ],
    output: Annotated[Path, file_option("--output", "-o", help="The adapter (.ptd) to write.")],
    foundation: Annotated[
        list[Path] | None,
        file_option(
            "--foundation",
            help="The data file (.ptd) of the foundation; repeat it for several that belong together. Needed without "
            "--program.",
        ),
    ] = None,
    like: Annotated[
        Path | None,
        file_option(
            help="An adapter of the programs: its tensors and shapes; what is missing is filled up with zeros."
        ),
    ] = None,
    params: Annotated[
        Path | None, file_option(help="The params.json of a Llama's export, if the foundation has no rotary tables.")
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE=MODULE",
            help="A module of PEFT and that of the programs, if it is not found by itself; repeat it, or give a .json file "
            "that maps them.",
        ),
    ] = None,
    round_values: Annotated[
        bool,
        typer.Option(
            "--round",
            help="Allow numbers to be rounded to the dtype of the programs, or for modules with scales of their own.",
        ),
    ] = False,
    program: Annotated[
        Path | None,
        file_option(
            help="A program (.pte) of ExecuTorch's own exporter, whose keys the adapter gets, instead of names."
        ),
    ] = None,
    exported_with: Annotated[
        Path | None, file_option(metavar="DIR", help="The folder of the adapter that the --program was exported with.")
    ] = None,
) -> None:
    """Write an adapter of PEFT as a data file for the programs on a foundation.

    What cannot be honoured is refused by its name.
    """
    from blobstore.adapters import import_for_program, import_peft

    if program is not None:
        if exported_with is None or foundation or like is not None or round_values or names:
            raise typer.BadParameter(
                "needs --exported-with, and neither --foundation nor --like nor --names nor --round",
                param_hint="--program",
            )
        nbytes = import_for_program(source, output, program=program, exported_with=exported_with, params=params)
    else:
        if not foundation or exported_with is not None:
            raise typer.BadParameter("give --foundation, or --program and --exported-with", param_hint="--foundation")
        nbytes = import_peft(
            source,
            output,
            foundation=foundation,
            like=like,
            params=params,
            names=_names(names or []),
            round_values=round_values,
        )
    say(f"{output}: {nbytes:,} bytes")


def _names(given: list[str]) -> dict[str, str]:
    """What `--names` maps: pairs, and the contents of files."""
    from blobstore.adapters.params_json import read_json

    names: dict[str, str] = {}
    for one in given:
        module, equals, other = one.partition("=")
        found = {module: other} if equals else read_json(one)
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
            raise InvalidFileError(one, "expected a JSON object that maps names of modules to names of modules")
        if twice := names.keys() & found.keys():
            raise typer.BadParameter(f"module {min(twice)!r} occurs twice", param_hint="--names")
        names |= found
    return names


@app.command("export")
@exits.handled
def to_peft(
    source: Annotated[Path, file_argument("The adapter (.ptd).", metavar="ADAPTER")],
    output: Annotated[Path, file_option("--output", "-o", metavar="DIR", help="The folder for PEFT's files.")],
    base_model: Annotated[str | None, typer.Option(help="The base model that the configuration names.")] = None,
    params: Annotated[
        Path | None, file_option(help="The params.json of a Llama's export, for an adapter that was not imported.")
    ] = None,
) -> None:
    """Write an adapter as PEFT does: adapter_config.json and adapter_model.safetensors.

    The tensors of an adapter that was imported come back to the bit; the configuration says what PEFT needs to load them.
    """
    from blobstore.adapters import export_peft

    nbytes = export_peft(source, output, base_model=base_model, params=params)
    say(f"{output}: {nbytes:,} bytes")


@app.command()
@exits.handled
def combine(
    output: Annotated[Path, file_option("--output", "-o", help="The adapter (.ptd) to write.")],
    foundation: Foundation,
    adapters: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ADAPTER[=STRENGTH]...", help="Adapters (.ptd), each with how much of it: 1 by default."
        ),
    ] = None,
    like: Annotated[Path | None, file_option(help="An adapter of the programs: its tensors, shapes and scale.")] = None,
) -> None:
    """Write several adapters as one, whose rank is the sum of theirs."""
    from blobstore.adapters import combine_adapters

    nbytes = combine_adapters([_strength(one) for one in adapters or []], output, foundation=foundation, like=like)
    say(f"{output}: {nbytes:,} bytes")


def _strength(text: str) -> tuple[str, float]:
    path, equals, number = text.rpartition("=")
    if not equals:
        return text, 1.0
    try:
        return path, float(number)
    except ValueError:
        raise typer.BadParameter(f"expected ADAPTER or ADAPTER=STRENGTH, got {text!r}", param_hint="ADAPTER") from None
