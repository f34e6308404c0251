"""Each request has an adapter of its own; every text is that of eager PyTorch with these weights (L3, D2, B3)."""

import _thread
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore import errors, save_file
from blobstore.adapters import save_adapter
from blobstore.llm import Conversation, Runners, Stop
from blobstore.runtime import BlobCache
from tests.helpers.waiting import until
from tests.llm import letters, llama
from tests.llm.letters import MODEL, NAMES, TOKENS, eager, weights
from tests.llm.llama import LORA_ALPHA, RANK

pytestmark = pytest.mark.long


@pytest.fixture
def make(exported: Path) -> Iterator[Callable[[int], Runners]]:
    """`make(2)`: two runners on one foundation, with both adapters."""
    made = []

    def runners(count: int) -> Runners:
        live = exported / "live"
        foundation = BlobCache(live / "foundation.ptd")
        pairs = [
            (
                llama.runner(live / "model.pte", exported / "tokenizer.json", live / "foundation.ptd"),
                BlobCache(live / "model_lora.ptd", base=foundation),
            )
            for _ in range(count)
        ]
        made.append(Runners(pairs, {name: exported / f"{name}.ptd" for name in NAMES}))
        return made[-1]

    yield runners
    for one in made:
        one.close()


def ask(runners: Runners, prompt: str, *arguments: Any, tokens: int = TOKENS, **options: Any) -> str:
    return runners.generate(prompt, *arguments, max_new_tokens=tokens, temperature=0, **options)


class Held:
    """A request that runs until it is let go, in a thread of its own."""

    def __init__(self, runners: Runners, **options: Any) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        self.pool = ThreadPoolExecutor(1)
        self.text = self.pool.submit(ask, runners, "hold", on_token=self._token, **options)
        until(self.began.is_set)

    def _token(self, _: str) -> None:
        self.began.set()
        until(self.go.is_set)

    def end(self) -> str:
        self.go.set()
        return self.text.result(60)


def test_the_texts_differ() -> None:
    """Otherwise nothing below says anything."""
    texts = {eager("once"), eager("once", "one"), eager("once", "two"), eager("once", "two", 0.5)}
    assert len(texts) == 4


def test_each_request_has_its_adapter_and_strength(make: Callable[[int], Runners]) -> None:
    """In any order on one runner, with and without an adapter, and at strengths between, above and below (L3)."""
    runners = make(1)
    assert runners.adapters == ("one", "two")
    pieces: list[str] = []
    assert ask(runners, "once", "two", on_token=pieces.append) == eager("once", "two") == "".join(pieces)
    for prompt, adapter, strength in (
        ("once", "one", 1),
        ("once", "one", 0.5),
        ("twice", "one", 1),
        ("once", None, 1),
        ("once", "two", 0.8),
        ("once", "two", -1),
        ("once", "two", 2),
        ("once", "one", 0),
        ("x" * 100, "one", 1),
    ):
        assert ask(runners, prompt, adapter, strength) == eager(prompt, adapter, strength), (prompt, adapter, strength)
    before = runners.stats
    assert ask(runners, "y", "one") == eager("y", "one")
    assert runners.stats == replace(before, answered=before.answered + 1)  # the adapter was there


@pytest.mark.parametrize("count", [1, 2])
def test_users_at_the_same_time(make: Callable[[int], Runners], count: int) -> None:
    """Queued on one runner, or on two of them at the same time, on one foundation (D2)."""
    runners = make(count)
    jobs = [(f"user{i}", ("one", "two", None)[i % 3], (1, 0.5)[i % 2]) for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda job: ask(runners, *job), jobs))
    assert texts == [eager(*job) for job in jobs]
    assert (runners.stats.answered, runners.stats.failed, runners.stats.running) == (12, 0, 0)


@pytest.mark.way
def test_two_requests_run_at_once_with_two_adapters(make: Callable[[int], Runners]) -> None:
    """While one of them is in the middle of its text, the other begins and ends (D2)."""
    runners = make(2)
    held = Held(runners, adapter="one")
    assert ask(runners, "once", "two") == eager("once", "two")
    assert held.end() == eager("hold", "one")


def test_a_conversation_keeps_its_cache(make: Callable[[int], Runners]) -> None:
    """Also its last token, which ExecuTorch's runner has not read; the text is that of a runner that reads all of it."""
    runners, talk = make(1), Conversation()
    said = ""
    for turn, prompt in enumerate(("hello", "more", "9")):
        answer = ask(runners, prompt, "one", conversation=talk)
        assert answer == eager(said + prompt, "one")
        said += prompt + answer
        assert talk.text == said and runners.stats.continued == turn
    assert runners.stats.exchanges == 1


