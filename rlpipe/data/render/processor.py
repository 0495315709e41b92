"""A model's tokenizer, with its chat template, and its image processor, which makes the model's pixel inputs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpipe.common.atomic_io import python_files
from rlpipe.common.hub import hub_has
from rlpipe.common.imports import describe_error, reading_files
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.render.images import as_png, open_image
from rlpipe.data.row import UnusableRow
from rlpipe.errors import ModelError, did_you_mean
from rlpipe.models.gguf_models import model_folder
from rlpipe.models.model_files import known_tokenizer_class, read_known_config
from rlpipe.types import Images, IntArray, PlacedImage

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


MAX_ID = 2**24
LONG_NUMBER = re.compile(rb"[:,\[\s]\d{8}")
FOR_LOADING = {"use_fast", "backend", "subfolder", "token", "cache_dir"}
"""Options that ``from_pretrained`` of every processor takes."""
TEXT_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "cross_attention_mask"}
"""Processor outputs for the text, which ``ImageProcessor.pixels`` drops because its text is made up."""

READS_BOTH_WAYS = {"paligemma"}
"""Types of models with bidirectional attention over the prompt."""

PROCESSOR_FILES = {"processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"}
OTHER_FILES = {"config.json", "tokenizer.json", "tokenizer_config.json"}
"""Further files of the model that the processor is read from."""


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, with the config's chat template and, for batches, a padding token.

    Raises ``ModelError`` if its folder or hub id does not exist or holds no tokenizer.
    """
    option = "model.path" if config.tokenizer is None else "model.tokenizer"
    path = model_folder(config.path if config.tokenizer is None else config.tokenizer)
    folder = Path(path).expanduser()
    source, local = _find_files(path, option, config.tokenizer_revision)
    fix = "give a folder with an undamaged one"
    if local and not folder.exists():
        fix = "there is no such folder, the hub can't be reached, and its cache holds no copy"
    with reading_files(f"{option}: the tokenizer of {path!r} can't be loaded", fix, error=ModelError):
        import transformers

        check_ids(folder)
        tokenizer_class = getattr(transformers, known_tokenizer_class(folder) or "AutoTokenizer")
        tokenizer: PreTrainedTokenizerBase = tokenizer_class.from_pretrained(
            source,
            revision=config.tokenizer_revision,
            trust_remote_code=config.trust_remote_code,
            local_files_only=local,
        )
        if config.chat_template is not None:
            tokenizer.chat_template = _read_template(Path(config.chat_template).expanduser())
        elif not tokenizer.chat_template:
            tokenizer.chat_template = _processor_template(source, config, local)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_ids(folder: Path) -> None:
    """Raise ``ValueError`` for a huge id in a tokenizer's files: tokenizers would list all ids up to it, or abort."""

    def checked(digits: str) -> int:
        if int(digits) > MAX_ID:
            raise ValueError(f"a tokenizer's file has the number {digits}")
        return int(digits)

    for file in (folder / name for name in ("tokenizer.json", "vocab.json", "added_tokens.json")):
        text = file.read_bytes() if file.is_file() else b""
        if LONG_NUMBER.search(text):
            json.loads(text, parse_int=checked)


def _find_files(path: str, option: str, revision: str | None) -> tuple[str, bool]:
    """Return a model's folder or hub id, and whether its files are read from this machine alone."""
    folder = Path(path).expanduser()
    if folder.exists():
        return str(folder), True
    return path, not hub_has(path, kind="model", option=option, error=ModelError, revision=revision)


def _processor_template(path: str, config: ModelConfig, local: bool) -> str | None:
    """Return the chat template that older models with images store only with their processor, or None."""
    stored = _read_json_file(path, "chat_template.json", config.tokenizer_revision, local)
    template: str | None = stored.get("chat_template")
    return template


