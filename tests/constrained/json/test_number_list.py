"""The states inside a number of a list."""

from decimal import Decimal

import numpy as np
from phloem.constrained import Vocabulary
from phloem.constrained.json.number_list import NumberList
from phloem.constrained.json.numbers import Numbers
from phloem.constrained.machine import Machine, walk


def test_spellings_end_with_their_number_and_filters_name_the_states_before_it(vocabulary: Vocabulary) -> None:
    machine = Machine(vocabulary)
    numbers = Numbers(machine.expressions)
    values = ["1", "12", "-3", "0.5", "0"]
    listed = NumberList(machine, [numbers.equal_to(Decimal(v)) for v in values], 2, 7)
    first = np.zeros(256, np.int32)
    listed.begin(first)

    def state_of(text: str) -> int:
        state = int(first[ord(text[0])])
        for byte in text[1:].encode():
            state = int(machine.row(state)[byte])
        return state

    for i, value in enumerate(values):
        for text in (value, value + "0" if "." in value else value + ".0"):
            assert machine.result_of(state_of(text)) == i + 3, text
    assert machine.result_of(state_of("-0")) == 7 and machine.result_of(state_of("-")) == -1
    allowed = listed.allowed(1 << 3)  # 12 alone
    assert len(allowed) == listed.num_states
    texts = ("1", "12", "12.0", "0", "-", "1.0")
    local = machine.arrays[walk.LOCAL]
    assert [text for text in texts if allowed[local[state_of(text)] - 7]] == ["1", "12", "12.0"]
