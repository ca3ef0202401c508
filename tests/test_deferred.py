"""Questions that are answered at once or after the kernels ran."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt import deferred as tape


def test_questions_are_asked_at_once_or_later():
    yes, no, numbers = torch.tensor(True), torch.tensor(False), torch.tensor([1.0, 2.0, 0.0])
    assert tape.ask(yes)
    assert not tape.ask(no)
    assert tape.read(numbers) == [1.0, 2.0, 0.0]
    seeds = torch.tensor([3, 4])
    assert torch.equal(tape.draw(lambda seed: seeds + seed, 5, numbers), torch.tensor([8.0, 9.0]))
    recording = tape.Tape([7.0, 8.0, 9.0], [torch.zeros(2)])
    with tape.recorded(recording):
        place = tape.draw(lambda seed: seeds + seed, 5, numbers)
        assert tape.recording()
        assert tape.ask(yes)
        assert tape.ask(no)  # all is assumed to be well
        assert tape.read(numbers) == [7.0, 8.0, 9.0]
    assert not tape.recording()
    assert place.dtype == numbers.dtype
    with tape.recorded(tape.Tape([], [torch.zeros(3)])), pytest.raises(RuntimeError, match="other random numbers"):
        tape.draw(lambda seed: seeds + seed, 6, numbers)
    assert [(to is place, of(7).tolist(), seed) for to, of, seed in recording.drawn] == [(True, [10, 11], 5)]
    assert tape.answers(recording, torch.tensor(5.0)).tolist() == [1.0, 0.0, 1.0, 2.0, 0.0, 5.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int8])
def test_classes_that_do_not_exist_end_no_recording(dtype):
    """The question whether they do is answered after the kernels ran."""
    z, y = torch.randn(3, 4), torch.tensor([0, 1, 7], dtype=dtype)
    with tape.recorded(tape.Tape([])):
        found = mq.losses.CrossEntropy().ell(z, y)
    torch.testing.assert_close(found[:2], nn.functional.cross_entropy(z[:2], y[:2].long(), reduction="none"))
    assert found[2] == 0
