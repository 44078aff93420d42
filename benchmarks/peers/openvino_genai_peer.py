"""OpenVINO GenAI's continuous batching with its prefix cache, in process. See ``benchmarks.peers`` for the protocol."""

import contextlib
import importlib.metadata
import json
import queue
import sys
import time

import openvino_genai as genai
from lines import read_requests, take_stdout  # beside this script


def main() -> None:
    say = take_stdout()
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = 4  # GB
    pipeline = genai.ContinuousBatchingPipeline(
        sys.argv[1], scheduler, "CPU", {"INFERENCE_NUM_THREADS": int(sys.argv[2])}
    )
    tokenizer = pipeline.get_tokenizer()
    incoming = read_requests()
    say({"ready": f"OpenVINO GenAI {importlib.metadata.version('openvino-genai')}"})
    running: dict[int, Request] = {}
    while True:
        with contextlib.suppress(queue.Empty):
            while True:
                item = incoming.get(block=not running)
                if item is None:
                    return
                start_s, asked = item
                try:
                    running[asked["id"]] = Request(pipeline, tokenizer, start_s, asked)
                except RuntimeError as error:
                    say({"id": asked["id"], "error": str(error)})
        pipeline.step()
        for request in list(running.values()):
            if request.take():
                del running[request.id]
                say(request.answer(tokenizer))


class Request:
    def __init__(self, pipeline: object, tokenizer: object, start_s: float, asked: dict) -> None:
        self.id, self.start_s = asked["id"], start_s
        config = genai.GenerationConfig()
        config.max_new_tokens = asked["max_tokens"]
        config.ignore_eos = asked["to_the_end"]
        config.do_sample = False
        if not asked["to_the_end"]:
            config.set_eos_token_id(tokenizer.get_eos_token_id())
        if asked.get("temperature"):
            config.do_sample, config.temperature, config.rng_seed = True, asked["temperature"], asked.get("seed") or 0
        if asked.get("width"):
            config.num_beams = asked["width"]
        if asked.get("schema") is not None:
            config.structured_output_config = genai.StructuredOutputConfig(json_schema=json.dumps(asked["schema"]))
        elif asked.get("regex") is not None:
            config.structured_output_config = genai.StructuredOutputConfig(regex=asked["regex"])
        prompt = asked.get("text") or tokenizer.apply_chat_template(asked["messages"], add_generation_prompt=True)
        ids = tokenizer.encode(prompt, add_special_tokens=False).input_ids
        self.prompt_tokens = ids.shape[1]
        self.tokens: list[int] = []
        self.first_s = self.last_s = 0.0
        self.handle = pipeline.add_request(self.id, ids, config)

    def take(self) -> bool:
        """Take the tokens generated so far. Returns whether the request has ended."""
        while self.handle.can_read():
            self.last_s = time.perf_counter() - self.start_s
            self.first_s = self.first_s or self.last_s
            outputs = self.handle.read()
            best = max(outputs.values(), key=lambda output: output.score)  # of a beam search there are several
            self.tokens.extend(best.generated_ids)
        return self.handle.get_status() != genai.GenerationStatus.RUNNING and not self.handle.can_read()

    def answer(self, tokenizer: object) -> dict:
        return {
            "id": self.id,
            "text": tokenizer.decode(self.tokens),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.tokens),
            "first_s": self.first_s,
            "last_s": self.last_s,
        }


if __name__ == "__main__":
    main()
