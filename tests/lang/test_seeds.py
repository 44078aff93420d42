"""A run's seed fixes all of its draws, and gives each fork its own; a gen's seed is that gen's."""

from phloem import function, gen
from phloem.protocol.ops import Gen


def seeds_of(backend):
    return [op.params.seed for submit in backend.client.submits for op in submit.ops if isinstance(op, Gen)]


@function
def forked(s, own=None):
    s += "a" + gen("x")
    forks = s.fork(3)
    forks += gen("y", seed=own)


def test_forks_of_a_seeded_run_draw_differently_and_the_same_every_time(connect):
    backend = connect()
    for _ in range(2):
        forked.run(backend=backend, seed=2**62).sync()
    first, second = seeds_of(backend)[:4], seeds_of(backend)[4:]
    assert first == second and first[0] == 2**62 and len(set(first)) == 4
    assert all(0 <= seed < 2**63 for seed in first)


def test_a_compiled_program_draws_as_it_does_uncompiled(connect):
    backend = connect()
    forked.run(backend=backend, seed=5).sync()
    forked.compile(backend=backend, own=None).run(backend=backend, seed=5).sync()
    assert seeds_of(backend)[:4] == seeds_of(backend)[4:]


def test_a_seed_given_to_a_gen_is_sent_as_it_is(connect):
    backend = connect()
    forked.run(11, backend=backend, seed=5).sync()
    assert seeds_of(backend) == [5, 11, 11, 11]
    forked.run(backend=backend).sync()
    assert seeds_of(backend)[4:] == [None] * 4
