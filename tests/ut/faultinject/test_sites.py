"""Sites: a proxy passes for what it wraps, a patch is undone without a trace, and only declared names are sites."""

from __future__ import annotations

import queue
import threading
import types

import pytest
from toy_worker import Store

import faultinject as fi
from faultinject.site import as_sites


class Base:
    """Something with every kind of attribute that can be patched."""

    def method(self) -> str:
        return "method"

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def made(cls) -> str:
        return cls.__name__

    @property
    def name(self) -> str:
        return "property"

    factory = dict


class Child(Base):
    pass


def test_a_proxy_passes_for_its_object() -> None:
    store = fi.wrap(Store(), "store")
    assert isinstance(store, Store)
    assert store.put("a", 1) == [0]
    assert store.values == {"a": 1}
    store.values = {}
    assert store.values == {}
    with pytest.raises(AttributeError):
        _ = store.nothing  # type: ignore[attr-defined]


def test_a_proxy_has_the_special_methods_of_its_object_and_no_others() -> None:
    mapping = fi.wrap({"a": 1}, "map", ["get"])
    assert len(mapping) == 1
    assert list(mapping) == ["a"]
    assert mapping["a"] == 1
    assert "a" in mapping
    assert mapping == {"a": 1}
    with pytest.raises(TypeError, match="unhashable"):
        hash(mapping)
    with pytest.raises(TypeError):
        len(fi.wrap(Store(), "store"))  # type: ignore[arg-type]


def test_entering_a_proxy_hands_out_the_proxy() -> None:
    class Connection:
        def __enter__(self) -> Connection:
            return self

        def __exit__(self, *exc: object) -> None: ...

        def send(self) -> str:
            return "sent"

    with (
        fi.wrap(Connection(), "connection", ["send"]) as connection,
        fi.Session(fi.Fault("connection.send", fi.Drop())),
    ):
        assert connection.send() is None


def test_calls_can_be_sites_themselves() -> None:
    double = fi.wrap(lambda x: 2 * x, "double", ["__call__"])
    with fi.Session(fi.Fault("double.__call__", fi.Return(-1), fi.Nth(2))):
        assert [double(1), double(2), double(3)] == [2, -1, 6]


def test_replacing_a_wrapped_method_keeps_the_site() -> None:
    store = fi.wrap(Store(), "store", ["put"])
    store.put = lambda key, value: [7]  # type: ignore[method-assign]
    with fi.Session(fi.Fault("store.put", fi.Empty())):
        assert store.put("a", 1) == []
    assert store.put("a", 1) == [7]


@pytest.mark.parametrize(
    ("attr", "normal"), [("method", "method"), ("static", "static"), ("made", "Child"), ("name", "property")]
)
@pytest.mark.parametrize("owner", [Base, Child])
def test_patching_a_class(owner: type[Base], attr: str, normal: str) -> None:
    def value() -> object:
        found = getattr(Child(), attr)
        return found() if callable(found) else found

    before = vars(owner).get(attr)
    with fi.patch(owner, attr, site="site"), fi.Session(fi.Fault("site", fi.Return("changed"), fi.Nth(2))):
        assert [value(), value(), value()] == [normal, "changed", normal]
    assert vars(owner).get(attr) is before
    assert value() == normal


def test_patching_a_callable_that_is_no_method_does_not_bind_it() -> None:
    with fi.patch(Base, "factory"), fi.Session(fi.Fault("Base.factory", fi.Return(None), fi.Nth(2))):
        assert Base().factory(a=1) == {"a": 1}
        assert Base().factory() is None


def test_patching_an_instance_and_a_module() -> None:
    one, other = Base(), Base()
    module = types.ModuleType("module")
    module.answer = lambda: 42  # type: ignore[attr-defined]
    with fi.Session() as session:
        session.patch(one, "method", site="one.method")
        session.patch(module, "answer")
        session.arm(fi.Fault("one.method", fi.Return("changed")))
        session.arm(fi.Fault("module.answer", fi.Return(0)))
        assert (one.method(), other.method(), module.answer()) == ("changed", "method", 0)
    assert "method" not in vars(one)
    assert module.answer() == 42


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fi.wrap(Store(), "store", ["gone"]), AttributeError, "site store.gone: Store has no method .*: .*put"),
        (lambda: fi.wrap(Store(), "store", ["values"]), TypeError, "not callable"),
        (lambda: fi.wrap(Store(), "sto:re"), ValueError, "site name 'sto:re.put'"),
        (lambda: fi.patch(Store, "gone"), AttributeError, "site Store.gone: .* has no attribute"),
        (lambda: fi.patch(Store, "__doc__"), TypeError, "only callables"),
        (lambda: fi.Site("a", (fi.Kill(), fi.Kill())), ValueError, "two actions share a name"),
        (lambda: as_sites(["a", "a"]), ValueError, "declared twice"),
    ],
)
def test_bad_sites_are_refused_by_name(make: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()  # type: ignore[operator]


def test_coroutine_functions_are_no_sites() -> None:
    class Async:
        async def get(self) -> None: ...

        def close(self) -> str:
            return "closed"

    with pytest.raises(TypeError, match="coroutine"):
        fi.wrap(Async(), "client", ["get"])
    assert fi.wrap(Async(), "client").close() == "closed"


def test_a_proxy_of_a_c_type_works_in_threads() -> None:
    items: queue.SimpleQueue[int] = fi.wrap(queue.SimpleQueue(), "items", ["put"])
    with fi.Session(fi.Fault("items.put", fi.Drop(), fi.Nth(50), role=None)) as session:
        threads = [threading.Thread(target=lambda: [items.put(n) for n in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(session.hits) == 200
    assert items.qsize() == 199
