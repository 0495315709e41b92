"""The example's model and rows: a tiny Idefics3 with random weights, pictures of a coloured square, and a cold start.

The cold start is a little supervised training on the same rows, until some of the answers are right, since
reinforcement learning can only amplify what the policy does already. A model from the hub with your own pictures needs
none of this.
"""

import base64
import io
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor, set_seed
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

import rlpipe
from rlpipe.configs.compose import quoted
from rlpipe.models.tiny_model import make_tokenizer

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 50),
    "blue": (40, 60, 220),
    "yellow": (230, 220, 40),
    "black": (15, 15, 15),
    "white": (245, 245, 245),
    "purple": (150, 40, 190),
    "orange": (245, 140, 20),
}
SIDE = 32
PATCH = 8
IMAGE_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(config: rlpipe.Config) -> None:
    """Make a policy at ``config.model.path``; ``model.prepare`` of the first run."""
    make_policy(Path(config.model.path), seed=config.seed)


def make_rows(path: Path, count: int = 320) -> None:
    """Write a JSONL file of prompts, answers and pictures; the pictures could also be paths of files."""
    rng = random.Random(0)
    colours = [colour for colour in COLOURS for _ in range(count // len(COLOURS))]
    rng.shuffle(colours)
    rows = [{"prompt": "colour?", "answer": colour, "images": [draw_square(colour, rng)]} for colour in colours]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def draw_square(colour: str, rng: random.Random) -> str:
    """Draw a square of about this colour on grey, at a random place and size, and return it as a ``data:`` URL."""
    size = (rng.randrange(SIDE, 2 * SIDE), rng.randrange(SIDE, 2 * SIDE))
    shade = tuple(max(0, min(255, channel + rng.randrange(-15, 16))) for channel in COLOURS[colour])
    image = Image.new("RGB", size, (128, 128, 128))
    side = rng.randrange(size[0] // 2, size[0])
    left, top = rng.randrange(size[0] - side + 1), rng.randrange(max(1, size[1] - side + 1))
    ImageDraw.Draw(image).rectangle((left, top, left + side, top + side), fill=shade)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def make_policy(folder: Path, seed: int = 0) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": IMAGE_TOKENS}, replace_extra_special_tokens=False)
    tokenizer.chat_template = TEMPLATE
    find = tokenizer.convert_tokens_to_ids
    config = Idefics3Config(
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 256,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "tie_word_embeddings": True,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": PATCH,
        },
        scale_factor=2,
        image_token_id=find("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    set_seed(seed)
    model = Idefics3ForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(
            size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
        ),
        tokenizer,
        image_seq_len=(SIDE // PATCH // 2) ** 2,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make_rows(Path(__file__).parent / "rows.jsonl")


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy and save it at ``config.model.path``; ``model.prepare`` of the example."""
    output = Path(config.model.path).parent
    rlpipe.train(
        rlpipe.load_config(
            [
                "name=images_warm_up",
                f"output={quoted(output)}",
                "algorithm.stop_loss=0.4",
                f"data.path={quoted(config.data.path)}",
                f"data.held_out.size={config.data.held_out.size}",
                "checkpoint=end",
                "tracking.ray_metrics=false",
            ],
            file="examples/images/sft.yaml",
        )
    )
