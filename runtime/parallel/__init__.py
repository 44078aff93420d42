"""One model on several ranks: the group and its collectives, each rank's share of the weights, and the plan's way to
the ranks. ``docs/parallel.md`` draws it."""
