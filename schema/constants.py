"""Write the constants of both languages for C++: `make constants`."""

from __future__ import annotations

import re
from pathlib import Path

from blobstore.core import constants

HEADER = Path(__file__).resolve().parents[1] / "runtime_bindings" / "src" / "format" / "constants.h"


def header() -> str:
    """The text of the header."""
    lines = [
        "// Made from blobstore/core/constants.py by `make constants`; do not edit.",
        "#pragma once\n\n#include <cstdint>\n\nnamespace blobstore::internal {\n",
    ]
    source = Path(constants.__file__).read_text(encoding="utf-8")
    for name, comment in re.findall(r"^([A-Z_]+) = .*?(?:  #( .*))?$", source, re.MULTILINE):
        value = getattr(constants, name)
        camel = "k" + name.title().replace("_", "")
        text = value.decode() if isinstance(value, bytes) else value
        lines += [f"//{comment}"] if comment else []
        lines.append(
            f'inline constexpr char {camel}[] = "{text}";'
            if isinstance(text, str)
            else f"inline constexpr uint64_t {camel} = {text};"
        )
    return "\n".join([*lines, "\n} // namespace blobstore::internal\n"])


if __name__ == "__main__":
    HEADER.write_text(header(), encoding="utf-8")
