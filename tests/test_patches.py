"""What memwall changes on objects that are not its own: taken back in order, whatever fails, and listed meanwhile."""

import gc
import logging
import os
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from memwall import patches
from memwall.patches import Patches, active, note_permanent


class _Handle:
    """As torch's: removes a hook from a table."""

    def __init__(self, table: "OrderedDict[int, Any]", number: int) -> None:
        self._table, self._number = table, number

    def remove(self) -> None:
        self._table.pop(self._number, None)


class _Model:
    def __init__(self) -> None:
        self.hooks: OrderedDict[int, Any] = OrderedDict()

    def forward(self, x: int) -> int:
        return x + 1

    def register_hook(self, hook: Callable[..., Any], *, number: int = 0) -> _Handle:
        self.hooks[number] = hook
        return _Handle(self.hooks, number)


@pytest.fixture
def library() -> types.ModuleType:
    """Somebody else's module with one function."""
    made = types.ModuleType("library")
    made.double = lambda x: 2 * x  # type: ignore[attr-defined]
    return made


def _plus(number: int) -> Callable[..., int]:
    return lambda original, *args: int(original(*args)) + number


def _places() -> list[str]:
    return [entry.where for entry in active() if not entry.permanent]


# -- one change --------------------------------------------------------------------------------------------------------


def test_a_wrapped_function_is_the_original_object_again(library: Any) -> None:
    original, group = library.double, Patches("test")
    group.wrap(library, "double", _plus(1))
    assert library.double(5) == 11
    group.undo()
    assert library.double is original


def test_a_wrapper_looks_like_what_it_wraps(library: Any) -> None:
    def halve(x: int) -> float:
        """Half."""
        return x / 2

    library.halve, group = halve, Patches("test")
    group.wrap(library, "halve", lambda original, x: original(x))
    assert (library.halve.__name__, library.halve.__doc__) == ("halve", "Half.")
    group.undo()


def test_methods_and_static_methods_of_a_class_are_wrapped_as_what_they_are() -> None:
    class Kind:
        def __init__(self) -> None:
            self.number = 1

        def get(self) -> int:
            return self.number

        @staticmethod
        def fixed() -> int:
            return 7

    group, raw = Patches("test"), vars(Kind)["fixed"]
    group.wrap(Kind, "get", _plus(10))
    group.wrap(Kind, "fixed", _plus(100))
    assert (Kind().get(), Kind().fixed(), Kind.fixed()) == (11, 107, 107)
    group.undo()
    assert Kind().get() == 1
    assert vars(Kind)["fixed"] is raw


def test_an_object_that_had_no_value_of_its_own_has_none_again() -> None:
    model, group = _Model(), Patches("test")
    group.wrap(model, "forward", _plus(1))
    assert model.forward(1) == 3
    group.undo()
    assert "forward" not in vars(model)


def test_an_object_is_of_its_own_class_again() -> None:
    class Watched(_Model):
        pass

    model, group = _Model(), Patches("test")
    group.replace(model, "__class__", Watched)
    assert type(model) is Watched
    group.undo()
    assert type(model) is _Model


def test_a_hook_is_registered_with_its_options_and_removed() -> None:
    model, group = _Model(), Patches("test")
    group.hook(model.register_hook, print, number=3)
    assert model.hooks == {3: print}
    group.undo()
    assert not model.hooks


def test_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMWALL_TEST_OLD", "before")
    monkeypatch.delenv("MEMWALL_TEST_NEW", raising=False)
    group = Patches("test")
    group.environment("MEMWALL_TEST_OLD", "during")
    group.environment("MEMWALL_TEST_NEW", "during")
    assert (os.environ["MEMWALL_TEST_OLD"], os.environ["MEMWALL_TEST_NEW"]) == ("during", "during")
    group.undo()
    assert os.environ["MEMWALL_TEST_OLD"] == "before"
    assert "MEMWALL_TEST_NEW" not in os.environ


def test_a_variable_that_the_script_has_set_since_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MEMWALL_TEST", raising=False)
    group = Patches("test")
    group.environment("MEMWALL_TEST", "during")
    os.environ["MEMWALL_TEST"] = "the script's"
    group.undo()
    assert os.environ["MEMWALL_TEST"] == "the script's"
    assert "MEMWALL_TEST was changed by somebody else after memwall" in caplog.text


# -- order and failures ------------------------------------------------------------------------------------------------


def test_the_last_change_is_taken_back_first(library: Any) -> None:
    order: list[str] = []
    group = Patches("test")
    for name in ("first", "second", "third"):
        group.add("switch", name, lambda name=name: order.append(name))
    group.undo()
    assert order == ["third", "second", "first"]


def test_a_change_made_twice_in_one_place_ends_with_the_original(library: Any) -> None:
    original, group = library.double, Patches("test")
    group.wrap(library, "double", _plus(1))
    group.wrap(library, "double", _plus(10))
    assert library.double(5) == 21
    group.undo()
    assert library.double is original


def test_two_groups_in_one_place_may_end_in_any_order(library: Any) -> None:
    original, first, second = library.double, Patches("first"), Patches("second")
    first.wrap(library, "double", _plus(1))
    second.wrap(library, "double", _plus(10))
    first.undo()
    assert library.double(5) == 20  # the second one's share alone
    second.undo()
    assert library.double is original


