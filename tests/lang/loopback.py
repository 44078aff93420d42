"""Clients without sockets: the string engine behind the client's interface, stepped on a thread. Records submits."""

import queue
import threading
from typing import Any

from phloem.protocol import errors, messages
from phloem.protocol.program_call import ProgramCall
from phloem.tests.runtime.string_engine import StringEngine

ME = b"me"


class Loopback:
    """``submits`` are all that were sent, in order."""

    def __init__(self, engine: StringEngine | None = None, **engine_options: Any) -> None:
        self.engine = engine or StringEngine(**engine_options)
        self.welcome = self.engine.welcome()
        self.submits: list[messages.Submit] = []
        self.cancels: list[messages.Cancel] = []
        self._calls: dict[str, ProgramCall] = {}
        self._inbox: queue.SimpleQueue[messages.ClientMessage | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, submit: messages.Submit, call: ProgramCall) -> None:
        self.submits.append(submit)
        self._calls[submit.program] = call
        self._inbox.put(submit)

    def cancel(self, program: str, seq: int | None = None, op: int | None = None) -> None:
        self.cancels.append(messages.Cancel(program=program, seq=seq, op=op))
        self._inbox.put(self.cancels[-1])

    def query(self, what: str, timeout_s: float = 10.0) -> Any:
        (answer,) = self.engine.step([(ME, messages.Query(id=0, what=what))])
        assert isinstance(answer[1], messages.Answer)
        if answer[1].error is not None:
            raise errors.from_info(answer[1].error)
        return answer[1].value

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        while True:
            inbox = []
            try:
                message = self._inbox.get(block=not self.engine.has_work)
                while True:
                    if message is None:
                        return
                    inbox.append((ME, message))
                    message = self._inbox.get(block=False)
            except queue.Empty:
                pass
            for _, reply in self.engine.step(inbox):
                program = getattr(reply, "program", None)
                if program is not None:
                    self._calls[program].take(reply)
