"""Models by the name of a configuration: `hf:CONFIG.json[:Class][@LENGTH,DTYPE]`, or `hf:FOLDER...` of a folder that holds `config.json`.

The class is one of transformers' own (default: the first of the configuration's `architectures`, else the causal language model of its type). Only
local files are read, and no code that a configuration asks for is run. Weights in safetensors files of the folder are loaded where the model is made
with real memory, or left where they lie for ranks to read their parts (`lazy`); without them it is initialised as transformers does, from the seed.
DTYPE is that of the weights: by default the configuration's where there are weights, as `from_pretrained` has it, else float32. Example inputs are
random, two rows in the configuration's sizes, labels last; LENGTH is that of token sequences (default: at most `DEFAULT_LENGTH`). Caches of keys and
values are switched off.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.errors import FormatError, UnknownName
from meshwright.graph.model_names import DTYPES, NAME_HINT, HfName, require_transformers

from .calling import prediction_of
from .weight_files import WeightFiles, has_weights, weight_files

__all__ = ["build_hf", "config_of"]

MAX_CONFIG_BYTES = 1 << 20
DEFAULT_LENGTH = 128  # tokens of an example row
ROWS = 2
AUDIO_SAMPLES = 4000  # of raw sound per example row


def config_of(data: bytes, where: str) -> dict[str, Any]:
    """The fields of a configuration. Raises: FormatError."""
    if len(data) > MAX_CONFIG_BYTES:
        raise FormatError(f"more than {MAX_CONFIG_BYTES} bytes are no configuration", where=where)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"no JSON: {str(error).splitlines()[0]}", where=where) from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise FormatError("a configuration is a JSON object with `model_type`", where=where)
    kinds = found.get("architectures")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(k, str) for k in kinds)):
        raise FormatError("`architectures` is not a list of class names", where=where)
    if found.get("auto_map"):
        raise FormatError("`auto_map` asks for code of its own, which is not run", where=where, hint="build it in a model function: FILE.py:function")
    return found


def build_hf(name: HfName, *, lazy: list[WeightFiles] | None = None) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The module in training mode, and its example inputs by keyword, labels last; on the current default device.

    `lazy`: where files of the folder have all its weights under its own names, its parameters are left on the meta device, and the files, which then
    know them, are put there.
    Raises: MissingExtra, FormatError for a configuration or files that are damaged or lack what the class has; UnknownName; what transformers raises.
    """
    fields = config_of(_read(name.config), str(name.config))
    require_transformers()
    import transformers as library

    kinds = library.CONFIG_MAPPING
    if fields["model_type"] not in kinds:
        raise UnknownName(f"transformers {library.__version__} has no model type {fields['model_type']!r}", where=str(name.config))
    config = kinds[fields["model_type"]].from_dict(fields)
    config.use_cache = False
    kind = _class(library, config, name, fields)
    dtype, files = _dtype(name, fields), None
    if name.folder is not None and has_weights(name.folder) and torch.empty(0).device.type != "meta":
        files = weight_files(name.folder)
        module = _without_values(kind, config, dtype) if lazy is not None and _Sizes(config, 0).labels(kind.__name__) is not None else None
        if module is not None and lazy is not None and not files.fit(module):
            lazy.append(files)
        else:
            module = _loaded(kind, config, dtype, name.folder, kind.__name__ in (fields.get("architectures") or ()))
        torch.manual_seed(torch.initial_seed())  # the examples do not depend on what was drawn before
    else:
        with _default_dtype(dtype):
            module = kind(config)
    module.train()
    inputs = example_inputs(module, config, name.length)
    return module, {k: x.to(dtype) if x.is_floating_point() and k != "labels" else x for k, x in inputs.items()}


def _dtype(name: HfName, fields: Mapping[str, Any]) -> torch.dtype:
    stated = fields.get("dtype", fields.get("torch_dtype")) if has_weights(name.folder) else None
    chosen = name.dtype or (stated if stated in DTYPES else "float32")
    found: torch.dtype = getattr(torch, chosen)
    return found


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _loaded(kind: Any, config: Any, dtype: torch.dtype, folder: Path, own: bool) -> nn.Module:
    """With all values, as transformers loads them. `own`: the folder says that its weights are of this class, so that none may be missing."""
    module, said = kind.from_pretrained(
        str(folder), config=config, local_files_only=True, use_safetensors=True, dtype=dtype, output_loading_info=True
    )
    if own and said["missing_keys"]:
        missing = sorted(said["missing_keys"])
        raise FormatError(
            f"no file has tensor {missing[0]!r} ({len(missing)} missing), which {kind.__name__} needs", where=str(folder),
            hint="copy all files of the model, or name the class that is meant: hf:FOLDER:Class", data={"missing": missing[:32]},
        )  # fmt: skip
    found: nn.Module = module
    return found