def test_a_conversation_is_read_again_where_it_must(make: Callable[[int], Runners]) -> None:
    """After another request on its runner, with another adapter or strength, and after a failure (L3, B3)."""
    runners, talk = make(1), Conversation("before")
    said = "before"

    def turn(prompt: str, adapter: str | None, strength: float = 1) -> None:
        nonlocal said
        answer = ask(runners, prompt, adapter, strength, conversation=talk, tokens=6)
        assert answer == eager(said + prompt, adapter, strength, 6)
        said += prompt + answer
        assert talk.text == said

    turn("a", "one")
    ask(runners, "somebody", "one")
    turn("b", "one")
    turn("c", "two")
    turn("d", "two", 0.5)
    turn("e", None)
    assert runners.stats.continued == 0
    with pytest.raises(errors.ExecutionError):
        ask(runners, "?", conversation=talk)
    with pytest.raises(ZeroDivisionError):
        ask(runners, "f", conversation=talk, on_token=lambda _: 1 // 0)
    assert talk.text == said
    continued = runners.stats.continued
    turn("g", None)
    assert runners.stats.continued == continued
    turn("h", None)
    assert runners.stats.continued == continued + 1


def test_a_conversation_moves_to_another_runner(make: Callable[[int], Runners]) -> None:
    """Where its own one is busy; and goes back to the one that has most of it only if that has all (L3)."""
    runners, talk = make(2), Conversation()
    said = "hi" + ask(runners, "hi", "one", conversation=talk, tokens=4)
    others = [Held(runners, adapter="two")]  # on the other one, which keeps nothing
    said += "x" + ask(runners, "x", "one", conversation=talk, tokens=4)
    assert runners.stats.continued == 1
    others[0].end()
    others = [Held(runners, adapter="two"), Held(runners, adapter="two")]
    assert [other.end() for other in others] == [eager("hold", "two")] * 2
    answer = ask(runners, "y", "one", conversation=talk, tokens=4)
    assert answer == eager(said + "y", "one", 1, 4)
    assert runners.stats.continued == 1


def test_weights_that_change_meanwhile(make: Callable[[int], Runners], exported: Path) -> None:
    """A commit by somebody else waits for the request. Then no kept cache is used, and adapters are brought again, if they
    are for the foundation that is computed with (L5)."""
    runners, talk = make(1), Conversation()
    foundation = runners._caches[0].base
    assert foundation is not None
    name = "layers.0.feed_forward.w1.weight"
    held = Held(runners, conversation=talk)
    with ThreadPoolExecutor(1) as pool:
        commit = pool.submit(foundation.update, {name: MODEL.checkpoint(1)[name]})
        assert not commit.done()
        said = "hold" + held.end()
        assert said == "hold" + eager("hold")
        commit.result(60)
    tuned = {**weights(None), name: MODEL.checkpoint(1)[name]}
    assert ask(runners, "go", conversation=talk) == MODEL.tell(tuned, said + "go", TOKENS)
    assert runners.stats.continued == 0
    with pytest.raises(errors.AdapterError, match="made for foundation"):
        ask(runners, "once", "one")
    foundation.revert()
    assert ask(runners, "once", "one") == eager("once", "one")
    runners._caches[0].update(MODEL.adapter(1))  # somebody else's adapter in the same cache
    assert ask(runners, "once", "one") == eager("once", "one")


def test_a_failure_hurts_nobody_else(make: Callable[[int], Runners], capfd: pytest.CaptureFixture[str]) -> None:
    """Texts that are too long or have no token, and callbacks that raise; the runner goes on (B3)."""
    runners = make(1)
    assert ask(runners, "once", "one") == eager("once", "one")
    with pytest.raises(errors.ExecutionError, match="error 18; the text may be too long"):
        ask(runners, "x" * 200, "two")
    assert ask(runners, "once", "one") == eager("once", "one")
    with pytest.raises(errors.ExecutionError):
        ask(runners, " ", "one")
    with pytest.raises(errors.ExecutionError):
        ask(runners, "once", "one", tokens=0)
    with pytest.raises(ZeroDivisionError):
        ask(runners, "once", "one", on_token=lambda _: 1 // 0)
    with pytest.raises(RuntimeError, match="mine"):
        ask(runners, "once", "one", on_token=lambda _: (_ for _ in ()).throw(RuntimeError("mine")))
    assert ask(runners, "once", "one") == eager("once", "one")
    assert runners.stats.failed == 5
    assert eager("once", "one") not in capfd.readouterr().out  # the runner's own printing is off


def test_requests_begin_in_their_order(make: Callable[[int], Runners]) -> None:
    """Whatever their adapters: nobody overtakes to save an exchange."""
    runners, order = make(1), list[str]()
    held = Held(runners, adapter="one")
    with ThreadPoolExecutor(4) as pool:
        jobs = []
        for number, (name, adapter) in enumerate((("a", "two"), ("b", "one"), ("c", None), ("d", "one"))):
            note = functools.partial(lambda name, _: name in order or order.append(name), name)
            jobs.append(pool.submit(ask, runners, name, adapter, on_token=note))
            until(lambda number=number: runners.stats.waiting == number + 1)
        held.end()
        assert [job.result(60) for job in jobs] == [eager("a", "two"), eager("b", "one"), eager("c"), eager("d", "one")]
    assert order == ["a", "b", "c", "d"]


def test_one_conversation_has_one_request_at_a_time(make: Callable[[int], Runners]) -> None:
    """The next one waits although a runner is free, and others pass it."""
    runners, talk = make(2), Conversation()
    held = Held(runners, adapter="one", conversation=talk)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(ask, runners, "and", "one", conversation=talk)
        until(lambda: runners.stats.waiting == 1)
        assert ask(runners, "once", "two") == eager("once", "two")
        assert not second.done()
        said = "hold" + held.end()
        assert second.result(60) == eager(said + "and", "one")


def test_an_adapter_that_is_replaced_while_a_request_waits(make: Callable[[int], Runners], exported: Path) -> None:
    """The request keeps the one that it was made with, later ones get the new one, whatever happens to the file (D2)."""
    runners = make(1)
    file = exported / "third.ptd"
    letters.save(file, 3, exported)
    runners.set_adapter("third", file)
    held = Held(runners)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, runners, "once", "third")
        until(lambda: runners.stats.waiting == 1)
        letters.save(file, 4, exported)
        runners.set_adapter("third", file)
        file.unlink()
        held.end()
        assert waiting.result(60) == eager("once", 3)
    assert ask(runners, "once", "third") == eager("once", 4) != eager("once", 3)
    runners.remove_adapter("third")
    with pytest.raises(
        errors.KeyNotFoundError, match="'third'; there are 'one' and 'two'|'third'; there are 'one', 'two'"
    ):
        ask(runners, "once", "third")


def test_stopping(make: Callable[[int], Runners]) -> None:
    """A request that runs ends with what it has; one that waits does not begin; the conversation goes on (L3)."""
    runners, talk, stop = make(1), Conversation(), Stop()
    text = ask(runners, "once", "one", conversation=talk, stop=stop, on_token=lambda _: stop.set())
    assert text == eager("once", "one")[: len(text)] and 1 <= len(text) <= 2
    assert ask(runners, "more", "one", conversation=talk) == eager("once" + text + "more", "one")
    assert runners.stats.continued == 1 and stop.is_set()
    assert ask(runners, "again", "one", stop=stop, conversation=talk) == ""
    held, later = Held(runners), Stop()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, runners, "never", "two", stop=later)
        until(lambda: runners.stats.waiting == 1)
        later.set()
        assert waiting.result(60) == ""
    assert runners.stats.waiting == 0 and held.end() == eager("hold")


