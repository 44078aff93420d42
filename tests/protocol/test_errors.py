"""Errors travel as data and are raised with their type, message and fields."""

import msgspec
import pytest
from phloem.protocol import errors


@pytest.mark.parametrize("kind", sorted(errors.kinds_of(errors.PhloemError).values(), key=lambda kind: kind.__name__))
def test_every_error_comes_back_as_it_was(kind):
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(kind("so it is", where="op 3").info()), type=errors.ErrorInfo)
    back = errors.from_info(sent)
    assert (type(back), back.message, back.where) == (kind, "so it is", "op 3")


def test_an_unknown_kind_is_an_error_all_the_same():
    assert type(errors.from_info(errors.ErrorInfo("FromTheFuture", "new"))) is errors.PhloemError


def test_when_to_try_again_travels_with_an_overload():
    info = errors.Overloaded("full", retry_after_s=7.5).info()
    back = errors.from_info(msgspec.json.decode(msgspec.json.encode(info), type=errors.ErrorInfo))
    assert isinstance(back, errors.Overloaded) and back.retry_after_s == 7.5
    assert errors.Overloaded("full").info().retry_after_s == 0.0
    assert b"retry" not in msgspec.json.encode(errors.Cancelled("gone").info())
