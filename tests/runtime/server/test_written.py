"""Answers that come back as text keep the tokens in which the model wrote them."""

import itertools
import random

import openai
import phloem
from phloem.runtime.server.app import create_app
from phloem.runtime.server.written import WrittenAnswer, WrittenAnswers
from phloem.runtime.tokenizer import load_chat_template, load_tokenizer
from phloem.tests.runtime.server.doubles import live_server

PROMPT = [(1,), "user\nhi", (2,), "assistant\n"]


def test_an_answer_is_found_after_the_same_conversation_alone():
    answers = WrittenAnswers()
    answers.keep("", PROMPT, "a b", (7, 8))
    later = [(1,), "user\nhi", (2,), "assistant\na b", (2,), "user\nmore", (2,), "assistant\n"]
    assert answers.found_in("", later) == (WrittenAnswer(3, 10, "a b", (7, 8)),)
    assert not answers.found_in("another tenant", later)
    assert not answers.found_in("", [(1,), "user\nHi", *later[2:]])
    assert not answers.found_in("", [*later[:3], "assistant\na b c", *later[4:]])
    answers.keep("", later, "c", (9,))
    longer = [*later[:-1], "assistant\nc", (2,)]
    assert [one.token_ids for one in answers.found_in("", longer)] == [(7, 8), (9,)]


def test_an_answer_right_after_special_tokens_is_a_part_of_its_own():
    answers = WrittenAnswers()
    answers.keep("", ["x", (1, 3)], "a", (7,))
    assert answers.found_in("", ["x", (1, 3), "a", (2,)]) == (WrittenAnswer(2, 0, "a", (7,)),)


def test_the_least_recently_used_answers_are_dropped_first():
    rng, answers = random.Random(0), WrittenAnswers(max_answers=5, max_tokens=40)
    kept: dict[int, int] = {}  # number of an answer to its tokens, least recently used first
    for _ in range(400):
        number = rng.randrange(12)
        if rng.random() < 0.5:
            kept.pop(number, None)
            kept[number] = rng.randint(1, 15)
            answers.keep("", ["p"], f"answer {number}", (number,) * kept[number])
            while len(kept) > 5 or sum(kept.values()) > 40:
                del kept[next(iter(kept))]
        else:
            found = answers.found_in("", [f"panswer {number}"])
            assert [len(one.token_ids) for one in found] == ([kept[number]] if number in kept else [])
            if found:
                kept[number] = kept.pop(number)
        assert len(answers) == len(kept)


def test_a_chat_stays_in_the_cache_token_for_token(tiny_model_path):
    """A random model's text has other tokens when it is tokenized anew."""
    tokenizer = load_tokenizer(tiny_model_path)
    with phloem.Engine(model=str(tiny_model_path), precision="float32", num_slots=8192) as engine:
        app = create_app(engine.client, tokenizer, load_chat_template(tiny_model_path, tokenizer), model_name="tiny")
        with live_server(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            messages, usages = [{"role": "user", "content": "Size?"}], []
            for _ in range(3):
                answer = client.chat.completions.create(
                    model="tiny", messages=messages, max_tokens=40, extra_body={"ignore_eos": True}
                )
                text = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
                usages.append(answer.usage)
    for before, after in itertools.pairwise(usages):
        held = after.prompt_tokens_details.cached_tokens
        assert before.total_tokens - 2 <= held < after.prompt_tokens