def test_closing_while_requests_wait(make: Callable[[int], Runners]) -> None:
    """They are refused; the one that runs goes on to its end."""
    runners = make(1)
    held = Held(runners, adapter="two")
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ask, runners, "once", name) for name in ("one", "two")]
        until(lambda: runners.stats.waiting == 2)
        runners.close()
        for one in waiting:
            with pytest.raises(errors.ClosedError, match="closed"):
                one.result(60)
    assert held.end() == eager("hold", "two") and runners.closed
    for call in (
        lambda: ask(runners, "once"),
        lambda: runners.set_adapter("x", "x.ptd"),
        lambda: runners.remove_adapter("one"),
    ):
        with pytest.raises((errors.ClosedError, errors.FileAccessError)):
            call()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt in the main thread, whatever libraries made of it in this process."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("only the main thread is interrupted")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_wait(make: Callable[[int], Runners]) -> None:
    """Ctrl-C, in the main thread."""
    runners = make(1)
    held = Held(runners)

    def interrupt() -> None:
        until(lambda: runners.stats.waiting == 1)
        _thread.interrupt_main()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask(runners, "once", "one")
    assert runners.stats.waiting == 0 and held.end() == eager("hold")


def test_what_a_thread_must_not_do_while_it_answers(make: Callable[[int], Runners]) -> None:
    """It would wait for itself."""
    runners = make(1)
    for act in (lambda: ask(runners, "once"), lambda: runners._caches[0].revert()):
        with pytest.raises(errors.UnsupportedOperationError, match="this thread"):
            ask(runners, "once", on_token=lambda _, act=act: act())
    assert ask(runners, "once") == eager("once")


