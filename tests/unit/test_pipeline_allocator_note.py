"""A rank whose tensors fit, but not with what the allocator keeps besides, is told so."""

from dataclasses import replace

import pytest

import perfmodel.pipeline.run as run_module
from perfmodel.api import predict


@pytest.mark.parametrize("room", [0, 1])
def test_a_note_where_the_allocator_has_no_room(monkeypatch, room):
    """Capacity between the tensors and tensors plus cache: accepted with a note; enough for both: without."""
    memory = predict("gpt2", "h100").ranks[0].memory
    assert memory.allocator_bytes > 0
    capacity = memory.total_bytes - (0 if room else 1)
    real = run_module.load_shared

    def small(*args):
        return replace(real(*args), memory_bytes=capacity)

    monkeypatch.setattr(run_module, "load_shared", small)
    notes = " ".join(predict("gpt2", "h100").notes)
    assert ("what the allocator keeps besides" in notes) == (room == 0)
