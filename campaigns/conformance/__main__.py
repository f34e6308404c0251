"""Run ExecuTorch's own tests on this library, and exchange files with its other versions: `make conformance`.

Tests and versions that are not available are listed with the reason.
"""

import argparse
import sys

from blobstore.lowering.export import quiet
from campaigns.children import say
from campaigns.conformance.versions import VERSIONS
from campaigns.conformance.versions import run as run_versions


def main() -> None:
    parser = argparse.ArgumentParser(prog="make conformance", description=__doc__)
    parser.add_argument("--versions", nargs="*", choices=VERSIONS, default=VERSIONS, help="of executorch")
    options = parser.parse_args()
    with quiet():
        from campaigns.conformance import suites
    findings = suites.run(say) + run_versions(say, tuple(options.versions))
    say(f"{findings} findings")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
