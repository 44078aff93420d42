"""The text that the benchmarks' prompts are made from."""

from phloem.runtime.quantizing.texts import DOCUMENT

QUESTIONS = (
    "In which year was the orchard planted?",
    "How many apple trees were planted at first?",
    "Why were eight paces left between the trunks?",
    "Which four kinds of apple were chosen?",
    "Which apple did Marten's wife like best?",
    "How many crates did the first real harvest fill?",
    "Where is the sugar made that builds new growth?",
    "Through what does the sugar travel to the roots?",
    "What happens when a ring of bark is stripped from the trunk?",
    "What did the voles do in the winter of 1974?",
    "How many trees did Owen save, and how?",
    "What is a scion?",
    "What does the rootstock decide?",
    "Why can an orchard not be grown from pips?",
    "Where did the first russet tree stand?",
    "When is the pruning done?",
    "How does a well pruned tree look, according to Owen?",
    "Which three kinds of wood are taken out first?",
    "What happens when too much is cut?",
    "How many trees does a skilled worker prune in a day?",
    "Which pest comes in April?",
    "When did the orchard stop spraying?",
    "What do the strips of meadow do for the trees?",
    "How many boxes for blue tits are there?",
    "How many caterpillars does one pair of birds carry in a day?",
    "What share of the crop is lost to pests?",
    "When did Ruth take over the orchard?",
    "How can a picker tell that an apple is ripe?",
    "What is done with fruit that has fallen?",
    "How are the pickers paid, and what came of it?",
    "How is the store kept cold?",
    "What is done once a week in the store?",
)

SUBJECTS = (
    *("a lighthouse keeper", "a lost umbrella", "the first train of the morning", "a bakery at night"),
    *("an old violin", "a frozen lake", "a letter without a stamp", "the smell of rain"),
    *("a city of bridges", "a quiet library", "a clock that runs backwards", "a field of wheat"),
    *("a ship in a bottle", "a borrowed bicycle", "the last day of summer", "a door painted blue"),
    *("a map with a mistake", "two neighbours and a fence", "a market at dawn", "a song on the radio"),
    *("a kite in the wind", "a box of photographs", "the night watchman", "a garden on a roof"),
    *("a river in flood", "a coat with deep pockets", "a chess game by post", "the tallest tree"),
    *("a museum of small things", "a dog that waits", "an empty stage", "the keeper of bees"),
)

GUIDE = (
    "You sort the notes that reach an orchard's office. Every note belongs to exactly one of four classes: ORDER, when "
    "somebody wants to buy; COMPLAINT, when something went wrong; QUESTION, when somebody wants to know something; "
    "OTHER, for everything else. Answer with the class alone, in capital letters, and add nothing. Here is what the "
    "office knows of the orchard, which may help to tell the classes apart.\n\n"
)

NOTES = (
    *("Please send six crates of russets to the hotel.", "The cider leaked all over my cellar floor."),
    *("Do you still let school classes visit?", "Thank you for the lovely afternoon."),
    *("I would like forty jars of apple butter.", "Half of the apples were bruised."),
    *("Which kind keeps longest?", "The gate at the lower field stands open."),
    *("Two bottles of vinegar, please, as every year.", "Your invoice counts the same crate twice."),
    *("Is the orchard open on Sundays?", "My aunt sends her best wishes."),
    *("We need ninety crates for the fair.", "Nobody answered the telephone for a week."),
    *("How tall does the russet grow?", "It has snowed on the pass."),
    *("Reserve ten cuttings of the yellow cider apple for me.", "The delivery came on the wrong day."),
    *("When does the picking begin?", "I found a glove near the press."),
    *("Add three boxes of cookers to our standing order.", "The crate had a broken slat and nails stuck out."),
    *("Can I bring my own bottles?", "Congratulations on the prize."),
    *("One sack of windfalls for the pigs, if you have it.", "The juice tasted of soap."),
    *("Are dogs allowed between the rows?", "We have moved to the mill house."),
    *("Put me down for a Christmas box.", "You forgot the receipt again."),
    *("What do you do against wasps?", "The choir sings on Friday."),
)


def shared_guide() -> str:
    """An instruction of about 600 tokens, shared by all notes."""
    return GUIDE + "\n\n".join(DOCUMENT.split("\n\n")[:3])
