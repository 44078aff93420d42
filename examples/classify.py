"""Few-shot classification: every item shares one prompt, which the model reads once.

python examples/classify.py
"""

import argparse

import phloem
from phloem import function, select

EXAMPLES = """\
Sentence: The train leaves at noon.
Language: English

Sentence: Le chat dort sur la chaise.
Language: French

Sentence: Wir gehen morgen ins Kino.
Language: German

Sentence: Me gusta mucho esta casa.
Language: Spanish

"""
SENTENCES = {
    "Where did you put my keys?": "English",
    "Je ne sais pas encore.": "French",
    "Das Wetter ist heute schön.": "German",
    "Mañana vamos a la playa.": "Spanish",
    "Nous avons deux enfants.": "French",
    "Ich habe keine Zeit.": "German",
    "The soup is getting cold.": "English",
    "El perro corre por el parque.": "Spanish",
}


@function
def language_of(s, sentence):
    s += EXAMPLES
    s += f"Sentence: {sentence}\nLanguage:"
    s += select("language", choices=[" English", " French", " German", " Spanish"])


def main(model: str) -> None:
    with phloem.Runtime(model=model) as runtime:
        states = language_of.run_batch([{"sentence": sentence} for sentence in SENTENCES], backend=runtime)
        right = 0
        for (sentence, language), state in zip(SENTENCES.items(), states, strict=True):
            answer = state["language"].strip()
            right += answer == language
            print(f"{answer:8} {'' if answer == language else f'(not {language}) '}{sentence}")
        stats = [state.stats() for state in states]
        cached, prompt = (sum(stat[key] for stat in stats) for key in ("cached_tokens", "prompt_tokens"))
        print(f"{right} of {len(SENTENCES)} right; {cached} of {prompt} prompt tokens came from the cache")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    main(parser.parse_args().model)