def test_two_groups_may_set_one_variable_to_the_same_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMWALL_TEST", raising=False)
    first, second = Patches("first"), Patches("second")
    first.environment("MEMWALL_TEST", "1")
    second.environment("MEMWALL_TEST", "1")
    first.undo()
    assert os.environ["MEMWALL_TEST"] == "1"
    second.undo()
    assert "MEMWALL_TEST" not in os.environ


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_a_failure_in_the_middle_stops_nothing_and_is_raised_at_the_end(
    library: Any, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(text: str) -> None:
        raise kind(text)

    original, group = library.double, Patches("test")
    group.wrap(library, "double", _plus(1))
    broken = group.add("switch", "broken", lambda: fail("met later"))
    group.add("switch", "also broken", lambda: fail("met first"))
    with pytest.raises(kind, match="met first"):
        group.undo()
    assert library.double is original
    assert _places() == ["broken", "also broken"]  # as far as anybody knows they are in effect
    assert "a further change could not be taken back" in caplog.text
    for number in [entry.number for entry in active() if entry.where in ("broken", "also broken")]:
        patches._active.pop(number)
    assert broken.is_over


def test_what_is_undone_twice_is_taken_back_once() -> None:
    calls: list[int] = []
    group = Patches("test")
    patch = group.add("switch", "x", lambda: calls.append(1))
    patch.undo()
    group.undo()
    group.undo()
    assert calls == [1]


# -- others ------------------------------------------------------------------------------------------------------------


def test_a_wrapper_that_others_have_put_on_top_stays_and_ours_passes_calls_on(
    library: Any, caplog: pytest.LogCaptureFixture
) -> None:
    group = Patches("test")
    group.wrap(library, "double", _plus(1))
    ours = library.double
    library.double = lambda x: 1000 + ours(x)
    foreign = library.double
    group.undo()
    assert library.double is foreign
    assert library.double(5) == 1010
    assert "library.double was changed by somebody else after memwall" in caplog.text
    assert not _places()


def test_an_own_change_under_a_foreign_one_is_taken_back_once_it_is_met_again(library: Any) -> None:
    group = Patches("test")
    group.wrap(library, "double", _plus(1))
    ours = library.double
    library.double = lambda x: 1000 + ours(x)
    group.undo()
    library.double = ours  # the other library takes its wrapper away
    assert library.double(5) == 10


def test_nothing_is_logged_where_nobody_interfered(library: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    group = Patches("test")
    group.wrap(library, "double", _plus(1))
    group.hook(_Model().register_hook, print)
    group.undo()
    assert not caplog.records


# -- the list ----------------------------------------------------------------------------------------------------------


def test_the_list_says_what_is_changed_where_and_why(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMWALL_TEST", raising=False)
    model, group = _Model(), Patches("shows the list")
    group.wrap(library, "double", _plus(1))
    group.hook(model.register_hook, print)
    group.environment("MEMWALL_TEST", "1")
    group.add("switch", "somewhere", lambda: None)
    kind = f"{__name__}._Model"
    assert [(entry.what, entry.where, entry.why) for entry in active() if not entry.permanent] == [
        ("attribute", "library.double", "shows the list"),
        ("hook", f"{kind}.register_hook", "shows the list"),
        ("environment variable", "MEMWALL_TEST", "shows the list"),
        ("switch", "somewhere", "shows the list"),
    ]
    group.undo()
    assert not _places()


def test_what_cannot_be_taken_back_is_listed_once_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_active", {})
    for _ in range(2):
        note_permanent("observer", "library.observers", why="test", reason="the library has no way to remove one")
    (entry,) = active()
    assert (entry.where, entry.permanent) == ("library.observers", "the library has no way to remove one")


def test_a_change_of_an_object_keeps_it_alive_no_longer_and_ends_with_it() -> None:
    model, group = _Model(), Patches("test")
    group.replace(model, "limit", 3)
    group.hook(model.register_hook, print)
    gc.disable()
    try:
        del model
        assert not _places()
    finally:
        gc.enable()
    group.undo()  # finds nobody to restore


def test_a_change_whose_maker_forgot_it_stays_in_the_list(library: Any) -> None:
    Patches("forgotten").wrap(library, "double", _plus(1))
    assert _places() == ["library.double"]
    patches._active.popitem()


def test_what_is_put_into_an_object_is_not_handed_on_by_its_class() -> None:
    """GIVEN an object that sets attributes of another as well WHEN one of it is replaced THEN the other keeps its."""

    class Inner:
        def forward(self) -> str:
            return "own"

    class Wrapper(Inner):
        def __init__(self) -> None:
            object.__setattr__(self, "inner", Inner())

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

        def __setattr__(self, name: str, value: object) -> None:
            setattr(self.inner, name, value)
            object.__setattr__(self, name, value)

    wrapper = Wrapper()
    with Patches("a test") as patches:
        patches.replace(wrapper, "forward", lambda: "new")
        assert (wrapper.forward(), wrapper.inner.forward()) == ("new", "own")
    assert (wrapper.forward(), wrapper.inner.forward()) == ("own", "own")
