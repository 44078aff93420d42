"""The calibration text where the user gives none: questions about 40 subjects, asked in 8 ways."""

_SUBJECTS = (
    "volcanoes", "the Roman Empire", "vaccines", "photosynthesis", "jazz", "the printing press", "black holes",
    "inflation", "soccer", "coral reefs", "the human heart", "coffee", "electric cars", "Shakespeare", "earthquakes",
    "recycling", "the French Revolution", "sleep", "dinosaurs", "chocolate", "the stock market", "whales", "yoga",
    "wind power", "ancient Egypt", "email", "mountains", "penguins", "bicycles", "democracy", "cheese", "robots",
    "the Great Wall", "thunderstorms", "libraries", "running", "the piano", "ants", "passports", "houseplants",
)  # fmt: skip
_WAYS = (
    "Explain {} to a ten-year-old.",
    "What are the most important facts about {}?",
    "Write a short story in which {} matter.",
    "Give me five tips or ideas to do with {}.",
    "What is the history of {}?",
    "Describe {} in two paragraphs.",
    "Write a Python program about {} and explain it.",
    "What are common mistakes people make about {}?",
)

QUESTIONS = tuple(way.format(subject) for way in _WAYS for subject in _SUBJECTS)
