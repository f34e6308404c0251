"""One target under atheris, until libFuzzer ends it: `python -m campaigns.fuzz.coverage TARGET [libFuzzer's options]`."""

from __future__ import annotations

import sys

import atheris

_PACKAGES = ["blobstore"]
with atheris.instrument_imports(include=_PACKAGES):
    from campaigns.fuzz import targets
    from campaigns.fuzz.budget import Budget
    from campaigns.fuzz.mutators import MUTATORS


def main() -> None:
    name = sys.argv[1]
    if name == "checkpoint":
        with atheris.instrument_imports(include=_PACKAGES):
            import blobstore.training.checkpoint  # noqa: F401 - it imports torch, and the others can do without
    budget = Budget(slower=3)  # counting branches takes time; what is found is tried again without

    def test(data: bytes) -> None:
        with budget:
            targets.check(name, data)

    options = {}
    if mutate := MUTATORS.get(name):
        options["custom_mutator"] = lambda data, most, seed: mutate(data, most, seed, atheris.Mutate)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], test, **options)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
