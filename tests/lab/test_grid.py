from collections import Counter

import pytest

from lab.campaigns.grid import KINDS, WHEN, catalogue, draw, faulty
from lab.campaigns.judges import REPOSITORY

FAULTS = catalogue()


def test_every_fault_can_be_planted():
    for fault in (*FAULTS, *catalogue("kernels/*.toml")):
        text = (REPOSITORY / fault.file).read_text()
        assert faulty(fault, text) != text
        assert fault.kind in KINDS, fault.id
        assert fault.when in WHEN, fault.id
    assert max(Counter(fault.id for fault in FAULTS).values()) == 1


def test_a_fault_without_its_text_is_refused():
    with pytest.raises(ValueError, match="occurs 0 times"):
        faulty(FAULTS[0], "")


def test_draws_are_repeatable_and_even():
    drawn = draw(FAULTS, 96, seed=3)
    assert drawn == draw(FAULTS, 96, seed=3) != draw(FAULTS, 96, seed=4)
    counts = Counter(fault.place for fault in drawn)
    assert len(drawn) == 96
    assert counts.keys() == {fault.place for fault in FAULTS}
    assert max(counts.values()) - min(counts.values()) <= 1