def test_bad_requests(make: Callable[[int], Runners], exported: Path, tmp_path: Path) -> None:
    """Each is one error, before anything is exchanged."""
    runners = make(1)
    other = make(1)
    talk = Conversation()
    ask(other, "hi", conversation=talk)
    bad: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (errors.InputError, "empty", lambda: ask(runners, "")),
        (errors.InputError, "string", lambda: ask(runners, None)),  # type: ignore[arg-type]
        (errors.InputError, "UTF-8", lambda: ask(runners, "\ud800")),
        (errors.KeyNotFoundError, "'nobody'; there are 'one'", lambda: ask(runners, "once", "nobody")),
        (errors.InputError, "name of an adapter", lambda: ask(runners, "once", 7)),
        (errors.AdapterError, "nan", lambda: ask(runners, "once", "one", float("nan"))),
        (errors.AdapterError, "inf", lambda: ask(runners, "once", "one", float("inf"))),
        (errors.AdapterError, "strength", lambda: ask(runners, "once", "one", "much")),
        (errors.InputError, "other runners", lambda: ask(runners, "once", conversation=talk)),
        (errors.UnsupportedDataError, "conversation", lambda: ask(runners, "once", conversation="talk")),
        (errors.UnsupportedDataError, "stop", lambda: ask(runners, "once", stop=True)),
        (errors.UnsupportedDataError, "on_token", lambda: ask(runners, "once", on_token=1)),
        (errors.InputError, "max_new_tokens", lambda: runners.generate("once", max_new_tokens=1 << 40)),
        (errors.InputError, "max_new_tokens", lambda: runners.generate("once", max_new_tokens="many")),  # type: ignore[arg-type]
        (errors.InputError, "temperature", lambda: runners.generate("once", temperature=float("nan"))),
        (errors.InputError, "num_bos", lambda: runners.generate("once", num_bos=None)),  # type: ignore[arg-type]
        (errors.FileAccessError, "nothing.ptd", lambda: runners.set_adapter("x", tmp_path / "nothing.ptd")),
        (errors.AdapterError, "foundation.ptd", lambda: runners.set_adapter("x", exported / "live" / "foundation.ptd")),
        (errors.InputError, "empty", lambda: runners.set_adapter("", exported / "one.ptd")),
        (errors.KeyNotFoundError, "'x'", lambda: runners.remove_adapter("x")),
        (errors.InputError, "no runner", lambda: Runners([])),
        (errors.UnsupportedDataError, "pairs", lambda: Runners([1])),  # type: ignore[list-item]
        (errors.UnsupportedDataError, "pairs", lambda: Runners([(1, runners._caches[0])])),  # type: ignore[list-item]
        (errors.InputError, "two runners", lambda: Runners([(runners._runners[0], runners._caches[0])] * 2)),
        (errors.InputError, "string", lambda: Conversation(b"x")),  # type: ignore[arg-type]
    ]
    before = runners.stats
    for kind, words, call in bad:
        with pytest.raises(kind, match=words):
            call()
    assert runners.stats == before
    foreign = tmp_path / "foreign.ptd"
    save_file({"weight": np.ones((4, 4), np.float32)}, tmp_path / "other.ptd")
    save_adapter(foreign, MODEL.adapter(0), foundation=tmp_path / "other.ptd", scale=LORA_ALPHA / RANK)
    runners.set_adapter("foreign", foreign)
    with pytest.raises(errors.AdapterError, match="made for foundation"):
        ask(runners, "once", "foreign")
    assert ask(runners, "once", "two") == eager("once", "two")
    runners._caches[0].close()
    with pytest.raises(errors.ClosedError):
        ask(runners, "once", "one")
    assert "two" in repr(runners) and "hi" not in repr(talk) and "not" in repr(Stop())