def _without_values(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """Parameters on the meta device, buffers, which are computed from the configuration, with values. A parameter goes there as soon as it is set,
    so that nothing is ever drawn for it, and no more than one has memory."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        with _default_dtype(dtype):
            made: nn.Module = kind(config)
            return made
    finally:
        nn.Module.register_parameter = register


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_CONFIG_BYTES + 1)


def _class(library: Any, config: Any, name: HfName, fields: Mapping[str, Any]) -> Any:
    wanted = name.kind or next(iter(fields.get("architectures") or ()), "")
    if not wanted:
        for table in (library.MODEL_FOR_CAUSAL_LM_MAPPING, library.MODEL_MAPPING):
            if type(config) in table:
                return table[type(config)]
        raise UnknownName("the configuration names no class", where=str(name.config), hint=NAME_HINT)
    found = getattr(library, wanted, None)
    if not isinstance(found, type) or not issubclass(found, library.PreTrainedModel):
        raise UnknownName(f"transformers {library.__version__} has no model class {wanted!r}", where=str(name.config), hint=NAME_HINT)
    return found


def example_inputs(module: Any, config: Any, length: int) -> dict[str, torch.Tensor]:
    """Random inputs of a transformers module, by its main input and its kind of head."""
    sizes = _Sizes(config, length)
    kind, main = type(module).__name__, str(module.main_input_name)
    inputs = {main: sizes.main(main)}
    text = getattr(config, "text_config", None)
    if getattr(config, "is_encoder_decoder", False) and not kind.endswith(("Classification", "Encoder", "EncoderModel")):
        inputs["decoder_input_ids"] = sizes.tokens()
    elif main == "pixel_values" and text is not None:
        inputs = {"input_ids": sizes.tokens(), main: inputs[main]}
    labels = sizes.labels(kind)
    if labels is None:
        labels = _like_prediction(module, inputs)
    return {**inputs, "labels": labels}


def _like_prediction(module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """A target of the shape of what the module without a head returns."""
    with torch.no_grad():
        return torch.randn_like(prediction_of(module(**inputs)), dtype=torch.float32)


class _Sizes:
    def __init__(self, config: Any, length: int) -> None:
        self.config = config
        text = getattr(config, "text_config", None) or getattr(config, "decoder", None) or config
        self.vocabulary = _number(text, "vocab_size") or _number(config, "vocab_size") or 2
        most = min((x for k in ("max_position_embeddings", "n_positions", "max_target_positions") if (x := _number(text, k))), default=DEFAULT_LENGTH)
        self.length = length or max(1, min(DEFAULT_LENGTH, most))

    def tokens(self) -> torch.Tensor:
        return torch.randint(self.vocabulary, (ROWS, self.length))

    def main(self, name: str) -> torch.Tensor:
        config = self.config
        if name == "pixel_values":
            vision = getattr(config, "vision_config", None) or config
            size = getattr(vision, "image_size", None) or 224
            height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
            video = [count] if (count := _number(vision, "num_frames")) else []
            return torch.randn(ROWS, *video, _number(vision, "num_channels") or 3, height, width)
        if name == "input_features":
            frames = 2 * (_number(config, "max_source_positions") or AUDIO_SAMPLES // 80)
            return torch.randn(ROWS, _number(config, "num_mel_bins") or 80, frames)
        if name == "input_values" and (bins := _number(config, "num_mel_bins")):
            return torch.randn(ROWS, _number(config, "max_length") or AUDIO_SAMPLES // 4, bins)
        if name == "input_values":
            return torch.randn(ROWS, AUDIO_SAMPLES)
        return self.tokens()

    def labels(self, kind: str) -> torch.Tensor | None:
        """None for a module without a head."""
        classes = _number(self.config, "num_labels") or 2
        if kind.endswith(("ForTokenClassification",)):
            return torch.randint(classes, (ROWS, self.length))
        if kind.endswith(("Classification", "ClassificationWithTeacher")):
            return torch.randint(classes, (ROWS,))
        if kind.endswith(("LM", "LMHeadModel", "ForConditionalGeneration", "ForPreTraining", "ForCTC")):
            return self.tokens()
        return None


def _number(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
