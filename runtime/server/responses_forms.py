"""The shapes of the answers of OpenAI's Responses API: whole responses and the events of a stream."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from ...protocol.answer_splitter import AnswerEvent, ReasoningPiece
from ...protocol.messages import TokenLogprob
from ...protocol.tool_splitter import ArgumentsPiece, CallBegun, TextPiece
from .conversation import AnswerReader
from .faults import Fault
from .forms import encode, logprobs_of, usage_of
from .jobs import Piece, Result


class ResponseForm:
    """A response of one candidate. ``id`` without its prefix; ``echo``: the fields of the request that it repeats.

    ``keep`` gets each response that has ended, with its result.
    """

    def __init__(
        self,
        id: str,
        model: str,
        reader: AnswerReader,
        *,
        echo: dict[str, Any],
        has_logprobs: bool,
        keep: Callable[[dict[str, Any], Result], None],
    ) -> None:
        self._id = id
        self._fields = {
            "id": f"resp_{id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            **echo,
        }
        self._reader = reader
        self._splitter = reader.splitter()
        self._has_logprobs = has_logprobs
        self._keep = keep
        self._output: list[dict[str, Any]] = []
        self._is_open = False  # the last item
        self._unsent: list[TokenLogprob] = []
        self._num_events = 0

    def whole(self, results: Sequence[Result]) -> bytes:
        (result,) = results
        self._unsent = list(result.meta.candidates[0].logprobs)
        self._sent(self._splitter.push(result.texts[0]))
        return encode(self._ended(result)[0])

    def opening(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, piece: Piece) -> bytes:
        self._unsent += piece.delta.logprobs
        return self._sent(self._splitter.push(piece.delta.text))

    def result(self, result: Result) -> bytes:
        response, ending = self._ended(result)
        return ending + self._event(f"response.{response['status']}", response=response)

    def closing(self, results: Sequence[Result]) -> bytes:
        return b""

    def failure(self, fault: Fault) -> bytes:
        code = "rate_limit_exceeded" if fault.status == 429 else "server_error"
        response = self._response("failed", error={"code": code, "message": fault.message})
        return self._event("response.failed", response=response)

    def _response(self, status: str, **ending: Any) -> dict[str, Any]:
        open_ended = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._fields, "status": status, "output": self._output, **open_ended, **ending}

    def _ended(self, result: Result) -> tuple[dict[str, Any], bytes]:
        """The response, and the events before its last one."""
        (meta,) = result.meta.candidates
        is_cut = meta.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        events = self._sent(self._splitter.finish()) + self._closed(status)
        details = {"reason": "max_output_tokens"} if is_cut else None
        response = self._response(status, incomplete_details=details, usage=self._usage(result))
        self._keep(response, result)
        return response, events

    def _usage(self, result: Result) -> dict[str, Any]:
        (meta,) = result.meta.candidates
        counts = usage_of([result])
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {
                **counts.get("completion_tokens_details", {}),
                "reasoning_tokens": self._reader.num_reasoning_tokens(meta.token_ids, self._splitter),
            },
            "total_tokens": counts["total_tokens"],
        }

    # -- items --------------------------------------------------------------------------------------------------------

    def _sent(self, events: Sequence[AnswerEvent]) -> bytes:
        """The events of a stream for ``events``, which become part of the last item or begin another."""
        sent = b""
        for event in events:
            match event:
                case TextPiece():
                    sent += self._begun("message")
                    tokens, self._unsent = self._unsent, []
                    logprobs = logprobs_of(tokens, self._reader.tokenizer) if self._has_logprobs else []
                    self._part["text"] += event.text
                    self._part["logprobs"] += logprobs
                    sent += self._placed("response.output_text.delta", delta=event.text, logprobs=logprobs)
                case ReasoningPiece():
                    sent += self._begun("reasoning")
                    self._part["text"] += event.text
                    sent += self._placed("response.reasoning_text.delta", delta=event.text)
                case CallBegun():
                    sent += self._closed("completed") + self._added(
                        {
                            "id": f"fc_{self._id}_{event.index}",
                            "type": "function_call",
                            "status": "in_progress",
                            "call_id": f"call_{self._id[:24]}_{event.index}",
                            "name": event.name,
                            "arguments": "",
                        }
                    )
                case ArgumentsPiece():
                    self._output[-1]["arguments"] += event.text
                    sent += self._placed("response.function_call_arguments.delta", delta=event.text)
        return sent

    @property
    def _part(self) -> dict[str, Any]:
        return self._output[-1]["content"][0]

    def _begun(self, kind: str) -> bytes:
        """Begin an item of ``kind``, unless the last one is one and is open."""
        if self._is_open and self._output[-1]["type"] == kind:
            return b""
        id = f"{self._id}_{len(self._output)}"
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        part: dict[str, Any]
        if kind == "message":
            item |= {"id": f"msg_{id}", "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item |= {"id": f"rs_{id}", "summary": list[str]()}
            part = {"type": "reasoning_text", "text": ""}
        sent = self._closed("completed") + self._added(item)
        item["content"].append(part)
        return sent + self._placed("response.content_part.added", part=part)

    def _added(self, item: dict[str, Any]) -> bytes:
        self._output.append(item)
        self._is_open = True
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _closed(self, status: str) -> bytes:
        """End the last item, if it is open."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._output[-1]
        item["status"] = status
        match item["type"]:
            case "function_call":
                name, arguments = item["name"], item["arguments"]
                sent = self._placed("response.function_call_arguments.done", name=name, arguments=arguments)
            case "reasoning":
                sent = self._placed("response.reasoning_text.done", text=self._part["text"])
            case _:
                text, logprobs = self._part["text"], self._part["logprobs"]
                sent = self._placed("response.output_text.done", text=text, logprobs=logprobs)
        if item["type"] != "function_call":
            sent += self._placed("response.content_part.done", part=self._part)
        return sent + self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _placed(self, kind: str, **fields: Any) -> bytes:
        """An event about the last item, and its only part where it has parts."""
        item = self._output[-1]
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        return self._event(kind, **place, **({} if item["type"] == "function_call" else {"content_index": 0}), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return b"event: %b\ndata: %b\n\n" % (
            kind.encode(),
            encode({"type": kind, "sequence_number": number, **fields}),
        )
