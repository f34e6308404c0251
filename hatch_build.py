"""Writes into the wheel what it consists of (CycloneDX, PEP 770): this project's own code and nothing else.

What pip installs with it is in the wheel's metadata; `make dist` writes a document with the versions and hashes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Sbom(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling for the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        metadata = self.metadata.core
        purl = f"pkg:pypi/{metadata.name}@{self.metadata.version}"
        component = {
            "type": "library",
            "bom-ref": purl,
            "name": metadata.name,
            "version": self.metadata.version,
            "licenses": [{"license": {"id": metadata.license_expression}}],
            "purl": purl,
        }
        document = {
            "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {"component": component},
            "compositions": [{"aggregate": "complete", "assemblies": [purl]}],
        }
        path = self._path()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._path().unlink(missing_ok=True)

    def _path(self) -> Path:
        return Path(self.directory, f"{self.metadata.core.name}.cdx.json")
