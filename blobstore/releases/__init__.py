"""Releases: files that belong together, published once, of which a device fetches only what it lacks.

    publish("build", "releases", name="assistant", version="1.4", base="1.3")
    pull("https://models.example.com/releases/assistant/latest/index.json", "model")
    gc("model")

See docs/releases.md. Servers, signatures and encoded forms need the `releases` extra.
"""

from __future__ import annotations

from blobstore.core.lazy import lazily

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from blobstore.releases.installed import Collected
    from blobstore.releases.live import Followed, Release
    from blobstore.releases.planning import Fetch, Plan, commit, plan
    from blobstore.releases.publishing import Published, compact, publish
    from blobstore.releases.pulling import Pulled, gc, pull
    from blobstore.releases.pushing import Pushed, push
    from blobstore.releases.sources import Patience

__all__ = [
    "Collected",
    "Fetch",
    "Followed",
    "Patience",
    "Plan",
    "Published",
    "Pulled",
    "Pushed",
    "Release",
    "commit",
    "compact",
    "gc",
    "plan",
    "publish",
    "pull",
    "push",
]

_HOME = {
    "Collected": "installed",
    "Fetch": "planning",
    "Followed": "live",
    "Patience": "sources",
    "Plan": "planning",
    "Published": "publishing",
    "Pulled": "pulling",
    "Pushed": "pushing",
    "Release": "live",
    "commit": "planning",
    "compact": "publishing",
    "gc": "pulling",
    "plan": "planning",
    "publish": "publishing",
    "pull": "pulling",
    "push": "pushing",
}


def __getattr__(name: str) -> Any:
    return lazily(__name__, _HOME, name)
