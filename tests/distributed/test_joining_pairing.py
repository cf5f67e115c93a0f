"""The exchange of keys by a code: both learn each other's key; who does not know the code learns nothing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from distributed.joining.pairing.codes import Code
from distributed.joining.pairing.exchange import MESSAGE_BYTES, Introduction, Pairing, WrongCode
from distributed.joining.pairing.keys import JoiningKey

CODE, OTHER = Code(17, ("amber", "comet", "lizard")), Code(17, ("amber", "comet", "banjo"))
KEY = "AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43
ABOUT = Introduction(name="studio", key=KEY)


@pytest.fixture
def identity(tmp_path: Path) -> JoiningKey:
    return JoiningKey(tmp_path / "helper_key")


def pair(helper_code: Code = CODE, pool_code: Code = CODE) -> tuple[Pairing, Pairing]:
    helper, pool = Pairing(helper_code, is_helper=True), Pairing(pool_code, is_helper=False)
    helper.finish(pool.message)
    pool.finish(helper.message)
    return helper, pool


def test_both_read_what_the_other_has_sealed(identity: JoiningKey) -> None:
    helper, pool = pair()
    about = ABOUT.model_copy(update={"key": identity.public})
    assert pool.open_introduction(helper.seal_introduction(about, identity)) == about
    assert helper.open_introduction(pool.seal_introduction(about, identity)) == about
    assert helper.open(pool.seal({"yes": True})) == {"yes": True}


def test_nobody_is_introduced_with_a_key_that_it_does_not_hold(identity: JoiningKey, tmp_path: Path) -> None:
    about = ABOUT.model_copy(update={"key": identity.public})
    helper, pool = pair()
    other = JoiningKey(tmp_path / "other_key")
    with pytest.raises(WrongCode):
        pool.open_introduction(helper.seal_introduction(about, other))
    with pytest.raises(WrongCode):  # without a proof
        pool.open_introduction(helper.seal(about.model_dump()))


def test_the_proof_of_a_key_is_good_for_one_exchange_and_one_side(identity: JoiningKey) -> None:
    helper, pool = pair()
    about = ABOUT.model_copy(update={"key": identity.public})
    proven = pool.open(helper.seal_introduction(about, identity))
    later_helper, later_pool = pair()
    with pytest.raises(WrongCode):
        later_pool.open_introduction(later_helper.seal(proven))
    with pytest.raises(WrongCode):
        helper.open_introduction(pool.seal(proven))


def test_with_another_code_nothing_can_be_read() -> None:
    helper, pool = pair(OTHER)
    for sealed, side in ((helper.seal({}), pool), (pool.seal({}), helper)):
        with pytest.raises(WrongCode):
            side.open(sealed)


def test_what_was_overheard_is_good_for_no_other_exchange() -> None:
    helper, _ = pair()
    sealed = helper.seal(ABOUT.model_dump())
    again = Pairing(CODE, is_helper=False)
    again.finish(helper.message)
    with pytest.raises(WrongCode):
        again.open(sealed)


def test_messages_are_read_once_in_order_and_one_way() -> None:
    helper, pool = pair()
    first, second = helper.seal({"n": 1}), helper.seal({"n": 2})
    assert pool.open(first) == {"n": 1}
    with pytest.raises(WrongCode):
        pool.open(first)
    helper, pool = pair()
    with pytest.raises(WrongCode):
        helper.open(helper.seal({}))
    assert second


def read_after(message: bytes, sealed: bytes) -> None:
    pool = Pairing(CODE, is_helper=False)
    pool.finish(message)
    pool.open(sealed)


@given(st.binary(max_size=2 * MESSAGE_BYTES))
def test_garbage_is_a_wrong_code(message: bytes) -> None:
    with pytest.raises(WrongCode):
        read_after(message, b"\0" * 40)


def test_a_message_sent_back_is_a_wrong_code() -> None:
    pool = Pairing(CODE, is_helper=False)
    with pytest.raises(WrongCode):
        pool.finish(pool.message)
    pool = Pairing(CODE, is_helper=False)
    with pytest.raises(WrongCode):
        pool.finish(b"A" + pool.message[1:])


@pytest.mark.parametrize(
    "change",
    [{"name": "../x"}, {"name": ""}, {"name": "a" * 41}, {"key": "ssh-rsa"}, {"key": KEY[:-1]},
     {"key": KEY + "="}, {"key": KEY[:25] + "Q" * 43}, {"system": "\x1b[2J"}, {"user": "\u2066x"}, {"name": 5},
     {"memory": -1}, {"v": 2}, {"addresses": ["x"] * 17}, {"user": "a" * 121}],
)  # fmt: skip
def test_a_false_introduction_is_refused(change: dict[str, object], identity: JoiningKey) -> None:
    with pytest.raises(ValidationError):
        Introduction.model_validate({**ABOUT.model_dump(), **change})
    helper, pool = pair()
    proven = pool.open(helper.seal_introduction(ABOUT, identity))
    with pytest.raises(WrongCode):
        pool.open_introduction(helper.seal({**proven, "key": identity.public, **change}))


def test_processes_that_make_a_key_at_a_time_have_the_same_one(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as many:
        made = [many.submit(JoiningKey, tmp_path / "key") for _ in range(8)]
    assert len({one.result().public for one in made}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_only_objects_are_read() -> None:
    helper, pool = pair()
    sealed = helper._sending.encrypt(bytes(12), json.dumps([1]).encode(), None)
    with pytest.raises(WrongCode):
        pool.open(sealed)