def _read_json_file(path: str, name: str, revision: str | None, local: bool) -> dict[str, Any]:
    """Return the object in a JSON file of a model, an empty one if the model has no such file."""
    from transformers.utils import cached_file

    options = {"revision": revision, "local_files_only": local}
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **options)
    content: dict[str, Any] = {} if file is None else json.loads(Path(file).read_text())
    return content


def read_end_ids(config: ModelConfig) -> set[int]:
    """Return the tokens at which engines end an answer by the model's generation config, read without the weights.

    A model without one has them in its config. Raises ``ModelError`` if the files can't be read.
    """
    source, local = _find_files(model_folder(config.path), "model.path", config.revision)
    with reading_files(f"model.path={config.path} can't be read", "give another", error=ModelError):
        settings = _read_json_file(source, "generation_config.json", config.revision, local)
        if not settings:
            settings = _read_json_file(source, "config.json", config.revision, local)
            settings = {**(settings.get("text_config") or {}), **settings}
    end_ids = settings.get("eos_token_id")
    return {end_id for end_id in (end_ids if isinstance(end_ids, list) else [end_ids]) if isinstance(end_id, int)}


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"model.chat_template: {file.absolute()} can't be read ({describe_error(error)})") from None


@dataclass(kw_only=True, slots=True, frozen=True)
class Encoded:
    """A rendered text as tokens."""

    token_ids: IntArray  # [T]
    folded_ids: IntArray | None = None  # [F]
    """Token ids with a single placeholder per image; None without images."""
    images: Images = ()
    offsets: IntArray | None = None  # [T, 2]
    """First and end character of each token in the text, if known."""


