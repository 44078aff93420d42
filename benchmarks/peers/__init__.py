"""Other engines behind one line protocol, each run by the Python that has it installed. They do not import Phloem.

Started as ``PYTHON openvino_genai_peer.py MODEL.gguf THREADS``, a peer first writes ``{"ready": "name version"}`` on
stdout. Each line on stdin is then a request: ``id``, ``messages`` or plain ``text``, ``max_tokens``, ``to_the_end``
and, where wanted, ``schema`` (JSON Schema) or ``regex``, ``temperature`` and ``seed``, ``width`` (of a beam search).
Each further line on stdout is an answer: ``id, text, prompt_tokens, completion_tokens, first_s, last_s``, seconds
counted from the request's arrival, or ``id, error``. Transformers takes no schema, no regex and no temperature.
"""
