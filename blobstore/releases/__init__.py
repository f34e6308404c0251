"""Releases: files that belong together, published once, of which a device fetches only what it lacks.

    publish("build", "releases", name="assistant", version="1.4")
    pull("https://models.example.com/releases/assistant/latest/index.json", "model")
    gc("model")

See docs/releases.md. Servers, signatures and encoded forms need the `releases` extra.
"""

from __future__ import annotations

from blobstore.core.lazy import lazily, usable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from blobstore.publishing.publish import Published, publish
    from blobstore.publishing.push import Pushed, push
    from blobstore.publishing.sweep import Swept, sweep
    from blobstore.releases.device.installed import Removed
    from blobstore.releases.device.live import Followed, Release
    from blobstore.releases.device.pull import Pulled, gc, pull
    from blobstore.releases.index.index import File
    from blobstore.releases.sources.patience import Patience

__all__ = [
    "File",
    "Followed",
    "Patience",
    "Published",
    "Pulled",
    "Pushed",
    "Release",
    "Removed",
    "Swept",
    "gc",
    "publish",
    "pull",
    "push",
    "sweep",
]

_HOME = {
    ".publishing.publish": ("Published", "publish"),
    ".publishing.push": ("Pushed", "push"),
    ".publishing.sweep": ("Swept", "sweep"),
    "device.installed": ("Removed",),
    "device.live": ("Followed", "Release"),
    "device.pull": ("Pulled", "gc", "pull"),
    "index.index": ("File",),
    "sources.patience": ("Patience",),
}


if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error

    def __getattr__(name: str) -> object:
        return lazily(__name__, _HOME, name)


def __dir__() -> list[str]:
    return usable(__name__, __all__)
