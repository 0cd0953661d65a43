"""No collection inside, and nothing walked because of it afterwards."""

import gc
import weakref

import pytest

from perfmodel.heap import uncollected


class Node:
    """Holds itself."""

    def __init__(self):
        self.me = self


@pytest.fixture(autouse=True)
def nothing_frozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_is_made_inside_is_old_afterwards_and_can_still_be_collected():
    with uncollected():
        assert not gc.isenabled()
        node = Node()
    assert gc.isenabled()
    assert any(found is node for found in gc.get_objects(generation=2))
    gone = weakref.ref(node)
    del node
    assert gone() is not None
    gc.collect()
    assert gone() is None


def test_what_others_froze_stays_frozen():
    gc.freeze()
    frozen = gc.get_freeze_count()
    with uncollected():
        pass
    assert gc.get_freeze_count() == frozen > 0


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
