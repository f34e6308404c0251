"""References: where a release is, in one text."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, urlsplit

from blobstore.core.errors import ReleaseError, TrustError
from blobstore.core.memory.mapped_file import as_path
from blobstore.core.text import printable

__all__ = ["Reference", "check_named", "is_loopback", "parse_reference"]

_BUCKETS = ("s3://", "gs://", "az://")
_PIN = re.compile(r"@sha256:([0-9a-f]{64})\Z")
_HOST = re.compile(r"^(localhost|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+|\[[0-9a-fA-F:]+\]|[A-Za-z0-9-]+(?=:))(:[0-9]{1,5})?$")
_REPOSITORY = re.compile(r"^[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*$")
_TAG = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")
_VERSION = re.compile(r"^v?[0-9]")


@dataclass(frozen=True)
class Reference:
    """Where a release is.

    Attributes:
        kind: "registry", "web", "layout", "bucket" or "folder".
        text: as the user wrote it.
        place: the host of a registry, the URL of an index or of its folder, or the path of one.
        repository: in a registry, the path of the repository.
        tag: the tag, in a registry or a layout; "" if only the pin counts.
        pin: the SHA-256 that must be found: of the manifest in a registry or a layout, of the index elsewhere.
    """

    kind: Literal["registry", "web", "layout", "bucket", "folder"]
    text: str
    place: str
    repository: str = ""
    tag: str = ""
    pin: str | None = None

    @property
    def named(self) -> tuple[str, str]:
        """The name and the version of the release that this says, "" for what it does not say.

        A tag, and a folder NAME/VERSION of an index, say a version if they begin with a digit, perhaps after a "v"; others,
        such as "latest", stand for whatever is there.
        """
        name, version = "", self.tag
        if self.kind == "web":
            *_, name, version, _ = ("", "", *(unquote(part) for part in urlsplit(self.place).path.split("/")))
        elif self.kind == "bucket":
            *_, name, version = self.place.removesuffix("/index.json").rstrip("/").split("/")
        elif self.kind == "folder":
            path = os.path.abspath(self.place)  # noqa: PTH100 - whatever the text is
            folder = path if os.path.isdir(path) else os.path.dirname(path)  # noqa: PTH112, PTH120 - likewise
            name, version = os.path.basename(os.path.dirname(folder)), os.path.basename(folder)  # noqa: PTH119, PTH120
        is_version = bool(_VERSION.match(version))
        return (name if is_version or version == "latest" else "", version if is_version else "")


def check_named(reference: Reference, name: str, version: str) -> None:
    """Raise TrustError if a reference says another version than that of the release that was found there, or another name.

    A signature says who made a release, and not that it is the one that was asked for.
    """
    expected_name, expected = reference.named
    # a tag has no "+"
    same = re.sub(r"[+_]", "-", expected.removeprefix("v")) == re.sub(r"[+_]", "-", version.removeprefix("v"))
    if (expected and not same) or expected_name not in {"", name}:
        wanted = " ".join(filter(None, (expected_name, expected)))
        raise TrustError(f"{printable(reference.text)}: expected {printable(wanted)}, found {name} {version}")


def parse_reference(text: str | os.PathLike[str]) -> Reference:
    """Read a reference.

    `registry/name:tag` and `registry/name@sha256:…` are in a registry, whose host has a dot, a port, or is localhost.
    `https://host/…/index.json` is on a web server, `s3://bucket/…/NAME/VERSION` in a bucket. `oci:DIR:tag` is a folder in the image layout of OCI. Anything else is the
    path of an index, or of the folder that holds `index.json`. Each can end in `@sha256:…`.

    Raises:
        ReleaseError: it has another form, or it is a URL without HTTPS that leads to another machine.
    """
    full = str(as_path(text)) if isinstance(text, os.PathLike) else text
    try:
        sound = isinstance(full, str) and full != "" and b"\0" not in os.fsencode(full)
    except UnicodeError:
        sound = False
    if not sound:
        raise ReleaseError(f"{full!r} is not a reference to a release")
    match = _PIN.search(full)
    pin, rest = (match[1], full[: match.start()]) if match else (None, full)
    return _parsed(full, rest, pin)


def _parsed(full: str, rest: str, pin: str | None) -> Reference:
    if rest.startswith(("http://", "https://")):
        check_url(rest)
        return Reference("web", full, rest, pin=pin)
    if rest.startswith(_BUCKETS):
        if len(rest.removesuffix("/index.json").rstrip("/").split("/")) < 5:
            raise ReleaseError(f"{full!r}: expected the URL of a release, such as s3://bucket/releases/NAME/VERSION")
        return Reference("bucket", full, rest, pin=pin)
    if rest.startswith("oci:"):
        return _layout(full, rest[4:], pin)
    host, slash, name = rest.partition("/")
    if slash and not host.startswith(".") and _HOST.fullmatch(host) and not os.path.exists(rest):  # noqa: PTH110 - whatever the text is
        repository, _, tag = name.partition(":")
        if not _REPOSITORY.fullmatch(repository) or (tag and not _TAG.fullmatch(tag)) or len(repository) > 255:
            raise ReleaseError(f"{full!r}: {name!r} is not the name and tag of a repository in a registry")
        try:
            _ = urlsplit(f"//{host}").port  # an address in brackets, and a port, may be none
        except ValueError as error:
            raise ReleaseError(f"{full!r}: {host!r} is not a host: {error}") from None
        return Reference("registry", full, host, repository, tag or ("" if pin else "latest"), pin)
    return Reference("folder", full, rest, pin=pin)


def _layout(full: str, rest: str, pin: str | None) -> Reference:
    place, colon, tag = rest.rpartition(":")
    if not colon:
        place, tag = rest, ""
    if not place or (tag and not _TAG.fullmatch(tag)) or not (tag or pin):
        raise ReleaseError(f"{full!r}: expected oci:DIR:tag")
    return Reference("layout", full, place, tag=tag, pin=pin)


def check_url(url: str) -> None:
    """Raise ReleaseError unless a URL is of HTTPS, or of HTTP on this machine."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ReleaseError(f"{printable(url)}: not a URL: {error}") from None
    if parts.scheme not in {"http", "https"} or not host:
        raise ReleaseError(f"{url}: not a URL of a web server")
    if parts.username is not None or parts.password is not None:
        raise ReleaseError(f"{parts.scheme}://…@{host}: credentials belong into Docker's config.json, not into a URL")
    if parts.scheme == "http" and not is_loopback(host):
        raise ReleaseError(f"{url}: refused without HTTPS; only this machine itself may be asked by HTTP")


def is_loopback(host: str) -> bool:
    """Whether a host, without its port, is this machine."""
    host = host.strip("[]").lower()
    return host in {"localhost", "::1"} or bool(re.match(r"^127(\.[0-9]{1,3}){3}$", host))
