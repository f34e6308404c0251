"""One target under atheris, until libFuzzer ends it: `python -m campaigns.fuzz.coverage TARGET [libFuzzer's options]`."""

import hashlib
import sys
from pathlib import Path

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
            import blobstore.training.checkpoint  # noqa: F401 - it imports torch, which the other targets do not need
    budget = Budget(slower=3)  # counting branches takes time; findings are tried again without it

    prefix = next(word.partition("=")[2] for word in sys.argv if word.startswith("-artifact_prefix="))

    def test(data: bytes) -> None:
        try:
            with budget:
                targets.check(name, data)
        except BaseException:  # libFuzzer does not always write the file itself if the mutator is in Python
            Path(prefix + hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)
            raise

    options = {}
    if mutate := MUTATORS.get(name):
        options["custom_mutator"] = lambda data, most, seed: mutate(data, most, seed, atheris.Mutate)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], test, **options)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
