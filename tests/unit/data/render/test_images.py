"""Images of rows: where they may be, in which forms they may be given, and the errors for unusable ones."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from image_cases import IMAGE_FAMILIES, picture, places, rows, text, turns
from PIL import Image
from transformers import AutoProcessor

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, EbftConfig
from rlpipe.configs.schema.data_config import DataConfig, HeldOutConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.prompts import open_prompts, open_sft_rows, processor_of
from rlpipe.data.render.images import open_image, read_image, take_images
from rlpipe.data.render.messages import chat_messages
from rlpipe.data.render.processor import ImageProcessor, export_processor, load_tokenizer
from rlpipe.data.row import UnusableRow
from rlpipe.data.row_renderer import PromptRenderer, SequenceRenderer
from rlpipe.errors import ConfigError, DataError, ModelError
from rlpipe.models.tiny_model import make_tiny_policy, make_tokenizer
from rlpipe.rollout.engine import without_image
from rlpipe.types import PlacedImage, Prompt

RED, BLUE = (255, 0, 0), (0, 0, 255)
LOOK = {"type": "image"}
HERE = Path()
KEYS = ("type", "text")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=str(IMAGE_FAMILIES["idefics3"].write(tmp_path_factory.mktemp("model"))))


def plain(colour: tuple[int, int, int], kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), colour).save(buffer, kind)
    return buffer.getvalue()


def base64_address(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


def take(messages: list[dict[str, Any]], column: Any = None, folder: Path = HERE) -> tuple[Any, list[bytes]]:
    return take_images(chat_messages(messages), column, folder)


@pytest.mark.parametrize(
    "given",
    [
        plain(RED),
        bytearray(plain(RED)),
        {"bytes": plain(RED), "path": None},
        {"bytes": None, "path": "red.png"},
        "red.png",
        Path("red.png"),
        base64_address(plain(RED)),
        {"url": base64_address(plain(RED))},
        Image.new("RGB", (8, 6), RED),
    ],
    ids=lambda given: type(given).__name__,
)
def test_images_are_read_from_paths_bytes_and_objects(given: Any, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(plain(RED))
    image = open_image(read_image(given, tmp_path, 1))
    assert (image.size, image.getpixel((3, 3))) == ((8, 6), RED)


def test_absolute_paths_and_file_addresses_are_read_from_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "a picture.png"
    file.write_bytes(plain(BLUE))
    for address in (str(file), file.as_uri()):
        assert read_image(address, Path("/nowhere"), 1) == plain(BLUE)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("absent.png", "image 2 can't be read (FileNotFoundError"),
        ("~nobody_here/cat.png", "image 2 can't be read (RuntimeError"),
        ("https://example.org/cat.png", "is a URL: download the images"),
        ("data:image/png;base64,!!", "not base64"),
        ({"bytes": None, "path": None}, "no bytes and no path"),
        (7, "int is not an image, path or bytes"),
        (None, "its messages refer to image 2, which is missing"),
    ],
)
def test_an_image_that_cannot_be_read_is_named(given: Any, problem: str) -> None:
    with pytest.raises(UnusableRow, match="image 2") as raised:
        read_image(given, HERE, 2)
    assert problem in raised.value.reason


@pytest.mark.parametrize(
    ("messages", "column"),
    [
        (turns([{"type": "image", "image": plain(RED)}, text("a"), {"type": "image", "image": plain(BLUE)}]), None),
        (turns([{"type": "image_url", "image_url": {"url": "red.png"}}, text("a"), LOOK]), [plain(BLUE)]),
        (turns([LOOK, text("a"), LOOK]), [plain(RED), plain(BLUE)]),
        (turns("<image>a<image>"), ["red.png", plain(BLUE)]),
        (turns([text("<image>a"), LOOK]), [plain(RED), plain(BLUE)]),
    ],
)
def test_images_stand_where_the_row_says(messages: Any, column: Any, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(plain(RED))
    taken, images = take(messages, column, tmp_path)
    assert taken == turns([LOOK, text("a"), LOOK])
    assert [open_image(image).getpixel((0, 0)) for image in images] == [RED, BLUE]


def test_images_without_a_placeholder_lead_the_first_text_of_the_user() -> None:
    system = {"role": "system", "content": "s"}
    taken, images = take([system, *turns("a", "b")], plain(RED))
    assert taken == [system, *turns([LOOK, text("a")], "b")]
    assert images == [plain(RED)]


def test_without_images_a_mark_is_a_text() -> None:
    messages = turns("what does <image> mean in HTML?", "nothing")
    assert take(messages) == (messages, [])


@pytest.mark.parametrize(
    ("messages", "column", "problem"),
    [
        (turns([LOOK, text("a")]), None, "its messages refer to image 1, which is missing"),
        (turns([LOOK, text("a"), LOOK]), [plain(RED)], "its messages refer to image 2, which is missing"),
        (
            turns([LOOK, text("a")]),
            [plain(RED), plain(BLUE)],
            "it has 2 images, but its messages have no placeholders for 1 of them",
        ),
        (
            turns([{"type": "video", "video": "a.mp4"}]),
            None,
            "has the type 'video'; only text and images can be rendered",
        ),
        ([{"role": "assistant", "content": "a"}], [plain(RED)], "no user message to put them in"),
    ],
)
def test_images_and_placeholders_must_agree(messages: Any, column: Any, problem: str) -> None:
    with pytest.raises(UnusableRow) as raised:
        take(messages, column)
    assert problem in raised.value.reason


def test_relative_paths_begin_at_the_folder_of_the_data(model: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for folder, colour in ((tmp_path, RED), (tmp_path / "elsewhere", BLUE)):
        (folder / "picture.png").write_bytes(plain(colour))
    row = {"prompt": "colour?", "images": ["picture.png"]}
    for options, colour in (({}, RED), ({"images_folder": str(tmp_path / "elsewhere")}, BLUE)):
        data = DataConfig(source="jsonl", path=str(tmp_path / "rows.jsonl"), **options)
        renderer = PromptRenderer(load_tokenizer(model), data, ImageProcessor(model))
        prompt = renderer.render(row, places()[0])
        assert prompt.images[0].content == plain(colour)
        assert prompt.task["images"] == [plain(colour)], "reward functions get the images"
        assert prompt.folded_ids is not None
        assert len(prompt.folded_ids) == len(prompt.token_ids) - prompt.images[0].num_tokens + 1


def test_tokens_of_an_image_never_count(model: ModelConfig) -> None:
    row = {"messages": turns("the cat", [LOOK, text("the mat")]), "images": [picture(40, 40)]}
    renderer = SequenceRenderer(
        load_tokenizer(model), DataConfig(source="jsonl"), max_tokens=512, processor=ImageProcessor(model)
    )
    rollout = renderer.render(row, places()[0])
    (image,) = rollout.images
    span = slice(image.start, image.start + image.num_tokens)
    assert not rollout.loss_mask[span].any()
    assert rollout.loss_mask[span.stop :].any()
    assert image.num_tokens > 4, "it is cut into pieces, each with tokens of its own"


def test_a_token_of_an_image_that_is_not_there_makes_a_row_unusable(model: ModelConfig) -> None:
    renderer = PromptRenderer(load_tokenizer(model), DataConfig(source="jsonl"), ImageProcessor(model))
    with pytest.raises(UnusableRow, match="an image token without an image"):
        renderer.render({"prompt": "an <image> in a text"}, places()[0])


def test_images_need_the_chat_template(model: ModelConfig) -> None:
    renderer = PromptRenderer(load_tokenizer(model), DataConfig(source="jsonl", chat=False), ImageProcessor(model))
    with pytest.raises(DataError, match=r"row 1: rows with images need data\.chat=true"):
        renderer.render({"prompt": "colour?", "images": [picture(8, 8)]}, places()[0])


def test_a_file_that_is_no_image_makes_a_row_unusable(model: ModelConfig) -> None:
    renderer = PromptRenderer(load_tokenizer(model), DataConfig(source="jsonl"), ImageProcessor(model))
    with pytest.raises(UnusableRow, match=r"image 1 can't be read .* PIL does not know its image format"):
        renderer.render({"prompt": "colour?", "images": [b"no image"]}, places()[0])


def test_processor_kwargs_reach_the_processor(model: ModelConfig) -> None:
    whole = ModelConfig(path=model.path, processor_kwargs={"do_image_splitting": False})
    lengths = []
    for config in (model, whole):
        renderer = SequenceRenderer(
            load_tokenizer(config), DataConfig(source="jsonl"), max_tokens=512, processor=ImageProcessor(config)
        )
        lengths.append(renderer.render(rows()[1], places()[1]).images[0].num_tokens)
    assert lengths[0] > lengths[1] == 4 + 3


def test_an_unknown_processor_option_is_named(model: ModelConfig) -> None:
    config = ModelConfig(path=model.path, processor_kwargs={"do_image_spliting": False})
    with pytest.raises(ModelError, match=r"do_image_spliting is unknown .* did you mean do_image_splitting\?"):
        _ = ImageProcessor(config).hf_processor


def test_processor_options_are_checked_for_rows_of_texts_too(model: ModelConfig, tmp_path: Path) -> None:
    config = ModelConfig(path=model.path, processor_kwargs={"do_image_spliting": False})
    with pytest.raises(ModelError, match="do_image_spliting is unknown"):
        processor_of(AlgorithmConfig(), config)
    text_model = str(make_tiny_policy(tmp_path, hidden_size=32, num_layers=1))
    with pytest.raises(ModelError, match=r"model\.processor_kwargs"):
        processor_of(AlgorithmConfig(), ModelConfig(path=text_model, processor_kwargs={"size": 1}))
    with pytest.raises(ConfigError, match=r"model\.processor_kwargs has no effect: EBFT takes no images"):
        processor_of(AlgorithmConfig(kind="ebft_strided"), config)


def test_a_model_of_texts_alone_takes_no_images(tmp_path: Path) -> None:
    model = ModelConfig(path=str(make_tiny_policy(tmp_path, hidden_size=32, num_layers=1)))
    renderer = PromptRenderer(load_tokenizer(model), DataConfig(source="jsonl"), ImageProcessor(model))
    with pytest.raises(ModelError, match="has no image processor, but rows have images"):
        renderer.render({"prompt": "colour?", "images": [picture(8, 8)]}, places()[0])


@pytest.mark.parametrize(
    ("options", "problem"),
    [({}, r"can't be loaded, but rows with images need it: "), ({"a": 1}, r"loaded with model\.processor_kwargs: ")],
)
def test_a_folder_with_a_tokenizer_alone_takes_no_images(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), processor_kwargs=options)
    with pytest.raises(ModelError, match=problem):
        ImageProcessor(config).encode("<image>", [picture(8, 8)])


def test_a_completion_that_ends_with_the_token_of_an_image_is_not_complete() -> None:
    assert without_image([5, 9], 9, "stop") == "image"
    assert [without_image(sampled, 9, "stop") for sampled in ([9, 5], [])] == ["stop", "stop"]
    assert without_image([5, 9], None, "stop") == "stop"


def test_the_prompt_of_a_later_turn_keeps_its_images_folded() -> None:
    image = PlacedImage(start=1, num_tokens=3, content=b"x")
    first = Prompt(
        prompt_id=0,
        epoch=0,
        token_ids=np.array([1, 7, 7, 7, 2], np.int32),
        folded_ids=np.array([1, 7, 2], np.int32),
        prompt="x",
        task={},
        images=(image,),
        turns=[np.array([4], np.int32)],
    )
    later = first.followed_by(np.array([1, 7, 7, 7, 2, 3, 4], np.int32))
    assert later.folded_ids is not None
    assert later.folded_ids.tolist() == [1, 7, 2, 3, 4]
    assert (later.images, later.turns) == ((image,), ())


def test_runs_that_take_no_images_refuse_them(model: ModelConfig, tmp_path: Path) -> None:
    row = {"prompt": "colour?", "ground_truth": "red", "images": [base64_address(plain(RED))]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"messages": turns("a", "b")}) + "\n")
    data = DataConfig(source="jsonl", path=str(tmp_path / "rows.jsonl"))
    refusal = r"rows\.jsonl, line 1: rows with images are for SFT, preferences and RL with rewards"
    with pytest.raises(DataError, match=refusal):
        open_prompts(data, load_tokenizer(model), seed=0, ebft=EbftConfig())
    with pytest.raises(DataError, match=refusal):
        open_sft_rows(data, load_tokenizer(model), seed=0, max_tokens=512)


def test_a_class_for_texts_alone_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    path = str(IMAGE_FAMILIES["mllama"].write(tmp_path))
    row = {"prompt": "colour?", "images": [picture(8, 8)]}
    for images in (False, True):
        model = ModelConfig(path=path, images=images)
        renderer = PromptRenderer(load_tokenizer(model), DataConfig(source="jsonl"), ImageProcessor(model))
        if images:
            assert len(renderer.render(row, places()[0]).images) == 1
        else:
            with pytest.raises(ModelError, match=r"loaded for text only, but rows have images: set model\.images=true"):
                renderer.render(row, places()[0])


@pytest.mark.parametrize("source", ["datasets", "parquet", "jsonl"])
def test_images_of_every_source_are_the_same(model: ModelConfig, source: str, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(plain(RED))
    content = [text("colour?"), LOOK]
    if source == "jsonl":
        row = {"prompt": [{"role": "user", "content": content}], "images": ["red.png"]}
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
    else:
        messages = [{"role": "user", "content": [{"text": None, **part} for part in content]}]
        features = datasets.Features(
            {
                "prompt": [
                    {"role": datasets.Value("string"), "content": [{k: datasets.Value("string") for k in KEYS}]}
                ],
                "images": [datasets.Image()],
            }
        )
        table = datasets.Dataset.from_list([{"prompt": messages, "images": [{"bytes": plain(RED)}]}], features=features)
        path = tmp_path / source
        table.save_to_disk(str(path)) if source == "datasets" else table.to_parquet(str(path))
    data = DataConfig(source=source, path=str(path))
    prompts, _ = open_prompts(data, load_tokenizer(model), seed=0, processor=ImageProcessor(model))
    prompt = prompts.next()
    assert prompt.prompt == [{"role": "user", "content": content}]
    assert open_image(prompt.images[0].content).getpixel((0, 0)) == RED
    assert prompt.images[0].start > 5, "it stands behind the text"


def test_bytes_count_before_the_path_that_says_where_they_are_from(tmp_path: Path) -> None:
    (tmp_path / "000.png").write_bytes(plain(BLUE))
    for given in ({"bytes": plain(RED), "path": "000.png"}, {"bytes": plain(RED), "path": "absent.png"}):
        assert open_image(read_image(given, tmp_path, 1)).getpixel((0, 0)) == RED
        _, images = take([{"role": "user", "content": [{"type": "image", **given}]}], None, tmp_path)
        assert images == [plain(RED)]


def test_an_image_is_turned_as_its_file_says() -> None:
    image, buffer = Image.new("RGB", (8, 4), RED), io.BytesIO()
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(buffer, "JPEG", exif=exif)
    assert open_image(read_image(buffer.getvalue(), HERE, 1)).size == (4, 8)


def test_images_of_other_colour_spaces_are_encoded() -> None:
    assert open_image(read_image(Image.new("CMYK", (4, 4)), HERE, 1)).mode == "RGB"


def test_an_image_that_is_too_large_to_open_is_named() -> None:
    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    bomb = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    with pytest.raises(UnusableRow, match=r"image 3 can't be read \(ValueError: Image size .* exceeds limit"):
        read_image(bomb, HERE, 3)


def test_an_array_is_no_image() -> None:
    with pytest.raises(UnusableRow, match="ndarray is not an image, path or bytes"):
        take([{"role": "user", "content": [{"type": "image", "image": np.zeros((4, 4, 3), np.uint8)}]}])


@pytest.mark.parametrize("options", [{"chat": False}, {"text_column": "completion"}])
def test_sequences_without_the_chat_template_take_no_images(model: ModelConfig, options: dict[str, Any]) -> None:
    row = {"prompt": "a", "completion": "b", "images": [plain(RED)]}
    renderer = SequenceRenderer(
        load_tokenizer(model), DataConfig(source="jsonl", **options), max_tokens=512, processor=ImageProcessor(model)
    )
    with pytest.raises(DataError, match=r"row 1: rows with images need data\.chat=true"):
        renderer.render(row, places()[0])


def test_rows_with_images_have_the_tokens_of_the_run_s_tokenizer(model: ModelConfig, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model)
    tokenizer.add_tokens(["<|mood|>"], special_tokens=True)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    own = ModelConfig(path=model.path, tokenizer=str(tmp_path))
    processor = ImageProcessor(own)
    renderer = PromptRenderer(load_tokenizer(own), DataConfig(source="jsonl"), processor)
    prompt = renderer.render({"prompt": "<|mood|>?", "images": [plain(RED)]}, places()[0])
    assert tokenizer.convert_tokens_to_ids("<|mood|>") in prompt.token_ids
    assert "pixel_values" in processor.pixels([[plain(RED)], [plain(RED), plain(BLUE)]])


def test_held_out_images_lie_alongside_their_own_file(model: ModelConfig, tmp_path: Path) -> None:
    for folder, colour in (("train", RED), ("held", BLUE)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "picture.png").write_bytes(plain(colour))
        (tmp_path / folder / "rows.jsonl").write_text('{"prompt": "colour?", "images": ["picture.png"]}\n')
    held_out = HeldOutConfig(path=str(tmp_path / "held" / "rows.jsonl"))
    data = DataConfig(source="jsonl", path=str(tmp_path / "train" / "rows.jsonl"), held_out=held_out)
    source, held = open_prompts(data, load_tokenizer(model), seed=0, processor=ImageProcessor(model))
    assert (source.next().images[0].content, held[0].images[0].content) == (plain(RED), plain(BLUE))


def test_a_mark_that_is_a_text_stays_one_when_prompts_are_compared(tmp_path: Path) -> None:
    model = ModelConfig(path=str(IMAGE_FAMILIES["qwen2-vl"].write(tmp_path)))
    content = [{"type": "image", "image": base64_address(plain(RED))}, text("the <image> tag")]
    renderer = SequenceRenderer(
        load_tokenizer(model), DataConfig(source="jsonl"), max_tokens=512, processor=ImageProcessor(model)
    )
    row = {"messages": turns(content, "is a mark")}
    prompt, rollout = renderer.prompt(row, places()[0]), renderer.render(row, places()[0])
    assert prompt.images == rollout.images
    assert len(prompt.images) == 1


def test_an_exported_processor_has_the_options_of_the_run(model: ModelConfig, tmp_path: Path) -> None:
    whole = replace(model, processor_kwargs={"do_image_splitting": False})
    export_processor(whole, tmp_path)
    load_tokenizer(whole).save_pretrained(tmp_path)
    assert AutoProcessor.from_pretrained(tmp_path).image_processor.do_image_splitting is False


def test_the_template_of_older_models_lies_alongside_the_processor(model: ModelConfig, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((Path(model.path) / "config.json").read_text())
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(ModelConfig(path=str(tmp_path))).chat_template == template
