"""Other engines behind one line protocol, each run by the Python that has it installed. They do not import Phloem.

Started as ``PYTHON openvino_genai_peer.py MODEL.gguf THREADS``, a peer first writes ``{"ready": "name version"}`` on
stdout. Each line on stdin is then a request: ``id, messages, max_tokens, to_the_end, schema`` (JSON Schema or null);
each further line on stdout an answer: ``id, text, prompt_tokens, completion_tokens, first_s, last_s``, seconds counted
from the request's arrival, or ``id, error``.
"""
