"""Which operators repeat earlier ones: against a search that tries every earlier place, on made-up sequences."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.annotate.repeated import sources_of


def owners(text, further, fixed):
    """`text`: one letter per operator; the letter each operator's module is first met at."""
    found = sources_of(list(text), np.array([c == "1" for c in further]), np.array([c == "1" for c in fixed]))
    out = list(range(len(text)))
    for i, source in enumerate(found.tolist()):
        out[i] = out[source] if source >= 0 else i
    return out


@pytest.mark.parametrize(
    ("text", "further", "fixed", "wanted"),
    [
        ("elglglgh", "00010100", "11000001", [0, 1, 2, 1, 2, 1, 2, 7]),  # a block of two, three times
        ("edldldlh", "00001010", "10100001", [0, 1, 2, 1, 2, 1, 2, 7]),  # one that begins with an operator without parameters
        ("abcabch", "0001110", "1110001", [0, 1, 2, 0, 1, 2, 6]),  # two modules in turn
        ("llll", "0111", "1000", [0, 0, 0, 0]),
        ("abcd", "0000", "1111", [0, 1, 2, 3]),
        ("abx", "001", "110", [0, 1, 2]),  # nothing like it before: nobody's
    ],
)
def test_calls_of_blocks(text, further, fixed, wanted):
    assert owners(text, further, fixed) == wanted


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("-uf")), max_size=30))
def test_a_source_is_earlier_and_of_the_same_name(items):
    text = [name for name, _ in items]
    further, fixed = (np.array([kind == which for _, kind in items], bool) for which in "uf")
    found = sources_of(text, further, fixed)
    for i, source in enumerate(found.tolist()):
        assert source < i
        if source >= 0:
            assert text[source] == text[i] and not fixed[i]
        elif further[i]:
            assert text[i] not in text[:i], "a further call of something that ran before has a source"
