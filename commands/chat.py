"""``phloem chat``: a conversation in a terminal, or of lines from a pipe."""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unicodedata import category

from ..protocol.errors import InvalidParams, InvalidRequest, PhloemError
from ..protocol.sampling import Field
from .answers import ROLES, Reply, Source, Wanted
from .sampling_flags import field_named, read_value

QUOTES = '"""'
OK, FAILED = 0, 1


@dataclass(slots=True)
class Transcript:
    """What ``/save`` writes and ``/load`` reads."""

    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def all_messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def to_json(self) -> str:
        return json.dumps({"messages": self.all_messages()}, ensure_ascii=False, indent=2) + "\n"

    @classmethod
    def of_json(cls, text: str) -> Transcript:
        """Raises InvalidRequest that says what is wrong."""
        try:
            messages = json.loads(text)["messages"]
            found = [{"role": str(message["role"]), "content": message["content"]} for message in messages]
        except (ValueError, KeyError, TypeError):
            raise InvalidRequest('not a conversation: {"messages": [{"role": "user", "content": "..."}]}') from None
        for number, message in enumerate(found):
            if message["role"] not in ROLES or not isinstance(message["content"], str):
                raise InvalidRequest(f"message {number}: its role is one of {', '.join(ROLES)}, its content a text")
            if message["role"] == "system" and number > 0:
                raise InvalidRequest(f"message {number}: a system message comes first")
        system = found.pop(0)["content"] if found and found[0]["role"] == "system" else ""
        return cls(system, found)


class TerminalChat:
    """One conversation. ``lines`` has what the user enters; ``write``, ``complain`` and ``note`` show something.

    ``is_terminal``: Ctrl-C ends an answer and not the chat, and control characters of an answer are not sent on.
    """

    def __init__(
        self,
        source: Source,
        lines: Lines,
        *,
        wanted: Wanted,
        system: str = "",
        is_terminal: bool,
        write: Callable[[str], object],
        complain: Callable[[str], object],
        note: Callable[[str], object],
    ) -> None:
        self.conversation = Transcript(system)
        self._source = source
        self._lines = lines
        self._wanted = wanted
        self._is_terminal = is_terminal
        self._write = write
        self._complain = complain
        self._note = note
        self._answers: list[Reply] = []
        self._num_again = 0  # how often the last answer was generated again

    def run(self) -> int:
        """Reply until the input ends; 1 if a line of a pipe failed."""
        code = OK
        while True:
            try:
                if (entered := self._lines.read()) is None:
                    break
                if entered.is_command:
                    if self._command(entered.text.strip()):
                        break
                elif entered.text.strip():
                    self._say(entered.text)
            except PhloemError as error:
                self._complain(error.message)
                code = code if self._is_terminal else FAILED
        return code

    # -- answers ------------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        messages = self.conversation.messages
        messages.append({"role": "user", "content": text})
        self._num_again = 0
        try:
            self._answer()
        except BaseException:
            messages.pop()
            raise

    def _answer(self) -> None:
        """Generate and show the next turn. What came before Ctrl-C is kept; a failed turn is not."""
        wanted = self._wanted
        if self._num_again and "seed" in wanted.sampling:  # the same seed would draw the same answer
            wanted = replace(wanted, sampling={**wanted.sampling, "seed": wanted.sampling["seed"] + self._num_again})
        asking = self._source.converse(self.conversation.all_messages(), wanted)
        try:
            for piece in asking:
                self._write(visible(piece) if self._is_terminal else piece)
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            self._write(" [stopped]\n")
        else:
            self._write("\n")
            answer = asking.reply()
            self._answers.append(answer)
            if answer.finish_reason == "length":
                self._note(f"the answer is cut after {answer.completion_tokens} tokens; /set max_tokens allows more")
        self.conversation.messages.append({"role": "assistant", "content": asking.text})

    # -- commands -----------------------------------------------------------------------------------------------------

    def _command(self, text: str) -> bool:
        """Whether the chat ends. Raises InvalidRequest for an unknown command or a wrong argument."""
        name, _, argument = text.partition(" ")
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            meant = f"did you mean {near[0]}?" if near else "/help lists them"
            raise InvalidRequest(f"{name} is not a command; {meant}")
        return bool(COMMANDS[name].run(self, argument.strip()))

    def help(self, argument: str) -> None:
        width = max(len(command.usage) for command in COMMANDS.values())
        self._write("".join(f"{command.usage:<{width}}  {command.help}\n" for command in COMMANDS.values()))
        self._write(f"A line that begins with {QUOTES} opens a text of several lines; {QUOTES} closes it.\n")
        self._write("Ctrl-C stops an answer, Ctrl-D ends the chat.\n")

    def clear(self, argument: str) -> None:
        self.conversation.messages.clear()
        self._write("the conversation is empty; the system message stays\n")

    def system(self, argument: str) -> None:
        if argument:
            self.conversation.system = argument
        self._write(f"system: {self.conversation.system or '(none)'}\n")

    def save(self, argument: str) -> None:
        path = _path(argument, "/save FILE")
        try:
            path.write_text(self.conversation.to_json(), encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"{path}: {error.strerror or error}") from None
        self._write(f"saved {len(self.conversation.messages)} messages in {path}\n")

    def load(self, argument: str) -> None:
        path = _path(argument, "/load FILE")
        try:
            self.conversation = Transcript.of_json(_text_of(path))
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}: {error.message.removeprefix(f'{path}: ')}") from None
        self._num_again = 0
        self._write(f"loaded {len(self.conversation.messages)} messages from {path}\n")

    def regenerate(self, argument: str) -> None:
        messages = self.conversation.messages
        if not messages or messages[-1]["role"] != "assistant":
            raise InvalidRequest("/regenerate: there is no answer to generate again")
        last = messages.pop()
        self._num_again += 1
        try:
            self._answer()
        except BaseException:
            messages.append(last)
            raise

    def set(self, argument: str) -> None:
        name, _, text = argument.partition(" ")
        sampling = dict(self._wanted.sampling)
        if name:
            field = field_named(name)
            if text:
                sampling[field.name] = _value(field, text.strip())
            else:
                sampling.pop(field.name, None)
            self._wanted = replace(self._wanted, sampling=sampling)
        shown = ", ".join(f"{name} {value}" for name, value in sampling.items())
        self._write(f"set: {shown or 'nothing; the defaults hold'}\n")

    def schema(self, argument: str) -> None:
        if not argument:
            self._wanted = replace(self._wanted, json_schema=None)
            self._write("answers follow no schema\n")
            return
        self._wanted = replace(self._wanted, json_schema=read_schema(_path(argument, "/schema FILE")))
        self._write(f"answers are JSON of {argument}; /schema without a file ends it\n")

    def stats(self, argument: str) -> None:
        if not self._answers:
            self._write("no answer yet\n")
            return
        last, total = self._answers[-1], sum(answer.completion_tokens for answer in self._answers)
        self._write(
            f"last answer: {last.prompt_tokens} prompt tokens, {last.cached_tokens} of them cached; "
            f"{last.completion_tokens} tokens in {last.total_s:.2f} s ({last.completion_tokens / last.total_s:.0f} a "
            f"second), the first text after {last.first_s:.2f} s; ended by {last.finish_reason}\n"
            f"{len(self._answers)} answers, {total} tokens; model {self._source.name}\n"
        )

    def exit(self, argument: str) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Command:
    """``run(chat, argument)`` is true if the chat ends."""

    usage: str
    help: str
    run: Callable[[TerminalChat, str], Any]


