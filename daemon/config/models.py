"""The tables of daemon.toml about models: the pack, and each stage's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import InitErrorDetails

from daemon.config.sections import Section
from daemon.config.values import Dtype
from stages.registry.registry import STAGES, has_stage


class ModelsSection(Section):
    pack: str = "mini"
    """Pack to use: "mini" (inside the package), "standard" (after `visiond models pull`), or the path of a folder, with a
    slash."""
    folder: Path = Path("models")
    """Folder for downloaded packs."""


class StageSection(Section):
    backend: str = ""
    """Empty: the backend that the pack names. "fake": invented results without a model, for tests."""
    model: str = ""
    """Weights for this stage only: a name that `visiond models list` shows, a repository of the model hub such as org/name or
    org/name@revision, both after `visiond models pull NAME`; a pack; or the path of a folder, with a slash. Empty: the weights
    of the pack."""
    dtype: Dtype = "auto"
    """half: bfloat16 or float16, as suits the model. auto: half on GPUs since Ampere, float16 on older ones, float32 on a CPU,
    where all others are slower, for ocr many times. The oldest of the GPUs in `[pipeline] devices` decides, also if
    min_free_gpu_bytes leaves it out. int8, float8, int4: smaller weights; see docs/models.md."""
    batch_size: int = Field(0, ge=0, le=65_536)
    """Largest number of images in a forward pass. 0: as `visiond tune` measured; without that, 8 on a CPU, up to 128 on a GPU,
    by its free memory."""
    options: dict[str, Any] = {}
    """Options of the backend; docs/configuration.md lists them."""


class _Tables(Section):
    """A table for each stage, also for variants such as classifier_safety."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, StageSection] = Field(init=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, tables: Any) -> Any:
        unknown = [name for name in tables if not has_stage(name)] if isinstance(tables, dict) else []
        if unknown:
            problems = [
                InitErrorDetails(type="extra_forbidden", loc=(name,), input=tables[name]) for name in unknown
            ]
            raise ValidationError.from_exception_data("stages", problems)
        return tables


if TYPE_CHECKING:

    class StageTables(_Tables): ...
else:  # a table for each stage, including those of plug-ins
    StageTables = create_model(
        "StageTables", __base__=_Tables, **{name: (StageSection, StageSection()) for name in STAGES}
    )


def table_of(tables: StageTables, name: str) -> StageSection:
    """The table of a stage; the defaults if the configuration has none."""
    return getattr(tables, name, None) or StageSection()