class ImageProcessor:
    """A model's processor of transformers, loaded when the first image comes."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model

    def encode(self, text: str, images: Sequence[bytes]) -> Encoded:
        """Encode a rendered text with one placeholder for each image, of which there is at least one.

        Raises ``ModelError`` if the model has no processor, and ``UnusableRow`` if it can't take these images.
        """
        processor = self.hf_processor
        try:
            outputs = processor(
                text=[text],
                images=[[open_image(image) for image in images]],
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_text_replacement_offsets=True,
            )
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise UnusableRow(f"the model's processor can't process its images ({describe_error(error)})") from error
        token_ids = np.array(outputs["input_ids"][0], np.int32)
        offsets = np.array(outputs.get("offset_mapping", [[]])[0]).reshape(-1, 2)  # in the text with images' tokens
        spans = _find_spans(type(processor).__name__, outputs, offsets, token_ids, self._image_id)
        if len(spans) != len(images):
            raise UnusableRow(f"the chat template has {len(spans)} placeholders for its {len(images)} images")
        return Encoded(
            token_ids=token_ids,
            folded_ids=np.array(processor.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32),
            images=tuple(
                PlacedImage(start=start, num_tokens=stop - start, content=image)
                for (start, stop), image in zip(spans, images, strict=True)
            ),
            offsets=_before_images(offsets, outputs, len(text)),
        )

    def check(self, encoded: Encoded) -> None:
        """Raise ``UnusableRow`` if an image token has no image, because no model could take that."""
        is_feature = encoded.token_ids == self.feature_id
        for image in encoded.images:
            is_feature[image.start : image.start + image.num_tokens] = False
        if is_feature.any():
            raise UnusableRow("it has an image token without an image")

    @cached_property
    def feature_id(self) -> int:
        """Id of the token that takes image features; -1 if the model takes no images, or its config can't be read."""
        stored_config = read_known_config(self._path)
        try:
            with reading_files(f"model.path={self._model.path} can't be read", "give another", error=ModelError):
                token_id = feature_token_id(
                    self._described if stored_config is None else SimpleNamespace(**stored_config)
                )
        except ModelError:  # code that needs the model reports it; looking at rows does not need it
            return -1
        return -1 if token_id is None else token_id

    @cached_property
    def _described(self) -> Any:
        """The model's transformers config."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self._path, **self._source)

    @property
    def options(self) -> Mapping[str, Any]:
        return self._model.processor_kwargs

    @cached_property
    def files(self) -> dict[str, Path]:
        """Files that the processor is read from, by name; empty if the model has no processor or can't be found.

        They include the model's own code if it is in a local folder and trusted.
        """
        from transformers.utils import cached_file

        paths = {}
        for name in sorted(PROCESSOR_FILES | OTHER_FILES):
            try:
                file = cached_file(self._path, name, _raise_exceptions_for_missing_entries=False, **self._source)
            except (OSError, ValueError):
                file = None
            if file is not None:
                paths[name] = Path(file)
        if not paths.keys() & PROCESSOR_FILES:
            return {}
        folder = Path(self._path)
        has_code = self._model.trust_remote_code and folder.is_dir()
        return paths | ({name: folder / name for name in python_files(folder)} if has_code else {})

    @property
    def commit(self) -> str | None:
        """Commit of a hub model that has a processor and whose own code is trusted; else None."""
        from transformers.utils.hub import extract_commit_hash

        file = next(iter(self.files.values()), None)
        return extract_commit_hash(str(file), None) if file is not None and self._model.trust_remote_code else None

    @property
    def _path(self) -> str:
        return str(Path(self._model.path).expanduser())

    @cached_property
    def _source(self) -> dict[str, Any]:
        """Arguments with which transformers finds the model's files."""
        model = self._model
        try:
            is_local = Path(self._path).exists() or not hub_has(
                model.path, kind="model", option="model.path", error=ModelError, revision=model.revision
            )
        except ModelError:
            is_local = True
        return {"revision": model.revision, "trust_remote_code": model.trust_remote_code, "local_files_only": is_local}

    def pixels(self, rows: Sequence[Sequence[bytes]]) -> dict[str, Tensor]:
        """Return the model's inputs for the images of some rows, in addition to the tokens; each row has an image."""
        processor = self.hf_processor
        outputs = processor(
            text=[processor.image_token * len(row) for row in rows],
            images=[[open_image(image) for image in row] for row in rows],
            return_tensors="pt",
            padding=True,
        )
        return {name: value for name, value in outputs.items() if name not in TEXT_INPUTS}

    @cached_property
    def blank(self) -> Encoded:
        """A text with one small image; it begins with a word, because some rows are padded with their first token."""
        from PIL import Image

        side = 2 * 28  # at least as high and wide as two patches of any processor here
        return self.encode(f"a{self.hf_processor.image_token}", [as_png(Image.new("RGB", (side, side)))])

    @cached_property
    def hf_processor(self) -> Any:
        """The transformers processor; raises ``ModelError`` if there is none or the model can't train on images."""
        from transformers import ProcessorMixin

        options = self._model.processor_kwargs
        purpose = " with model.processor_kwargs" if options else ", but rows with images need it"
        subject = f"model.path={self._model.path}: its processor can't be loaded{purpose}"
        with reading_files(subject, "give a folder with an undamaged one", error=ModelError):
            processor = _find_class(self._described).from_pretrained(self._path, **self._source, **options)
        if not isinstance(processor, ProcessorMixin) or getattr(processor, "image_token", None) is None:
            needing = "model.processor_kwargs are set" if options else "rows have images"
            raise ModelError(f"model.path={self._model.path} has no image processor, but {needing}")
        processor.tokenizer = load_tokenizer(self._model)
        _check_names(processor, options)
        _check_class(self._model, self._described)
        return processor

    @cached_property
    def _image_id(self) -> int:
        """Id of the placeholder token."""
        processor = self.hf_processor
        return int(processor.tokenizer.convert_tokens_to_ids(processor.image_token))


def export_processor(model: ModelConfig, folder: Path) -> None:
    """Write a model's processor as the run used it, for ``from_pretrained``; do nothing if the model has none."""
    processor = ImageProcessor(model)
    for name in PROCESSOR_FILES & processor.files.keys():
        shutil.copyfile(processor.files[name], folder / name)
    if model.processor_kwargs:
        processor.hf_processor.save_pretrained(folder)


