"""Models and tokenizers of the transformers library, from a verified folder and from nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging

# A worker's log is no place for progress bars and configurations; what matters of a load is raised below.
logging.set_verbosity_error()
logging.disable_progress_bar()

Model = TypeVar("Model", bound=PreTrainedModel)


def load_model(kind: type[Model], folder: str, dtype: torch.dtype, device: str) -> Model:
    """A model in eval mode. Reads safetensors only: no pickle, no remote code, no network.

    Raises ValueError when the folder's weights are not those of such a model, OSError when it holds none.
    """
    model: Model
    model, report = kind.from_pretrained(
        folder,
        dtype=dtype,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    if wrong := sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}):
        raise ValueError(
            f"{folder} does not hold a {kind.__name__}: {len(wrong)} of its weights are missing or of another shape, "
            f"{wrong[0]} first. Copy the whole folder again, or name another model."
        )
    return model.eval().to(device)


def load_tokenizer(folder: str) -> Any:
    """The folder's tokenizer, of whichever class its tokenizer_config.json names."""
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def convert_pickle(kind: type[PreTrainedModel], folder: Path) -> None:
    """Write model.safetensors from the folder's pytorch_model.bin, which torch's restricted loader reads.

    Raises ValueError when they are not the weights of such a model.
    """
    model, report = kind.from_pretrained(
        folder, use_safetensors=False, weights_only=True, local_files_only=True, output_loading_info=True
    )
    if report["missing_keys"]:
        raise ValueError(
            f"{folder}: {sorted(report['missing_keys'])[0]} is missing; these are no weights of {kind.__name__}."
        )
    model.save_pretrained(folder)
