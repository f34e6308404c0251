"""The moving picture at the top of README.md: a word changes while the demo's programs run.

`make film` runs the demo if it did not run yet, changes the word once more, and draws `docs/img/live.svg` with what the programs
computed. It moves by CSS alone, so that it does so inside an <img>; where motion is not wanted, it shows the change.
"""

from __future__ import annotations

import argparse
import html
from collections.abc import Sequence
from pathlib import Path

from examples.demo.live import SENTENCES, LiveResult, run_live
from examples.demo.models import ENCODER_LENGTHS

OUT = Path(__file__).parents[1] / "docs" / "img" / "live.svg"
SECONDS = 10
PHASES = ((0, 33), (33, 72), (72, 100))
"""As trained, changed, reverted: in percent of the time."""

_STYLE = """
text { font: 15px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #e6edf3; white-space: pre; }
.faint { fill: #9aa7b4; } .small { font-size: 13px; } .code { fill: #a5d6ff; } .number { font-size: 26px; font-weight: 700; }
.p0, .p1, .p2 { animation: SECONDSs infinite step-end; } .p0, .p2 { opacity: 0; }
.bar { fill: #3fb950; transform-box: fill-box; transform-origin: left; animation: bar SECONDSs infinite; }
"""


def film(result: LiveResult) -> str:
    """The picture of what the programs computed."""
    states = [result.before, result.updated, result.reverted]
    style = _STYLE.replace("SECONDS", str(SECONDS)) + "".join(_keyframes(number) for number in range(len(PHASES)))
    low, high = min(result.before), max(result.updated)
    style += f"@keyframes bar {{ 0%, {PHASES[1][0]}% {{ transform: scaleX({low / high:.3f}); }} "
    style += f"{PHASES[1][0] + 4}%, {PHASES[2][0]}% {{ transform: scaleX(1); }} "
    style += f"{PHASES[2][0] + 4}%, 100% {{ transform: scaleX({low / high:.3f}); }} }}\n"
    style += "@media (prefers-reduced-motion: reduce) { .p0, .p1, .p2, .bar { animation: none; } }"
    lines = [
        _text(28, 42, "three programs on one cache; nothing is loaded again", "faint"),
        *_commands(result.update_seconds),
        _text(28, 168, f"similarity of “{SENTENCES[0]}” and “{SENTENCES[1]}”", "faint"),
    ]
    for column, length in enumerate(result.lengths):
        lines += _program(28 + 174 * column, f"minilm-{length}.pte", [state[column] for state in states])
    body = "\n".join(lines)
    label = f"The similarity of two sentences goes from {low:.4f} to {high:.4f} in three running programs, and back"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 570 300" role="img" aria-label="{label}">\n'
        f"<style>{style}</style>\n"
        f'<rect width="570" height="300" rx="12" fill="#0d1117"/>\n{body}\n</svg>\n'
    )


def _keyframes(number: int) -> str:
    """When a phase is seen."""
    start, stop = PHASES[number]
    seen = {0: int(start == 0), start: 1, stop: 0} if stop < 100 else {0: int(start == 0), start: 1, 100: 1}
    steps = " ".join(f"{at}% {{ opacity: {on}; }}" for at, on in sorted(seen.items()))
    return f"@keyframes p{number} {{ {steps} }}\n.p{number} {{ animation-name: p{number}; }}\n"


def _commands(seconds: float) -> list[str]:
    """What is typed, phase by phase."""
    typed = (
        ('cache = BlobCache("minilm.ptd")', "as trained"),
        ("words[dog] = words[cat]; cache.update({WORDS: words})", f"one commit, {seconds * 1000:.0f} ms"),
        ("cache.revert()", "as before, to the bit"),
    )
    lines = []
    for number, (code, said) in enumerate(typed):
        lines += [_text(28, 88, f">>> {code}", f"code p{number}"), _text(28, 118, said, f"small p{number}")]
    return lines


def _program(x: int, name: str, values: Sequence[float]) -> list[str]:
    numbers = [_text(x + 16, 250, f"{value:.4f}", f"number p{number}") for number, value in enumerate(values)]
    return [
        f'<rect x="{x}" y="186" width="166" height="90" rx="8" fill="#161b22" stroke="#30363d"/>',
        _text(x + 16, 212, name, "small faint"),
        *numbers,
        f'<rect x="{x + 16}" y="260" width="134" height="6" rx="3" fill="#30363d"/>',
        f'<rect class="bar" x="{x + 16}" y="260" width="134" height="6" rx="3"/>',
    ]


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{html.escape(text, quote=False)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", type=Path, default=Path("demo-output"), help="where `make demo` wrote its programs")
    OUT.write_text(film(run_live(parser.parse_args().demo / "after", ENCODER_LENGTHS)), encoding="utf-8")
    print(f"{OUT.name}: {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
