"""ExecuTorch's runners as one: each request names the adapter that it runs with."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blobstore.adapters.adapter_file import check_scale
from blobstore.core.errors import InputError, UnsupportedDataError
from blobstore.core.reprs import fields_line
from blobstore.runtime.cache import BlobCache, check_cache
from blobstore.runtime.delegates import serving
from blobstore.runtime.native import is_utf8, native, native_path

if TYPE_CHECKING:
    from executorch.extension.llm.runner import TextLLMRunner

__all__ = ["Conversation", "Runners", "RunnersStats", "Stop"]

_INVALID_ARGUMENT = 18
"""ExecuTorch's error for a text that is too long. Its Python binding gives no number: what else can fail in a runner
that ran before is rare."""


class Stop:
    """Ends a request early, from any thread; `stop.set()`.

    One that waits never begins, and its answer is empty. One that runs ends at one of its next two tokens, and its answer
    is what was generated so far. It stays set, and may be given to several requests.
    """

    def __init__(self) -> None:
        self._native = native.Stop()

    def set(self) -> None:
        """End the requests that this was given to."""
        self._native.set()

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return bool(self._native.is_set())

    def __repr__(self) -> str:
        return f"<Stop, {'' if self.is_set() else 'not '}set>"


class Conversation:
    """A text that grows with each request: its prompt, then the answer. The next request goes on where the text ends.

    A runner that has read the text keeps its key/value cache for it, and then reads only what is new. It reads the whole
    text again if another request had the runner in between, if the request has another adapter or strength, or if any
    weight was changed since. A request that fails leaves the text as it was. The requests of one conversation run one
    after another, in their order. Any thread may use it at any time, with one `Runners`.

    Args:
        text: what was said so far. The first request reads it.

    Raises:
        InputError: `text` is not a string that can be encoded as UTF-8.
    """

    def __init__(self, text: str = "") -> None:
        self._native = native.Conversation(_checked_text(text, "the text"))

    @property
    def text(self) -> str:
        """All prompts and answers so far."""
        return str(self._native.text())

    def __repr__(self) -> str:
        return f"<Conversation, {len(self.text)} characters>"


@dataclass(frozen=True)
class RunnersStats:
    """Counts since the runners were made, and of now.

    Attributes:
        answered: requests that were finished, also early.
        failed: requests that began and failed.
        exchanges: how often a request needed another adapter or strength than the one before it on its runner, or
            weights had changed since.
        continued: requests that used the key/value cache of their conversation.
        waiting: requests that wait now.
        running: requests that run now.
    """

    __repr__ = fields_line

    answered: int
    failed: int
    exchanges: int
    continued: int
    waiting: int
    running: int


class Runners:
    """ExecuTorch's runners on one foundation, which answer requests, each with the adapter of the request.

    Each runner has a cache of its own, a layer with the tensors of an adapter; the foundation below is in memory once. As
    many requests run at the same time as there are runners, and the others wait::

        foundation = BlobCache("foundation.ptd")
        pairs = [
            (TextLLMRunner("llama.pte", "tokenizer.json", "foundation.ptd"), BlobCache("llama_lora.ptd", base=foundation))
            for _ in range(2)
        ]
        with Runners(pairs, {"support": "support.ptd", "legal": "legal.ptd"}) as runners:
            print(runners.generate("My invoice is wrong.", adapter="support", strength=0.8))

    Any thread may call any method at any time. `generate` runs on the thread that calls it, and blocks until the answer
    is there; nothing else blocks. The text of an answer is that of a runner of ExecuTorch's that was made for it alone.

    Args:
        runners: pairs of a `TextLLMRunner` and its cache. A runner must not have generated anything before, because it
            loads its program at its first request; from then on it may only be used through this object.
        adapters: adapter files by names of your choice.
        program_scale: as for `load_adapters`.

    Raises:
        InputError: there is no runner, or two of them have the same cache.
        UnsupportedDataError: `runners` or `adapters` is something else.
        AdapterError: `program_scale` is not a finite number. Or what `set_adapter` raises.
    """

    def __init__(
        self,
        runners: Iterable[tuple[TextLLMRunner, BlobCache]],
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        *,
        program_scale: float | None = None,
    ) -> None:
        pairs = _pairs(runners)
        if adapters is not None and not isinstance(adapters, Mapping):
            raise UnsupportedDataError(f"adapters must map names to files, found {adapters!r}")
        scale = None if program_scale is None else check_scale(program_scale, "program_scale")
        self._caches = [cache for _, cache in pairs]
        self._runners = [runner for runner, _ in pairs]
        self._queue = native.RunnerQueue([cache._native for cache in self._caches], scale)
        for name, path in (adapters or {}).items():
            self.set_adapter(name, path)

    def generate(
        self,
        prompt: str,
        adapter: str | None = None,
        strength: float = 1.0,
        *,
        conversation: Conversation | None = None,
        stop: Stop | None = None,
        on_token: Callable[[str], Any] | None = None,
        max_new_tokens: int = -1,
        temperature: float = 0.8,
        seq_len: int = -1,
        num_bos: int = 0,
    ) -> str:
        """Generate an answer with an adapter.

        Waits for a runner. Requests begin in the order in which they were made, but for those of a conversation that has
        another one running. While the request runs, the weights of its runner do not change: commits to its cache and to
        the foundation wait, and an `on_token` that makes one gets an error.

        Args:
            prompt: not empty. In a conversation, what comes after its text; without one, all that the model reads.
            adapter: its name; by default the foundation alone. The request gets the file that the name stands for now.
            strength: 1 is what the adapter was trained for, 0 turns it off.
            conversation: what the prompt and the answer are added to.
            stop: ends the request early.
            on_token: called on this thread with the text of each token. What it raises ends the request.
            max_new_tokens, temperature, seq_len, num_bos: as in ExecuTorch's `GenerationConfig`. `num_bos` counts where
                the model begins to read a text.

        Returns:
            The text of all tokens.

        Raises:
            InputError: the prompt is empty or not a string, the conversation belongs to other runners, or a setting is
                not a number.
            KeyNotFoundError: there is no such adapter.
            AdapterError: the strength is not a finite number; or the adapter does not fit, as for `load_adapters`.
            ExecutionError: the runner failed: the text may be too long for the program, the program may not be one for
                it, or a token is a part of a character, which ExecuTorch's binding cannot pass on.
            UnsupportedOperationError: this thread runs a request already, or reads one of the caches.
            ClosedError: the runners, or the cache, are closed.
            UnsupportedDataError: `conversation`, `stop` or `on_token` is something else.
        """
        _check_kind(conversation, Conversation, "conversation")
        _check_kind(stop, Stop, "stop")
        if on_token is not None and not callable(on_token):
            raise UnsupportedDataError(f"on_token must be callable, found {on_token!r}")
        settings = {
            "max_new_tokens": _integer(max_new_tokens, "max_new_tokens"),
            "seq_len": _integer(seq_len, "seq_len"),
            "temperature": _temperature(temperature),
            "num_bos": _integer(num_bos, "num_bos"),
        }
        turn = self._queue.begin(
            _checked_text(prompt, "the prompt"),
            "" if adapter is None else _checked_text(adapter, "the name of an adapter"),
            check_scale(strength, "strength"),
            None if conversation is None else conversation._native,
            None if stop is None else stop._native,
        )
        if turn is None:
            return ""
        try:
            return self._answer(turn, settings, on_token)
        finally:
            turn.end()

    def set_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Give an adapter a name, or a name another adapter.

        The file stays mapped: it may be renamed, replaced or deleted later, but not truncated. Requests that wait or run
        keep the adapter that the name stood for when they were made.

        Raises:
            InputError: the name is empty or not a string.
            FileAccessError, InvalidFileError, IntegrityError: the file cannot be opened or trusted.
            AdapterError, LayoutError, UpdateError: the adapter has problems. Whether it was made for the foundation is
                checked when a request needs it.
            ClosedError: the runners are closed.
        """
        self._queue.set_adapter(_checked_text(name, "the name of an adapter"), native_path(path))

    def remove_adapter(self, name: str) -> None:
        """Forget a name. Requests that wait or run keep their adapter.

        Raises:
            KeyNotFoundError: there is no such adapter.
            InputError: the name is not a string.
            ClosedError: the runners are closed.
        """
        self._queue.remove_adapter(_checked_text(name, "the name of an adapter"))

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters, in the order of the alphabet."""
        return tuple(self._queue.adapters())

    @property
    def stats(self) -> RunnersStats:
        """What happened so far."""
        return RunnersStats(**self._queue.stats())

    def close(self) -> None:
        """Refuse all further requests, also those that wait. Requests that run go on to their end."""
        self._queue.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return bool(self._queue.closed())

    def __enter__(self) -> Runners:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(self.adapters) or "no adapters"
        return f"<Runners, {len(self._runners)} on {self._caches[0].name}: {names}>"

    def _answer(self, turn: Any, settings: dict[str, Any], on_token: Callable[[str], Any] | None) -> str:
        from executorch.extension.llm.runner import GenerationConfig

        runner, pieces, raised = self._runners[turn.runner], list[str](), list[BaseException]()
        if turn.resets:
            runner.reset()
        else:
            settings["num_bos"] = 0

        def take(piece: str) -> None:
            pieces.append(piece)
            if on_token is not None:
                try:
                    on_token(piece)
                except BaseException as error:
                    raised.append(error)
                    raise
            if turn.stopped():
                runner.stop()

        try:
            config = GenerationConfig(echo=False, warming=True, **settings)  # warming up: without printing anything
            with serving(self._caches[turn.runner]):  # the runner loads its program when it runs for the first time
                runner.generate(turn.prompt, config, take)
        except (RuntimeError, TypeError, UnicodeDecodeError) as error:
            if raised:
                raise
            raise native.runner_failure("generate", _INVALID_ARGUMENT) from error
        turn.finish("".join(pieces), pieces[-1] if pieces else "")
        return "".join(pieces)


def _pairs(runners: Any) -> list[tuple[TextLLMRunner, BlobCache]]:
    expected = "pairs of a TextLLMRunner and its BlobCache"
    try:
        pairs = [(runner, cache) for runner, cache in runners]
    except (TypeError, ValueError) as error:
        raise UnsupportedDataError(f"expected {expected}, found {runners!r}") from error
    for runner, cache in pairs:
        if not all(callable(getattr(runner, name, None)) for name in ("generate", "reset", "stop")):
            raise UnsupportedDataError(f"expected {expected}, found {runner!r} for a runner")
        check_cache(cache, "the cache of a runner")
        cache.get_num_keys()  # raises if it is closed
    return pairs


def _check_kind(value: object, kind: type, name: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise UnsupportedDataError(f"{name} must be a {kind.__name__}, found {value!r}")


def _checked_text(value: Any, what: str) -> str:
    if not is_utf8(value):
        raise InputError(f"{what} must be a string that can be encoded as UTF-8, found {value!r}")
    return str(value)


def _integer(value: Any, what: str) -> int:
    """A number that fits ExecuTorch's 32 bits."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{what} must be an integer, found {value!r}") from None
    if not -1 <= number < 1 << 31:
        raise InputError(f"{what} {number} is out of range")
    return number


def _temperature(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise InputError(f"temperature must be a number of at least 0, found {value!r}")
    return number
