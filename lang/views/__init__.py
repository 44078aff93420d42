"""What a run looks like: as a page of its own, in a notebook, in a terminal. Nothing here runs a program."""
