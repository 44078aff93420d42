"""The error of a gang of ranks that lost one of them."""

GANG_LOST = 3  # the exit code of every process of a gang that ended so


class GangLost(RuntimeError):
    """A rank ended, stopped answering, or received a message out of order.

    The keys and values of the ranks no longer fit together, so no step may follow: the process ends without answering
    its clients. A supervisor then starts another gang and replays the programs that waited.
    """