COMMANDS = {
    command.usage.split()[0]: command
    for command in (
        Command("/help", "list the commands", TerminalChat.help),
        Command("/clear", "forget the conversation", TerminalChat.clear),
        Command("/system TEXT", "set the system message; without TEXT show it", TerminalChat.system),
        Command("/save FILE", "write the conversation as JSON", TerminalChat.save),
        Command("/load FILE", "go on with a saved conversation", TerminalChat.load),
        Command("/regenerate", "generate the last answer again", TerminalChat.regenerate),
        Command("/set NAME VALUE", "set a sampling parameter, without VALUE to its default", TerminalChat.set),
        Command("/schema FILE", "answers are JSON of this schema; without FILE any text", TerminalChat.schema),
        Command("/stats", "tokens and speed of the last answer", TerminalChat.stats),
        Command("/exit", "end the chat", TerminalChat.exit),
    )
}


@dataclass(frozen=True, slots=True)
class Entered:
    text: str
    is_command: bool = False


class Lines:
    """What the user enters: one line, or several between triple quotes. Text in quotes is no command.

    ``read_line(prompt)`` returns a line without its end, and raises EOFError at the end of the input.
    """

    def __init__(self, read_line: Callable[[str], str], *, on_interrupt: Callable[[], object] | None) -> None:
        self._read_line = read_line
        self._on_interrupt = on_interrupt  # of Ctrl-C while a line is entered; None: it ends the program

    def read(self) -> Entered | None:
        """The next entry; None at the end. Raises InvalidRequest where the input ends inside of quotes."""
        while True:
            try:
                return self._entered(self._read_line("> "))
            except EOFError:
                return None
            except KeyboardInterrupt:
                if self._on_interrupt is None:
                    raise
                self._on_interrupt()

    def _entered(self, line: str) -> Entered:
        if not line.startswith(QUOTES):
            return Entered(line, is_command=line.lstrip().startswith("/"))
        lines = [line.removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            try:
                lines.append(self._read_line("... "))
            except EOFError:
                raise InvalidRequest(f"the input ends inside of {QUOTES}; close the text with {QUOTES}") from None
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return Entered("\n".join(lines).strip("\n"))


def terminal_lines() -> Lines:
    """Lines of a terminal, with readline's editing and history where Python has it."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() uses it once it is imported

    def on_interrupt() -> None:
        sys.stdout.write("\nCtrl-D or /exit ends the chat\n")

    return Lines(input, on_interrupt=on_interrupt)


def piped_lines(stream: Iterator[str]) -> Lines:
    def read_line(prompt: str) -> str:
        for line in stream:
            return line.rstrip("\r\n")
        raise EOFError

    return Lines(read_line, on_interrupt=None)


def visible(text: str) -> str:
    """``text`` without control characters other than line ends and tabs: they could command the terminal."""
    return "".join("\ufffd" if category(char) == "Cc" and char not in "\n\t" else char for char in text)


def _value(field: Field, text: str) -> Any:
    try:
        return read_value(field, text)
    except InvalidParams as error:
        raise InvalidParams(f"{field.name}: {error.message}") from None


def read_schema(path: Path) -> str:
    """The JSON schema in a file, as text. Raises InvalidRequest for a file that holds no JSON."""
    text = _text_of(path)
    try:
        json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{path}: not JSON: {error}") from None
    return text


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path}: not text in UTF-8") from None


def _path(argument: str, usage: str) -> Path:
    if not argument:
        raise InvalidRequest(f"a file is missing: {usage}")
    return Path(argument).expanduser()
