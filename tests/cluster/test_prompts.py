"""The tokens that place a program equal the first tokens that the engine computes."""

from phloem.cluster.prompts import first_prompt
from phloem.protocol import ops as o
from phloem.runtime.tokenizer import load_tokenizer


def test_a_prompt_is_what_comes_before_the_first_generation(tiny_model_path):
    tokenizer = load_tokenizer(tiny_model_path)
    eos = tokenizer.vocab_size - 1
    ops = [
        o.Text(op=0, seq=7, text="one "),
        o.Text(op=1, seq=8, text="of another sequence"),
        o.Mark(op=2, seq=7),
        o.Text(op=3, seq=7, text="two"),
        o.Special(op=4, seq=7, ids=(eos,)),
        o.Fork(op=5, seq=7, children=(9,)),
        o.Text(op=6, seq=7, text="three"),
    ]
    expected = [*tokenizer.encode("one two", at_start=True), eos, *tokenizer.encode("three")]
    bos = [tokenizer.bos_id] if tokenizer.add_bos else []
    assert first_prompt(ops, tokenizer) == [*bos, *expected]
    for last in (o.Gen(op=7, seq=7), o.Select(op=7, seq=7, choices=("a",)), o.Ref(op=7, seq=7, source=1)):
        assert first_prompt([*ops, last, o.Text(op=8, seq=7, text="later")], tokenizer) == [*bos, *expected]
    assert first_prompt([], tokenizer) == first_prompt([o.Close(op=0, seq=0)], tokenizer) == []
