"""Planted truth: the report finds what was planted, with exact bytes, and nothing else."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import blobstore
from blobstore.reporting import FindingKind, Report
from tests.reporting.planted import Payload, Tensor, found, write_ptd, write_safetensors


def accounted(report: Report) -> None:
    """Every byte of every file is in one region, and the claims lie in theirs."""
    for file in report.files:
        position = 0
        for region in file.regions:
            assert region.start == position < region.stop
            position = region.stop
        assert position == file.size == sum(file.by_kind.values())
    for finding in report.findings:
        assert 0 <= finding.counted <= finding.saves
        for claim in finding.claims:
            assert 0 <= claim.start <= claim.stop <= report.region((claim.file, claim.region)).nbytes
    assert report.total_saves <= report.total_bytes


def values(seed: int, *sizes: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(sizes).astype(np.float32)


class Plan:
    """Files to write, and the findings expected in them. No dataclass: hypothesis would print all bytes of one."""

    def __init__(self) -> None:
        self.files: dict[str, list[Tensor]] = {}
        self.payloads: list[bytes] = []
        self.expected: set[tuple[str, frozenset[str], int]] = set()
        self.total = 0

    def __repr__(self) -> str:
        return f"<Plan of {sorted(self.expected, key=str)}>"

    def put(self, file: str, tensor: Tensor) -> str:
        self.files.setdefault(file, []).append(tensor)
        return f"{file}:{tensor.key}"

    def expect(self, kind: str, places: list[str], saves: int, total: int | None = None) -> None:
        self.expected.add((kind, frozenset(places), saves))
        self.total += saves if total is None else total


FILES = ("a.ptd", "b.safetensors", "c.ptd")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Some plants of each class; each has values of its own, so that none meets another."""
    plan = Plan()
    for i, file in enumerate(FILES):
        plan.put(file, Tensor.of(f"{file}.own", values(i, 40, 30)))
    kinds = ["files", "tied", "layout", "dtype", "constant", "near", "contained"]
    for number, kind in enumerate(draw(st.lists(st.sampled_from(kinds), max_size=8))):
        name = f"{kind}{number}"
        rows, columns = draw(st.integers(8, 40)), draw(st.integers(8, 40))
        base = values(1000 + number, rows, columns)
        one, two = draw(st.permutations(FILES))[:2]
        _plant(plan, draw, kind, name, base, one, two)
    return plan


