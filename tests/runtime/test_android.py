"""What `make compile-platforms BIONIC=DIR` reads of Android; the files themselves are not in this repository (E3)."""

from pathlib import Path

import pytest

from runtime_bindings.tests import android

# The forms of bionic's lists of symbols
LISTED = """
LIBC {
  global:
    everywhere;
    of_phones_then; # arm x86
    here_only; # arm64
    data; # var
    first_in_24; # introduced=24
    too_new; # introduced=30
    here_earlier; # introduced-arm64=21 introduced=31
    of_the_system; # llndk introduced=26
  local:
    hidden;
    *;
};
LIBC_P { # introduced=28
  global:
    of_this_level;
} LIBC;
LIBC_Q { # introduced=29
  global:
    of_the_next;
} LIBC_P;
LIBC_PRIVATE {
  global:
    private;
} LIBC_Q;
"""


def test_what_a_phone_has() -> None:
    """Symbols of the API level and the machine, for applications."""
    assert list(android.symbols(LISTED)) == [
        ("everywhere", False),
        ("here_only", False),
        ("data", True),
        ("first_in_24", False),
        ("here_earlier", False),
        ("of_this_level", False),
    ]


def test_what_is_missing_is_named() -> None:
    """The C library must have it, and so must this library; the rest comes from C++, the compiler and ExecuTorch."""
    others = [
        "_ZNSt6__ndk112basic_stringIcNS_11char_traitsIcEENS_9allocatorIcEEED1Ev",
        "_Znwm",
        "_ZTVN10__cxxabiv120__si_class_type_infoE",
        "_ZTISt9exception",
        "__gxx_personality_v0",
        "__aarch64_ldadd8_relax",
        "_ZNK10executorch7runtime7Program10get_methodEPKc",
        "et_pal_emit_log_message",
    ]
    lost = ["memfd_create", "_ZN9blobstore9BlobCache4openEv", "__cxa_atexit", "_ZNK9blobstore5Error4kindEv"]
    assert android.unknown([*others, *lost]) == sorted(lost)


def test_a_folder_without_headers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as refused:
        android.find(tmp_path, tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}: neither a checkout of bionic, with libc/libc.map.txt, nor an NDK or its sysroot, "
        "with usr/include/aarch64-linux-android"
    )


@pytest.mark.long
def test_without_its_folder_the_run_says_what_it_must_hold(tmp_path: Path) -> None:
    """`make run-android` names the files of a device, and where they are missing."""
    from runtime_bindings.tests import run_android

    for given, named in (("", "BIONIC: "), (str(tmp_path), f"{tmp_path}/device: ")):
        with pytest.raises(SystemExit) as raised:
            run_android.main(given)
        assert named in str(raised.value) and "BIONIC holds Android's headers" in str(raised.value)
        assert "linker64, libc.so, libdl.so, libm.so are not there" in str(raised.value)
