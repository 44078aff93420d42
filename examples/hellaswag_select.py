"""Choosing the ending of a story, as HellaSwag (Zellers et al., 2019) asks: the likeliest text, not an answer written.

``select`` scores the endings in one batch after the shared beginning, by their mean log-probability per token.

python examples/hellaswag_select.py
"""

import phloem
from phloem import function, select

STORIES = [
    (
        "A man fills a kettle with water and puts it on the stove. He",
        [
            " waits until the water boils and makes tea.",
            " paints the kettle and drives it to the beach.",
            " sings to the stove and eats the spoon.",
        ],
    ),
    (
        "A girl ties her running shoes and walks to the start of the race. When the whistle blows, she",
        [" reads a book to the whistle.", " begins to run as fast as she can.", " bakes a cake under the road."],
    ),
    (
        "The dog hears the doorbell. It",
        [" runs to the door and barks.", " opens an umbrella and flies away.", " writes a letter to the mayor."],
    ),
    (
        "The children build a snowman. At the end they",
        [" melt him in the oven for lunch.", " sell the snow to a fish.", " give him a carrot for a nose and a hat."],
    ),
]
RIGHT = (0, 1, 0, 2)


@function
def ending(s, story, endings):
    s += story
    s += select("ending", choices=endings)


def main(runtime):
    arguments = [{"story": story, "endings": endings} for story, endings in STORIES]
    states = ending.run_batch(arguments, backend=runtime)
    right = 0
    for (story, endings), state, index in zip(STORIES, states, RIGHT, strict=True):
        right += state["ending"] == endings[index]
        print(f"{story} ...{state['ending']}")
    print(f"{right} of {len(STORIES)} right")


if __name__ == "__main__":
    with phloem.Runtime(model="smollm2") as runtime:
        main(runtime)
