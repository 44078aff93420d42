"""Fake models for the language's tests: they answer with words of the prompt, on both paths."""

from phloem import function
from phloem.lang.backend.base_backend import BaseBackend

ENDLESS = " w" * 50_000  # at one word a step of 2 ms or more it lasts longer than any test


class Fake(BaseBackend):
    """Answers " <last word>"; fails where the text holds ``bad``."""

    precache_in_batch = False

    def __init__(self):
        self.params = []
        self.prefixes = []

    def generate(self, s, sampling_params):
        self.params.append(sampling_params)
        if "bad" in s.text_:
            raise OSError("the line is dead")
        texts = [f" <{last_word(s.text_)}{i or ''}>" for i in range(sampling_params.n)]
        return (texts if sampling_params.n > 1 else texts[0]), {"completion_tokens": 2}

    def generate_stream(self, s, sampling_params):
        for piece in (" one", " two"):
            yield piece, {"completion_tokens": 2}

    def fill_image(self, s):
        pass

    def cache_prefix(self, prefix_str):
        self.prefixes.append(prefix_str)


def echo(prompt, op):
    """The last word of the prompt, so that the reply depends on what is visible; the same for every candidate."""
    return [f" <{last_word(prompt)}>"] * op.n


def last_word(text):
    return text.split()[-1] if text.split() else ""


def run(body, backend, **options):
    """Run ``body`` as a program and return its state."""
    return function(body).run(backend=backend, **options)


def says(*exprs):
    """A body that appends ``exprs`` one by one."""

    def body(s):
        for expr in exprs:
            s += expr

    return body
