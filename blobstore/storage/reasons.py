"""Why a store or an engine refused, in one line: their own errors show their insides, over many lines and in colors."""

from __future__ import annotations

import os
import re

__all__ = ["may_succeed", "no_bucket", "of_system", "reason", "refused"]

_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_STATUS = re.compile(r"status code: (\d{3}) ?([A-Za-z -]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_LINK = re.compile(r"Connection refused|Connection reset by peer|connection closed|timed out|TimedOut|dns error")
_SYSTEM = re.compile(r"\(os error (\d+)\)")
_METADATA = ("http://169.254.", "http://metadata")
"""Where machines of a cloud ask for credentials, and any other machine if it has none."""


def no_bucket(error: Exception) -> bool:
    """Whether a store said that the bucket is missing, and not only an object."""
    code = _CODE.search(str(error))
    return code is not None and code[1] in _NO_BUCKET


def refused(error: Exception) -> bool:
    """Whether a library says that a store answered so, or that none did."""
    text = _COLORS.sub("", str(error))
    return "HTTP error" in text or "status code" in text


def may_succeed(error: Exception) -> bool:
    """Whether the same request may succeed after this error of obstore, which did not repeat it.

    It repeats what it knows to be harmless until it gives up. If the answer to the end of an upload in parts is lost, the
    repeated end fails, because the upload is no longer there.
    """
    text = str(error)
    return "NoSuchUpload" in text or ("HTTP error" in text and ", max_retries: " not in text)


def of_system(error: Exception) -> OSError | None:
    """The error of the system that a library met, such as a full disk; None if it met none."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    found = _SYSTEM.search(str(error))
    return None if found is None else OSError(int(found[1]), os.strerror(int(found[1])))


def reason(error: Exception) -> str:
    """What is wrong, from an error of obstore or deltalake."""
    text = _COLORS.sub("", str(error))
    lines = [line.strip().removeprefix("↳").strip() for line in text.splitlines() if line.strip()]
    chain = ": ".join(lines)  # of deltalake: a cause on each line
    if no_bucket(error):
        return "there is no such bucket"
    if any(f" {address}" in chain for address in _METADATA):
        return "there are no credentials: give them as options or in the environment, such as AWS_ACCESS_KEY_ID"
    if status := _STATUS.search(chain):
        code = _CODE.search(chain)
        answer = f"{status[1]} {status[2].strip()}".strip() + (f", {code[1]}" if code else "")
        refused = status[1] in {"401", "403"}
        return f"the store refuses this with these credentials ({answer})" if refused else f"the store answers {answer}"
    if "HTTP error" in chain:
        link = _LINK.search(chain)
        return "the store cannot be reached" + (f": {link[0].replace('TimedOut', 'timed out')}" if link else "")
    return lines[0] if lines else type(error).__name__
