from __future__ import annotations

import pytest

from equipoise import GRADIENTS, SOLVERS, FixedPoint
from equipoise.core import Registry, choose


class Animal:
    pass


class Cat(Animal):
    pass


@pytest.fixture
def zoo() -> Registry[Animal]:
    registry = Registry("animal", Animal)
    registry.register("cat")(Cat)

    @registry.register("ant")
    class Ant(Animal):
        pass

    return registry


def test_choose_returns_a_known_name() -> None:
    assert choose("colour", "red", ["green", "red"]) == "red"


def test_choose_lists_the_names_in_order_and_suggests_the_nearest() -> None:
    with pytest.raises(
        ValueError,
        match=r"^colour must be one of blue, green, red; got 'gren'\. Did you mean 'green'\?$",
    ):
        choose("colour", "gren", ["red", "green", "blue"])


def test_choose_suggests_nothing_when_nothing_is_near() -> None:
    with pytest.raises(ValueError, match=r"^colour must be one of green, red; got 'xyzzy'\.$"):
        choose("colour", "xyzzy", ["red", "green"])


@pytest.mark.parametrize("value", [None, 3, 2.5])
def test_choose_refuses_what_is_not_a_name(value: object) -> None:
    with pytest.raises(ValueError, match=rf"colour must be one of green, red; got {value}\."):
        choose("colour", value, ["red", "green"])


def test_registry_is_iterated_in_order(zoo: Registry[Animal]) -> None:
    assert list(zoo) == ["ant", "cat"]
    assert "cat" in zoo
    assert "dog" not in zoo


def test_registry_finds_a_class_by_name(zoo: Registry[Animal]) -> None:
    assert zoo["cat"] is Cat


def test_registry_refuses_an_unknown_name_with_a_suggestion(zoo: Registry[Animal]) -> None:
    with pytest.raises(
        ValueError, match=r"animal must be one of ant, cat; got 'cats'\. Did you mean 'cat'\?"
    ):
        zoo["cats"]


def test_registry_refuses_a_name_twice(zoo: Registry[Animal]) -> None:
    with pytest.raises(ValueError, match=r"^animal.name must be new; got 'cat'\. It is"):
        zoo.register("cat")(Cat)
    assert zoo["cat"] is Cat


def test_registry_decorator_returns_the_class(zoo: Registry[Animal]) -> None:
    class Dog(Animal):
        pass

    assert zoo.register("dog")(Dog) is Dog
    assert isinstance(zoo.resolve("dog"), Dog)


def test_resolve_passes_an_object_through_and_makes_one_from_a_name(zoo: Registry[Animal]) -> None:
    cat = Cat()
    assert zoo.resolve(cat) is cat
    assert type(zoo.resolve("cat")) is Cat


def test_resolve_refuses_a_class_and_says_how_to_make_an_object(zoo: Registry[Animal]) -> None:
    with pytest.raises(
        ValueError, match=r"animal must be a name or an object; got the class Cat\. Write Cat\(\)\."
    ):
        zoo.resolve(Cat)


@pytest.mark.parametrize("value", [None, 3, object(), int])
def test_resolve_refuses_other_things(zoo: Registry[Animal], value: object) -> None:
    with pytest.raises(
        ValueError, match=rf"animal must be a name or an Animal; got {type(value).__name__}\."
    ):
        zoo.resolve(value)


def test_resolve_lists_further_names(zoo: Registry[Animal]) -> None:
    with pytest.raises(
        ValueError, match=r"one of ant, auto, cat; got 'aut'\. Did you mean 'auto'\?"
    ):
        zoo.resolve("aut", also=["auto"])


def test_solver_and_gradient_registries_suggest_names() -> None:
    with pytest.raises(
        ValueError, match=r"solver must be one of .*; got 'andersen'\. Did you mean 'anderson'\?"
    ):
        SOLVERS["andersen"]
    with pytest.raises(
        ValueError,
        match=r"gradient must be one of .*; got 'implicitly'\. Did you mean 'implicit'\?",
    ):
        GRADIENTS["implicitly"]
    assert SOLVERS["fixed_point"] is FixedPoint
