"""User names and passwords, from Docker's config.json, where every tool for registries keeps them.

Format: https://docs.docker.com/reference/cli/docker/login/ and https://github.com/docker/docker-credential-helpers
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Credentials", "credentials_for"]

_LARGEST = 1 << 20
_HELPER = re.compile(r"^[A-Za-z0-9._-]{1,64}$")


@dataclass(frozen=True)
class Credentials:
    """What a user logs in with.

    Attributes:
        user, password: for Basic authentication, and to get a token.
        identity: a refresh token instead, or "".
    """

    user: str
    password: str
    identity: str = ""

    def __repr__(self) -> str:
        return f"<Credentials of {self.user or 'an identity token'}>"

    @property
    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def credentials_for(host: str) -> Credentials | None:
    """The credentials of a host, with its port if it has one; None without any.

    Read from `$DOCKER_CONFIG/config.json`, by default `~/.docker/config.json`. A file that cannot be read counts as
    empty, as it does for Docker.
    """
    folder = os.environ.get("DOCKER_CONFIG") or os.path.join(os.path.expanduser("~"), ".docker")  # noqa: PTH111, PTH118
    try:
        with Path(folder, "config.json").open("rb") as file:
            config = json.loads(file.read(_LARGEST))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    helpers = config.get("credHelpers")
    helper = helpers.get(host) if isinstance(helpers, dict) else None
    helper = helper or config.get("credsStore")
    if (
        isinstance(helper, str)
        and _HELPER.fullmatch(helper)
        and (credentials := _from_helper(helper, host)) is not None
    ):
        return credentials
    auths = config.get("auths")
    for name, entry in auths.items() if isinstance(auths, dict) else ():
        named = name.split("://", 1)[-1].split("/", 1)[0]
        if named == host and isinstance(entry, dict) and (credentials := _from_entry(entry)) is not None:
            return credentials
    return None


def _from_entry(entry: dict[str, Any]) -> Credentials | None:
    def text(field: str) -> str:
        value = entry.get(field)
        return value if isinstance(value, str) else ""

    user, password = text("username"), text("password")
    if auth := text("auth"):
        try:
            user, _, password = base64.b64decode(auth, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return None
    identity = text("identitytoken")
    return Credentials(user, password.strip("\0"), identity) if user or identity else None


def _from_helper(helper: str, host: str) -> Credentials | None:
    try:
        done = subprocess.run(  # noqa: S603 - the user names the helper in their own configuration
            [f"docker-credential-{helper}", "get"],
            input=host.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=30,
            check=True,
        )
        answer = json.loads(done.stdout)
        user, secret = answer["Username"], answer["Secret"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(user, str) or not isinstance(secret, str):
        return None
    return Credentials("", "", secret) if user == "<token>" else Credentials(user, secret)
