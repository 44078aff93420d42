"""The documents of the JSON Schema standard itself: the meta-schemas of its drafts with their vocabularies."""

import functools
import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "meta_schemas"
URI = re.compile(r"http://json-schema\.org/(draft-0[467])/schema|https://json-schema\.org/draft/(\d{4}-\d\d/[a-z/-]+)")


@functools.cache
def standard_document(uri: str) -> Any:
    """The document of the standard with this URI (without a fragment); None if there is none. Read when asked for."""
    found = URI.fullmatch(uri)
    if found is None:
        return None
    file = FOLDER / f"{(found[1] or found[2]).replace('/', '-')}.json"
    return json.loads(file.read_text()) if file.is_file() else None
