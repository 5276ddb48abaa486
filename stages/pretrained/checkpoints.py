"""Loads models and tokenizers of the transformers library, only from a verified folder."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any, TypeVar

import torch
import transformers
from safetensors import SafetensorError
from tokenizers.normalizers import Replace
from tokenizers.normalizers import Sequence as Normalizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, Siglip2Tokenizer
from transformers.utils import logging

from stages.contract.base import StageUnusable
from stages.contract.descriptor import KnownModel as Known
from stages.contract.recognition import choose_model, name_model, read_config
from stages.images.devices import device_errors
from stages.pretrained.quantizing import check_small, make_smaller, refuse_quantized
from stages.pretrained.soundness import first_line, refuse_nan
from stages.pretrained.spreading import (
    finish_spreading,
    map_layers,
    name_for_transformers,
    quiet_about_parameters,
)

# No progress bars and configurations in a worker's log; real problems are raised below.
logging.set_verbosity_error()
logging.disable_progress_bar()

ATTENTIONS = {"sdpa", "eager"}  # any other name may be one of a kernel on the model hub

Model = TypeVar("Model", bound=PreTrainedModel)


def load_model(
    kind: type[Model],
    folder: str,
    dtype: torch.dtype,
    device: str,
    spread: Sequence[str] = (),
    small: str = "",
) -> Model:
    """A model in eval mode. Reads safetensors only: no pickle, no remote code, no network.

    spread: the devices on which its layers are to lie, instead of all on one device; `device` is the first.
    small: the dtype of its linear layers' weights: "int8", "float8" or "int4"; empty: as all else.
    Raises StageUnusable if the folder has no weights, those of another model, or some that are NaN; OutOfMemory and
    DeviceLost.
    """
    model: Model
    config = read_config(Path(folder) / "config.json")
    refuse_attention(folder, config)
    refuse_quantized(folder, config)
    if small:
        check_small(small, device)
    try:
        places = map_layers(kind, folder, dtype, spread) if spread else {}
        with device_errors(), quiet_about_parameters():
            model, report = kind.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # reported below, with what to do
                output_loading_info=True,
                **({"device_map": name_for_transformers(places)} if places else {}),
            )
    except (OSError, ValueError, LookupError, ImportError, SafetensorError) as error:
        raise StageUnusable(f"the {kind.__name__} in {folder} cannot be read: {first_line(error)}") from error
    if wrong := sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}):
        raise StageUnusable(
            f"{folder} does not hold a {kind.__name__}: {len(wrong)} of its weights are missing or of another shape, "
            f"{wrong[0]} first. Copy the whole folder again, or name another model."
        )
    with device_errors():
        refuse_nan(model, folder)
        if small:
            make_smaller(model, small, None if places else device)
        if places:
            return finish_spreading(model, places)
        model.eval().to(device)
    return model


def refuse_attention(folder: str, config: Mapping[str, Any]) -> None:
    """Raises StageUnusable if a config.json asks for an attention that is not of transformers or torch."""
    if strange := list_attentions(config) - ATTENTIONS:
        raise StageUnusable(
            f"{folder}/config.json asks for the attention {min(strange)}, which may be code of the model hub; remove "
            "attn_implementation from it."
        )


def list_attentions(config: Any) -> set[str]:
    """The implementations of attention that a config.json and its parts ask for."""
    if not isinstance(config, dict):
        return set()
    found = {str(value) for key, value in config.items() if key.endswith("attn_implementation") and value}
    return found.union(*map(list_attentions, config.values()))


def load_known(
    models: Sequence[Known],
    folder: str,
    dtype: torch.dtype,
    device: str,
    spread: Sequence[str] = (),
    small: str = "",
) -> Any:
    """A model of the class that the folder's config.json names, which must be one of these. The rest is as of load_model."""
    return load_model(find_kind(models, folder), folder, dtype, device, spread, small)


def outline_known(models: Sequence[Known], folder: str) -> Any:
    """The same model without weights, on the device "meta". Raises as load_known."""
    kind = find_kind(models, folder)
    config = load_part("config.json", AutoConfig, folder, trust_remote_code=False)
    with torch.device("meta"):
        return kind(config)


def find_kind(models: Sequence[Known], folder: str) -> type[PreTrainedModel]:
    """The class of the model in a folder, which must be one of these. Raises StageUnusable."""
    model_type, name = name_model(Path(folder))
    model = choose_model(models, model_type, name)
    if model is None:
        types = ", ".join(dict.fromkeys(model.type for model in models))
        raise StageUnusable(
            f'{folder} holds a model of the type "{model_type}", not one of {types}; name another model.'
        )
    kind: type[PreTrainedModel] = getattr(transformers, model.loaded_as or model.name)
    return kind


def load_tokenizer(folder: str) -> Any:
    """The folder's tokenizer, of the class that its tokenizer_config.json names. Raises StageUnusable."""
    tokenizer = load_part("tokenizer", AutoTokenizer, folder, trust_remote_code=False)
    lower(tokenizer)
    return tokenizer


def lower(tokenizer: Any) -> None:
    """Make text lower case where tokenizer_config.json says so and the class of transformers ignores it: Gemma's, of
    SigLIP 2 of a fixed size. Its authors' own tokenizer (big_vision's SigLIP2_demo.ipynb) lowers only the letters A to Z,
    so that the class for NaFlex, which lowers all letters, is corrected too."""
    if not tokenizer.is_fast:
        return
    backend = tokenizer.backend_tokenizer
    rest = backend.normalizer
    if isinstance(tokenizer, Siglip2Tokenizer):
        _, rest = rest
    elif not tokenizer.init_kwargs.get("do_lower_case") or (rest and rest.normalize_str("A") != "A"):
        return
    letters = [Replace(letter, letter.lower()) for letter in ascii_uppercase]
    backend.normalizer = Normalizers([*letters, *([rest] if rest else [])])


def load_part(what: str, kind: Any, folder: str, **options: Any) -> Any:
    """A model's tokenizer or image processor, saved beside its weights. Raises StageUnusable."""
    try:
        return kind.from_pretrained(folder, local_files_only=True, **options)
    except Exception as error:  # the tokenizers library raises Exception itself for a damaged file
        raise StageUnusable(f"the {what} in {folder} cannot be read: {first_line(error)}") from error


def convert_pickle(kind: type[PreTrainedModel], folder: Path) -> None:
    """Write model.safetensors from the folder's pytorch_model.bin, which torch's restricted loader reads.

    Raises ValueError if it contains anything but the weights of such a model.
    """
    try:
        model, report = kind.from_pretrained(
            folder, use_safetensors=False, weights_only=True, local_files_only=True, output_loading_info=True
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{folder / 'pytorch_model.bin'} is not a plain file of weights: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{folder / 'pytorch_model.bin'} is not a {kind.__name__}: {missing[0]} is missing.")
    model.save_pretrained(folder)
