"""A tiny random vision model on disk, as transformers saves it, and images of every format."""

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from phloem.tests.runtime.models.tiny import VOCAB_SIZE, write_byte_tokenizer
from PIL import Image

ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
SPECIALS = ("<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>", *ROWS)
IMAGE_TOKEN = VOCAB_SIZE + SPECIALS.index("<image>")
VISION_VOCAB = VOCAB_SIZE + len(SPECIALS)
TILE_SIDE, RESIZED_SIDE = 16, 64
# SmolVLM's, which reads a message's content as a list of parts.
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
PROCESSOR = {
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.6, 0.4],
    "image_processor_type": "Idefics3ImageProcessor",
    "max_image_size": {"longest_edge": TILE_SIDE},
    "resample": 1,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": RESIZED_SIDE},
}


def make_tiny_vision(folder: Path, *, model_type: str = "idefics3", seed: int = 0, template: str = TEMPLATE) -> Path:
    """4 tokens a tile. There are positions for 6 patches a side and tiles have 4, so positions are not just counted."""
    torch.manual_seed(seed)
    text = {
        "model_type": "llama",
        "vocab_size": VISION_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 257,
        "eos_token_id": 258,
        "pad_token_id": 256,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 24,
        "patch_size": 4,
    }
    config = transformers.AutoConfig.for_model(
        model_type, text_config=text, vision_config=vision, scale_factor=2, image_token_id=IMAGE_TOKEN
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # far from zero, so that every layer shows in the logits
            weight.mul_(1.0 if weight.ndim == 1 else 6.0)
            if name.endswith(".bias"):
                weight.normal_(std=0.2)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder, vocab_size=VISION_VOCAB, more_specials=SPECIALS, chat_template=template)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def picture(seed: int = 0, *, size: tuple[int, int] = (40, 30), mode: str = "RGB", format: str = "PNG") -> bytes:
    """An image file of soft random colours; ``size`` is (width, height)."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).convert(mode)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(rng.integers(0, 256, (size[1], size[0]), dtype=np.uint8)))
    found = io.BytesIO()
    image.save(found, format)
    return found.getvalue()


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
