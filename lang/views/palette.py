"""The colours of token origins and of phases, on a page and in a terminal."""

# origin of a token -> its label, page colour (red, green, blue), terminal style
ORIGINS: dict[str, tuple[str, tuple[int, int, int], str]] = {
    "cached": ("prompt, found in the cache", (59, 130, 246), "blue"),
    "prompt": ("prompt, computed", (107, 114, 128), "bright_black"),
    "generated": ("generated (darker: less likely)", (22, 163, 74), "bold green"),
    "drafted": ("guessed and verified", (13, 148, 136), "bold cyan"),
    "forced": ("forced by the grammar", (217, 119, 6), "bold yellow"),
    "selected": ("selected", (147, 51, 234), "bold magenta"),
}

PHASES: dict[str, tuple[int, int, int]] = {
    "queued": (203, 213, 225),
    "prefill": (96, 165, 250),
    "decode": (34, 197, 94),
}
