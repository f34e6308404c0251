"""What a published file consists of and needs: a CycloneDX document beside each wheel and source distribution.

The packages that pip installs, their versions and licences come from an environment that has the wheel; the code that is
compiled in comes from the document inside the wheel (`.dist-info/sboms`, PEP 770), which the build wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

SPECIFICATION = "1.6"


def write(artifact: Path, wheel: Path, python: Path, folder: Path) -> Path:
    """Write the document of a published file.

    Args:
        artifact: the wheel or the source distribution.
        wheel: the wheel, or one that was made of this source distribution.
        python: an interpreter whose environment has the wheel, with the extras that the document shall cover.
        folder: where to write `<artifact>.cdx.json`.
    """
    document = environment(python)
    name = re.sub(r"[-_.]+", "-", wheel.name.split("-")[0])
    (component,) = (one for one in document["components"] if one["name"] == name)
    edges = {one["ref"]: one.get("dependsOn", []) for one in document["dependencies"]}
    reference = component["bom-ref"]
    required = reachable(edges, [one for one in edges[reference] if base(one) in requirements(wheel)])
    kept = reachable(edges, edges[reference]) - {reference}  # extras may name the package itself
    document["metadata"]["component"] = described(component, artifact, wheel)
    document["components"] = [
        {**local(one), "scope": "required" if one["bom-ref"] in required else "optional"}
        for one in document["components"]
        if one["bom-ref"] in kept
    ]
    document["dependencies"] = [one for one in document["dependencies"] if one["ref"] in {reference, *kept}]
    text = json.dumps(document, indent=2, sort_keys=True) + "\n"
    check(text, artifact.name)
    path = folder / f"{artifact.name}.cdx.json"
    path.write_text(text, encoding="utf-8")
    return path


def environment(python: Path) -> dict[str, Any]:
    """All packages of an environment, as CycloneDX's own tool describes it."""
    command = (sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--sv", SPECIFICATION)
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which adds packages to it
    done = subprocess.run([*command, str(python)], check=True, stdout=subprocess.PIPE, text=True, env=own)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def reachable(edges: dict[str, list[str]], starts: list[str]) -> set[str]:
    found: set[str] = set()
    waiting = list(starts)
    while waiting:
        if (one := waiting.pop()) not in found:
            found.add(one)
            waiting += edges.get(one, [])
    return found


def base(reference: str) -> str:
    return re.sub(r"[-_.]+", "-", reference.partition("==")[0]).lower()


def requirements(wheel: Path) -> set[str]:
    """The names of what a wheel needs without any extra."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (one for one in opened.namelist() if one.endswith(".dist-info/METADATA"))
        lines = opened.read(name).decode().splitlines()
    needed = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return {base(re.match(r"[\w.-]+", one)[0]) for one in needed if "extra ==" not in one}  # type: ignore[index]


def local(component: dict[str, Any]) -> dict[str, Any]:
    """A component without the address on this machine that it was installed from."""
    links = [one for one in component.get("externalReferences", []) if not one["url"].startswith("file:")]
    return {**component, "externalReferences": links}


def described(component: dict[str, Any], artifact: Path, wheel: Path) -> dict[str, Any]:
    """The component of a published file: its hashes, and what the wheel has inside."""
    content = artifact.read_bytes()
    hashes = {"SHA-256": hashlib.sha256(content), "SHA-512": hashlib.sha512(content)}
    inside = [
        one for one in embedded(wheel).get("components", []) if one.get("description", "").startswith("compiled in")
    ]
    return {
        **local(component),
        "type": "library",
        "purl": f"pkg:pypi/{component['name']}@{component['version']}?file_name={artifact.name}",
        "hashes": [{"alg": name, "content": digest.hexdigest()} for name, digest in hashes.items()],
        **({"components": inside} if inside else {}),
    }


def embedded(wheel: Path) -> dict[str, Any]:
    """The document inside a wheel."""
    with zipfile.ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if re.search(r"\.dist-info/sboms/[^/]+\.cdx\.json$", name)]
        if len(names) != 1:
            sys.exit(f"{wheel.name}: expected one document in .dist-info/sboms, found {names}")
        text = opened.read(names[0]).decode()
    check(text, f"{wheel.name}: {names[0]}")
    document: dict[str, Any] = json.loads(text)
    return document


def check(text: str, name: str) -> None:
    """A document follows the schema."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    if error := JsonStrictValidator(SchemaVersion.from_version(SPECIFICATION)).validate_str(text):
        sys.exit(f"{name}: not a CycloneDX document of version {SPECIFICATION}: {error}")
