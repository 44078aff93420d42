"""A program's sequences: an answer that is appended where the model wrote it keeps the model's tokens."""

import re

import pytest
from phloem.protocol.messages import ProgramSettings
from phloem.runtime.engine.program import Program, SequenceState
from phloem.runtime.scheduler import Sequence
from phloem.runtime.scheduler.sequence import TokenBuffer


class Pairs:
    """A tokenizer that spells ``ab`` as one token, where a model may write two."""

    bos_id, add_bos = None, False
    tokens = ("a", "b", "ab", "|")

    def encode(self, text, *, at_start=False):
        return [self.tokens.index(part) for part in re.findall("ab|.", text)]

    def decode(self, ids, *, skip_special=True):
        return "".join(self.tokens[token_id] for token_id in ids)


def begun(program, number, text):
    state = SequenceState(program, number, Sequence(number, TokenBuffer()))
    state.append_text(text)
    state.flush_text(Pairs())
    return state


def written(state, ids):
    start = len(state.seq.tokens)
    state.seq.tokens.extend(ids)
    state.note_generated(start, Pairs().decode(ids))


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("a|", "ab", [0, 1]),  # as the model wrote it
        ("a|", "aba", [2, 0]),  # another text
        ("b|", "ab", [2]),  # the same text after another prompt
        ("a|a", "ab", [2]),  # at another place
    ],
)
def test_an_answer_appended_where_the_model_wrote_it_keeps_its_tokens(prompt, text, ids):
    program = Program((b"client", "p"), ProgramSettings(), now_s=0.0, usage_rows=("", ""))
    child = begun(program, 1, "a|")
    written(child, [0, 1])
    child.append_text("|")
    child.flush_text(Pairs())
    parent = begun(program, 0, prompt)
    before = len(parent.seq.tokens)
    parent.append_text(text)
    parent.flush_text(Pairs())
    assert parent.seq.tokens.ids[before:].tolist() == ids and parent.text == prompt + text


def test_an_answer_that_was_rolled_back_is_tokenized_like_any_text():
    program = Program((b"client", "p"), ProgramSettings(), now_s=0.0, usage_rows=("", ""))
    child = begun(program, 1, "a|")
    written(child, [0, 1])
    del child.segments[-1]
    child.seq.tokens.truncate(2)
    parent = begun(program, 0, "a|")
    parent.append_text("ab")
    parent.flush_text(Pairs())
    assert parent.seq.tokens.ids.tolist() == [0, 3, 2]