def _plant(plan: Plan, draw: st.DrawFn, kind: str, name: str, base: np.ndarray, one: str, two: str) -> None:
    nbytes = base.nbytes
    if kind == "files":
        places = [plan.put(file, Tensor.of(name, base)) for file in (one, two)]
        plan.expect("duplicate_files", places, nbytes)
    elif kind == "tied":
        places = [plan.put(one, Tensor.of(f"{name}.{i}", base)) for i in range(2)]
        plan.expect("duplicate_tied", places, nbytes)
    elif kind == "layout":
        places = [plan.put(one, Tensor.of(name, base)), plan.put(two, Tensor.of(name + ".t", base.T))]
        plan.expect("other_layout", places, nbytes)
    elif kind == "dtype":
        half = base.astype(np.float16)
        places = [
            plan.put(one, Tensor.of(name, half.astype(np.float32))),
            plan.put(two, Tensor.of(name + ".half", half)),
        ]
        plan.expect("other_dtype", places, nbytes)
    elif kind == "constant":
        value = draw(st.sampled_from([0.0, 1.0, -2.5]))
        # sizes differ, or two plants would be equal to each other
        shape = (100 + int(name.removeprefix("constant")), 3)
        same = np.full(shape, value, np.float32)
        plan.expect("constant", [plan.put(one, Tensor.of(name, same))], same.nbytes - 4)
    elif kind == "near":
        other = base.copy()
        changed = draw(st.integers(1, max(1, base.size // 25)))
        other.reshape(-1)[:: base.size // changed][:changed] += 1
        count = int((base != other).sum())
        places = [plan.put(one, Tensor.of(name, base)), plan.put(two, Tensor.of(name + ".tuned", other))]
        plan.expect("near_duplicate", places, nbytes - 8 * count)
    elif kind == "contained":
        before = np.random.default_rng(7 + len(plan.payloads)).bytes(4 * draw(st.integers(0, 200)))
        payload = before + base.tobytes() + np.random.default_rng(8).bytes(64)
        places = [plan.put(one, Tensor.of(name, base)), f"p.pte:forward/OtherBackend[{len(plan.payloads)}]"]
        plan.payloads.append(payload)
        plan.expect("contained", places, nbytes)


@pytest.mark.long
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_what_was_planted_is_found_and_nothing_else(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, tensors in plan.files.items():
            write = write_ptd if name.endswith(".ptd") else write_safetensors
            write(Path(folder) / name, tensors)
        Payload(plan.payloads).write(Path(folder) / "p.pte")
        report = blobstore.report([folder])
    assert not report.problems
    accounted(report)
    assert found(report) == plan.expected
    assert report.total_saves == plan.total


def make(tmp_path: Path, **files: list[Tensor]) -> Report:
    for name, tensors in files.items():
        write_ptd(tmp_path / f"{name}.ptd", tensors)
    report = blobstore.report([tmp_path])
    accounted(report)
    return report


def one(report: Report, kind: FindingKind) -> tuple[int, str]:
    """The only finding, which is of this kind: what it saves, and its detail."""
    [finding] = report.findings
    assert finding.kind is kind, finding
    return finding.saves, finding.detail


@pytest.mark.parametrize(
    ("order", "what"), [((0, 2, 3, 1), "channels last"), ((1, 0, 2, 3), "reordered"), ((3, 2, 1, 0), "reordered")]
)
def test_permuted_dimensions(tmp_path: Path, order: tuple[int, ...], what: str) -> None:
    weight = values(1, 6, 5, 3, 4)
    moved = np.ascontiguousarray(weight.transpose(order))
    report = make(tmp_path, a=[Tensor.of("w", weight)], b=[Tensor.opaque("packed", moved.tobytes())])
    saves, detail = one(report, FindingKind.OTHER_LAYOUT)
    assert saves == weight.nbytes
    assert what in detail


@pytest.mark.parametrize(("high", "wide"), [(8, 1), (4, 2), (16, 4), (1, 8)])
def test_tiles(tmp_path: Path, high: int, wide: int) -> None:
    weight = values(2, 48, 40)
    packed = weight.reshape(48 // high, high, 40 // wide, wide).transpose(0, 2, 1, 3)
    report = make(tmp_path, a=[Tensor.of("w", weight)], b=[Tensor.opaque("packed", packed.tobytes())])
    if (high, wide) == (1, 8):  # which is no reordering at all
        assert one(report, FindingKind.DUPLICATE_FILES)[0] == weight.nbytes
    else:
        saves, detail = one(report, FindingKind.OTHER_LAYOUT)
        assert saves == weight.nbytes
        assert "tiles" in detail


@pytest.mark.parametrize("dtype", ["int8", "int16", "float16", "float64"])
def test_elements_of_any_width_are_found_transposed(tmp_path: Path, dtype: str) -> None:
    random = np.random.default_rng(3)
    weight = random.integers(0, 100, (50, 60)).astype(dtype)
    report = make(tmp_path, a=[Tensor.of("w", weight)], b=[Tensor.of("t", weight.T)])
    assert one(report, FindingKind.OTHER_LAYOUT)[0] == weight.nbytes


def test_equal_histograms_are_not_equal_tensors(tmp_path: Path) -> None:
    weight = values(4, 30, 30)
    shuffled = np.random.default_rng(5).permutation(weight.reshape(-1)).reshape(30, 30)
    assert not make(tmp_path, a=[Tensor.of("w", weight)], b=[Tensor.of("s", shuffled)]).findings


@pytest.mark.parametrize("wide", [np.float32, np.float16])
def test_bfloat16_of_wider_floats(tmp_path: Path, wide: type) -> None:
    exact = (values(6, 20, 30) * 8).astype(np.int32).astype(wide)  # a few bits of mantissa, which bfloat16 has too
    report = make(tmp_path, a=[Tensor.of("w", exact)], b=[Tensor.bfloat16("b", exact.astype(np.float32))])
    saves, detail = one(report, FindingKind.OTHER_DTYPE)
    assert saves == exact.nbytes
    assert "bfloat16" in detail


@pytest.mark.parametrize("bits", [0x3F800001, 0x38000001, 0x387FFFFF, 0x33000000, 0x477FF000, 0x47800000, 0x7FC00001])
def test_one_value_that_does_not_fit_is_not_the_same(bits: int, tmp_path: Path) -> None:
    """A bit too many, in a normal number, above the subnormal numbers and among them; too small, rounded up, too large; the payload of a NaN."""
    wide = values(7, 20, 30).astype(np.float16).astype(np.float32)
    half = wide.astype(np.float16)
    wide.view(np.uint32)[-1, -1] = bits
    with np.errstate(all="ignore"):
        half[-1, -1] = wide[-1, -1].astype(np.float16)
    assert not make(tmp_path, a=[Tensor.of("w", wide)], b=[Tensor.of("h", half)]).findings


def test_every_half_fits(tmp_path: Path) -> None:
    """Signed zeros, infinities and subnormal numbers keep their bits."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[~np.isnan(halves)].reshape(-1, 2)
    wide = halves.astype(np.float32)
    report = make(tmp_path, a=[Tensor.of("w", wide)], b=[Tensor.of("h", halves)])
    assert one(report, FindingKind.OTHER_DTYPE)[0] == wide.nbytes


def test_savings_that_overlap_are_counted_once(tmp_path: Path) -> None:
    half = values(9, 32, 48).astype(np.float16)
    wide = half.astype(np.float32)
    near = wide.copy()
    near[0, :5] += 1
    report = make(
        tmp_path,
        a=[Tensor.of("w", wide)],
        b=[Tensor.of("w", wide), Tensor.of("t", wide.T)],
        c=[Tensor.of("h", half), Tensor.of("n", near)],
    )
    kinds = {finding.kind for finding in report.findings}
    assert {FindingKind.DUPLICATE_FILES, FindingKind.OTHER_LAYOUT, FindingKind.OTHER_DTYPE} <= kinds
    # what has to stay is the narrow copy, and five elements with their index
    blobs = 3 * wide.nbytes + near.nbytes + half.nbytes
    assert report.total_saves == blobs - half.nbytes - 5 * 8
    assert sum(finding.saves for finding in report.findings) > report.total_saves


def test_padding_beyond_sixteen_bytes(tmp_path: Path) -> None:
    tensors = [Tensor.of(f"w{i}", values(20 + i, 25)) for i in range(8)]
    write_ptd(tmp_path / "a.ptd", tensors, alignment=4096)
    report = blobstore.report([tmp_path])
    accounted(report)
    [file] = report.files
    gaps = [(r.start, r.nbytes) for r in file.regions if r.kind.value == "padding"]
    assert one(report, FindingKind.PADDING)[0] == sum(n - -start % 16 for start, n in gaps) > 7 * 3900


def test_what_nothing_refers_to(tmp_path: Path) -> None:
    path = write_ptd(tmp_path / "a.ptd", [Tensor.of("w", values(30, 25))])
    path.write_bytes(path.read_bytes() + b"left behind")
    report = blobstore.report([path])
    accounted(report)
    assert one(report, FindingKind.UNREFERENCED)[0] == len(b"left behind")


def test_equal_payloads(tmp_path: Path) -> None:
    payload = np.random.default_rng(31).bytes(5000)
    Payload([payload, payload]).write(tmp_path / "a.pte")
    Payload([payload]).write(tmp_path / "b.pte")
    report = blobstore.report([tmp_path])
    accounted(report)
    assert one(report, FindingKind.DUPLICATE_PAYLOAD)[0] == 2 * len(payload)


def test_exact_only_finds_equal_bytes_and_nothing_else(tmp_path: Path) -> None:
    weight = values(32, 30, 40)
    write_ptd(tmp_path / "a.ptd", [Tensor.of("w", weight), Tensor.of("t", weight.T)])
    write_ptd(tmp_path / "b.ptd", [Tensor.of("w", weight)])
    report = blobstore.report([tmp_path], exact_only=True)
    assert [finding.kind for finding in report.findings] == [FindingKind.DUPLICATE_FILES]


def test_near_duplicates_beyond_the_limit_are_different_blobs(tmp_path: Path) -> None:
    weight = values(33, 50, 50)
    other = weight.copy()
    other.reshape(-1)[: int(0.12 * weight.size)] += 1
    write_ptd(tmp_path / "a.ptd", [Tensor.of("w", weight)])
    write_ptd(tmp_path / "b.ptd", [Tensor.of("v", other)])
    assert not blobstore.report([tmp_path]).findings
    [finding] = blobstore.report([tmp_path], near=0.2).findings
    assert finding.share == pytest.approx(0.12, abs=1e-3)


def test_small_blobs_that_are_alike_by_accident_are_left_alone(tmp_path: Path) -> None:
    a, b = np.arange(16, dtype=np.float32), np.arange(16, dtype=np.float32)
    b[0] = 9
    assert not make(tmp_path, a=[Tensor.of("a", a)], b=[Tensor.of("b", b)]).findings


@pytest.mark.parametrize("near", [-0.1, 0.3])
def test_share_out_of_range(near: float) -> None:
    with pytest.raises(ValueError, match="near"):
        blobstore.report([], near=near)