def feature_token_id(config: Any) -> int | None:
    """Return the id of the token that takes image features, from a transformers config; None if it names none."""
    names = ("image_token_id", "image_token_index")
    return next((int(value) for name in names if (value := getattr(config, name, None)) is not None), None)


def seen_tiles(token_ids: Tensor, image_id: int, tiles: Tensor) -> Tensor:
    """Return which tiles each token attends to ``[T, I, tiles]``, for images with ``tiles`` ``[I, tiles]``.

    This is Llama 3.2 Vision's cross-attention mask, as in the model's transformers processor.
    """
    from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

    attended = tiles.new_zeros(len(token_ids), *tiles.shape)
    for index, (start, stop) in enumerate(get_cross_attention_token_mask(token_ids.tolist(), image_id)):
        attended[start : len(token_ids) if stop == -1 else stop, index] = tiles[index]
    return attended


def _find_spans(
    processor: str, outputs: Any, offsets: IntArray, token_ids: IntArray, image_id: int
) -> list[tuple[int, int]]:
    """Return the first token of each image, and the one after its last."""
    if "text_replacement_offsets" not in outputs:
        if "cross_attention_mask" not in outputs:
            raise ModelError(f"{processor}: this kind of processor does not specify which tokens belong to an image")
        return [(index, index + 1) for index in np.flatnonzero(token_ids == image_id).tolist()]
    starts, ends = offsets.T
    spans = [entry["new_span"] for entry in outputs["text_replacement_offsets"][0] if entry["type"] == "image"]
    return [(int(np.argmax(ends > start)), int(np.searchsorted(starts, end))) for start, end in spans]


def _before_images(offsets: IntArray, outputs: Any, length: int) -> IntArray:
    """Map the tokens' offsets ``[T, 2]`` back to the text of that length, in which an image is one placeholder."""
    entries = outputs.get("text_replacement_offsets", [[]])[0]
    grown = [(new, old) for entry in entries for new, old in zip(entry["new_span"], entry["span"], strict=True)]
    last = grown[-1] if grown else (0, 0)
    after, before = zip((-1, -1), *grown, (last[0] + length, last[1] + length), strict=True)
    return np.interp(offsets, after, before).astype(np.int32)


def _check_class(model: ModelConfig, described: Any) -> None:
    """Raise ``ModelError`` if the class that the learner loads can't be trained on images."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if described.model_type in READS_BOTH_WAYS:
        raise ModelError(
            f"model.path={model.path}: models of the type {described.model_type} can't be trained on images"
        )
    text = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(described), None)
    if not model.images and text not in (None, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(described), None)):
        raise ModelError(
            f"model.path={model.path} is loaded for text only, but rows have images: set model.images=true"
        )


def _check_names(processor: Any, options: Mapping[str, Any]) -> None:
    """Raise ``ModelError`` for an unknown option, because transformers ignores those."""
    image_processor = processor.image_processor
    available = {*vars(processor), *vars(image_processor), *image_processor.valid_kwargs.__annotations__}
    for name in options:
        if name not in FOR_LOADING and name not in available and not hasattr(image_processor, name):
            hint = did_you_mean(name, available, f"{type(image_processor).__name__} has no such option")
            raise ModelError(f"model.processor_kwargs.{name} is unknown to the model's processor{hint}")


def _find_class(described: Any) -> Any:
    """Return the processor's class, without its video part if torchvision is not installed."""
    from transformers import AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        return AutoProcessor
    processor_class: Any = PROCESSOR_MAPPING.get(type(described), None)
    if processor_class is None or "video_processor" not in (attributes := processor_class.get_attributes()):
        return AutoProcessor
    attributes = [name for name in attributes if name != "video_processor"]
    return type(processor_class.__name__, (processor_class,), {"get_attributes": classmethod(lambda _: attributes)})
